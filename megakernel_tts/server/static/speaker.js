/** Speaks the text of a field, turn after turn. */

import { LiveText } from "./live-text.js";
import { Turn } from "./turn.js";
/** @typedef {import("./player.js").Player} Player */
/** @typedef {import("./speech-socket.js").Settings} Settings */
/** @typedef {import("./speech-socket.js").SpeechSocket} SpeechSocket */

const IDLE_MS = 2000; // without a key press, after which a turn is ended

/** Sends complete words while they are typed. One turn is spoken at a time; the next one waits. */
export class Speaker {
  text = new LiveText();
  /**
   * The last turn.
   * @type {Turn | null}
   */
  turn = null;
  /** Whether the last word is complete as well, so that the turn may end. */
  #lastWordComplete = false;
  /** @type {Settings} */
  #settings = { voice: null, language: "auto", instruct: "" };
  #idleTimer = 0;

  /**
   * @param {SpeechSocket} socket
   * @param {Player} player
   * @param {() => void} onChange Called when a turn begins or ends.
   */
  constructor(socket, player, onChange) {
    this.socket = socket;
    this.player = player;
    this.onChange = onChange;
  }

  /** Whether a turn is being spoken. */
  get speaking() {
    return this.turn?.active ?? false;
  }

  /**
   * Sets voice and language of the turns that begin from now on.
   * @param {Settings} settings
   */
  set settings(settings) {
    this.#settings = settings;
    if (this.turn?.active && !this.turn.textEnded) this.turn.push("", false);
  }

  /**
   * Speaks the complete words of a text that is being typed.
   *
   * A change of words that were sent interrupts the turn; the next one begins with that change.
   * @param {string} text
   */
  edit(text) {
    this.#lastWordComplete = false;
    if (this.text.edit(text)) this.turn?.interrupt();
    this.#speak();
    clearTimeout(this.#idleTimer);
    this.#idleTimer = setTimeout(() => this.#end(), IDLE_MS);
  }

  /** Speaks the text to its end, or once more if all of it was spoken. */
  finish() {
    const open = this.turn?.active && !this.turn.textEnded;
    if (!open && !this.text.hasMore) {
      this.turn?.interrupt();
      this.text.restart();
    }
    this.#end();
  }

  /** Stops the turn. Text that was not spoken is dropped. */
  interrupt() {
    clearTimeout(this.#idleTimer);
    this.text.take(true);
    this.turn?.interrupt();
  }

  #end() {
    this.#lastWordComplete = true;
    this.#speak();
  }

  #speak() {
    let turn = this.turn?.active ? this.turn : null;
    if (turn?.textEnded) return; // continues when it has ended
    const start = this.text.takenLength;
    const text = this.text.take(this.#lastWordComplete);
    if (!turn && text.trim()) {
      turn = this.#begin(start);
    }
    if (text || this.#lastWordComplete) turn?.push(text, !this.#lastWordComplete);
    this.#lastWordComplete = false;
  }

  /** @param {number} start Of the turn in the text. */
  #begin(start) {
    const onEnd = () => {
      this.onChange();
      this.#speak();
    };
    const { socket, player, text } = this;
    this.turn = new Turn(socket, player, this.#settings, text, start, onEnd);
    this.onChange();
    return this.turn;
  }
}
