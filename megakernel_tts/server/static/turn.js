/** One turn: its text on the way to the server, its audio, and the words that were played. */

import { Measurement } from "./measurement.js";
import { SAMPLE_RATE } from "./player.js";
/** @typedef {import("./live-text.js").LiveText} LiveText */
/** @typedef {import("./player.js").Player} Player */
/** @typedef {import("./speech-socket.js").Settings} Settings */
/** @typedef {import("./speech-socket.js").SpeechContext} SpeechContext */
/** @typedef {import("./speech-socket.js").SpeechSocket} SpeechSocket */

/**
 * A word: its place in the text, and its start in seconds of the stream.
 * @typedef {{start: number, end: number, startS: number}} PlacedWord
 */

/** A turn begins with its first text and ends when its audio was played. */
export class Turn {
  measurement = new Measurement();
  /** @type {"speaking" | "finished" | "interrupted" | "failed"} */
  state = "speaking";
  /** Why it failed. */
  error = "";
  /** Whether no more text may be added. */
  textEnded = false;
  #streamEnded = false;
  /** @type {PlacedWord[]} */
  #words = [];
  /** @type {SpeechContext} */
  #context;
  /** Where the text that was played ends; of an active turn, where it starts. */
  #playedLength;

  /**
   * @param {SpeechSocket} socket
   * @param {Player} player
   * @param {Settings} settings
   * @param {LiveText} text
   * @param {number} start Where the turn begins in the text.
   * @param {() => void} onEnd
   */
  constructor(socket, player, settings, text, start, onEnd) {
    this.socket = socket;
    this.player = player;
    this.text = text;
    this.onEnd = onEnd;
    this.#playedLength = start;
    this.#context = socket.open(settings, {
      onSent: () => this.measurement.addText(),
      onAudio: (samples) => this.#play(samples),
      onWords: (words) => this.#place(words),
      onEnd: (error) => this.#endStream(error),
    });
    player.begin();
    player.onIdle = () => this.#finish();
  }

  /** Whether it was neither spoken to its end nor stopped. */
  get active() {
    return this.state === "speaking";
  }

  /**
   * Sends the next text.
   * @param {string} text
   * @param {boolean} more Whether text may follow.
   */
  push(text, more) {
    this.textEnded = !more;
    this.#context.push(text, more);
  }

  /** Stops the turn in the server and in the browser. */
  interrupt() {
    if (!this.active) return;
    this.#playedLength = this.spokenRange[1];
    this.socket.cancel(this.#context);
    this.player.stop();
    this.measurement.stop();
    this.#end("interrupted");
  }

  /**
   * The place of the word that is being spoken; an empty one after what was spoken if there is none.
   * @returns {[number, number]}
   */
  get spokenRange() {
    const { takenLength } = this.text;
    if (this.state === "finished") return [takenLength, takenLength];
    if (!this.active) return [this.#playedLength, this.#playedLength];
    const position = this.player.positionS;
    const word = this.#words.findLast(({ startS }) => startS <= position);
    return word ? [word.start, word.end] : [this.#playedLength, this.#playedLength];
  }

  /** @param {Float32Array} samples */
  #play(samples) {
    const startMs = this.player.play(samples);
    this.measurement.addChunk(samples.length / SAMPLE_RATE, startMs);
  }

  /** @param {{text: string, startS: number}[]} words */
  #place(words) {
    for (const { text, startS } of words) {
      const from = this.#words.at(-1)?.end ?? this.#playedLength;
      const start = this.text.text.indexOf(text, from);
      if (start >= 0) this.#words.push({ start, end: start + text.length, startS });
    }
  }

  /** @param {string} error */
  #endStream(error) {
    this.measurement.end();
    this.#streamEnded = true;
    this.textEnded = true;
    this.error = error;
    if (!this.player.busy) this.#finish();
  }

  #finish() {
    if (this.active && this.#streamEnded) this.#end(this.error ? "failed" : "finished");
  }

  /** @param {"finished" | "interrupted" | "failed"} state */
  #end(state) {
    this.state = state;
    this.textEnded = true;
    this.onEnd();
  }
}
