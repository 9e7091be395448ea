/** Cartesia's WebSocket: contexts, each of which speaks one turn. */

import { SAMPLE_RATE } from "./player.js";
/** @typedef {import("./server.js").Server} Server */

/**
 * Voice and language of a context.
 * @typedef {{voice: string | null, language: string, instruct: string}} Settings
 */

/**
 * What a context reports, each as it happens.
 * @typedef {object} Listener
 * @property {() => void} onSent Text has left the browser.
 * @property {(samples: Float32Array) => void} onAudio
 * @property {(words: {text: string, startS: number}[]) => void} onWords Before their audio.
 * @property {(error: string) => void} onEnd The stream has ended; empty without an error.
 */

/** One turn: text goes in, audio and words come out. */
export class SpeechContext {
  #first = true;

  /**
   * @param {(message: object, onSent?: () => void) => void} send
   * @param {string} id
   * @param {Settings} settings
   * @param {Listener} listener
   */
  constructor(send, id, settings, listener) {
    this.send = send;
    this.id = id;
    this.settings = settings;
    this.listener = listener;
  }

  /**
   * Adds text.
   * @param {string} text
   * @param {boolean} more Whether text may follow.
   */
  push(text, more) {
    const message = { context_id: this.id, transcript: text, continue: more };
    this.send(this.#first ? { ...message, ...this.#format() } : message, this.listener.onSent);
    this.#first = false;
  }

  #format() {
    const { voice, language, instruct } = this.settings;
    return {
      model_id: "qwen3-tts",
      voice: voice && { mode: "id", id: voice },
      language,
      ...(instruct && { instruct }),
      output_format: { container: "raw", encoding: "pcm_s16le", sample_rate: SAMPLE_RATE },
      add_timestamps: true,
    };
  }
}

/** A connection, which is opened again when it is needed. */
export class SpeechSocket {
  /** @type {WebSocket | null} */
  #socket = null;
  /**
   * Messages for the time when the connection is open.
   * @type {(() => void)[]}
   */
  #pending = [];
  /** @type {Map<string, SpeechContext>} */
  #contexts = new Map();
  #numOpened = 0;

  /** @param {Server} server */
  constructor(server) {
    this.server = server;
  }

  /** Opens the connection, so that a later message need not wait for it. */
  connect() {
    if (this.#socket) return;
    const socket = this.server.openSocket();
    socket.onopen = () => this.#pending.splice(0).forEach((send) => send());
    socket.onmessage = ({ data }) => this.#receive(JSON.parse(data));
    socket.onclose = () => this.#close();
    this.#socket = socket;
  }

  /**
   * Begins a turn.
   * @param {Settings} settings
   * @param {Listener} listener
   */
  open(settings, listener) {
    /** @type {SpeechContext["send"]} */
    const send = (message, onSent) => this.#send(message, onSent);
    this.#numOpened += 1;
    const context = new SpeechContext(send, `turn-${this.#numOpened}`, settings, listener);
    this.#contexts.set(context.id, context);
    return context;
  }

  /**
   * Stops a turn, which then reports nothing more.
   * @param {SpeechContext} context
   */
  cancel(context) {
    if (this.#contexts.delete(context.id)) this.#send({ context_id: context.id, cancel: true });
  }

  /**
   * @param {object} message
   * @param {() => void} [onSent]
   */
  #send(message, onSent) {
    this.connect();
    const send = () => {
      this.#socket?.send(JSON.stringify(message));
      onSent?.();
    };
    if (this.#socket?.readyState === WebSocket.OPEN) send();
    else this.#pending.push(send);
  }

  /** @param {any} event */
  #receive(event) {
    const context = this.#contexts.get(event.context_id);
    if (!context) return;
    if (event.type === "chunk") {
      context.listener.onAudio(decodeSamples(event.data));
    } else if (event.type === "timestamps") {
      const { words, start } = event.word_timestamps;
      context.listener.onWords(
        words.map((/** @type {string} */ text, /** @type {number} */ index) => ({
          text,
          startS: start[index],
        })),
      );
    } else if (event.type === "done" || event.type === "error") {
      this.#contexts.delete(context.id);
      context.listener.onEnd(event.message ?? "");
    }
  }

  #close() {
    this.#socket = null;
    this.#pending = [];
    const contexts = [...this.#contexts.values()];
    this.#contexts.clear();
    for (const { listener } of contexts) listener.onEnd("The connection to the server was lost.");
  }
}

/**
 * Decodes 16-bit samples in base64.
 * @param {string} data
 */
function decodeSamples(data) {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const integers = new Int16Array(bytes.buffer);
  return Float32Array.from(integers, (sample) => sample / 32768);
}
