/** The section in which voices are cloned. */

import { find, setText } from "./elements.js";
import { canRecord, readFile, Recorder } from "./recorder.js";
import { encodeWav } from "./wav.js";
/** @typedef {import("./recorder.js").Recording} Recording */
/** @typedef {import("./server.js").Server} Server */

const PATH = "v1/audio/voices";
const MIN_S = 3;
const MAX_S = 15; // at which a recording of the microphone stops
const MAX_FILE_S = 60;
const PASSAGE =
  "On calm mornings the harbour is quiet. Two boats leave early, and before noon the market is " +
  "full of voices, fruit and fresh bread. Would you like to join us?";

/** Records a speaker, sends the recording, and lists the voices that were made. */
export class Cloning {
  #form = find("cloning-form", HTMLFormElement);
  #text = find("ref-text", HTMLTextAreaElement);
  #recordButton = find("record", HTMLButtonElement);
  #level = find("level", HTMLProgressElement);
  #file = find("file", HTMLInputElement);
  #audio = find("recording", HTMLAudioElement);
  #name = find("name", HTMLInputElement);
  #state = find("cloning-state", HTMLElement);
  #list = find("cloned-voices", HTMLUListElement);
  /** @type {Recorder | null} */
  #recorder = null;
  /** @type {Blob | null} */
  #sample = null;

  /**
   * @param {Server} server
   * @param {(name: string) => void} onChange Receives the name of a new voice; empty if one was
   *   deleted.
   */
  constructor(server, onChange) {
    this.server = server;
    this.onChange = onChange;
    this.#text.value = PASSAGE;
    this.#recordButton.hidden = !canRecord;
    this.#recordButton.addEventListener("click", () => this.#report(this.#toggleRecorder()));
    this.#file.addEventListener("change", () => this.#report(this.#readFile()));
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#report(this.#send());
    });
  }

  /** Shows the section. */
  show() {
    find("cloning", HTMLElement).hidden = false;
    this.#report(this.#showVoices());
  }

  /**
   * Shows the error of an action.
   * @param {Promise<void>} action
   */
  async #report(action) {
    try {
      await action;
    } catch (error) {
      setText(this.#state, error instanceof Error ? error.message : String(error));
    }
  }

  async #toggleRecorder() {
    if (this.#recorder) {
      const recording = this.#recorder.stop();
      this.#recorder = null;
      this.#recordButton.textContent = "Record again";
      this.#level.hidden = true;
      this.#take(recording, MAX_S + 1);
      return;
    }
    this.#recordButton.disabled = true; // while the user is asked for the microphone
    try {
      this.#recorder = await Recorder.start((level, seconds) => this.#showLevel(level, seconds));
    } finally {
      this.#recordButton.disabled = false;
      this.#recordButton.focus();
    }
    this.#level.hidden = false;
    setText(this.#state, "Recording.");
  }

  /**
   * @param {number} level
   * @param {number} seconds
   */
  #showLevel(level, seconds) {
    if (!this.#recorder) return;
    this.#level.value = level;
    this.#recordButton.textContent = `Stop (${Math.floor(seconds)} s)`;
    if (seconds >= MAX_S) this.#report(this.#toggleRecorder());
  }

  async #readFile() {
    const file = this.#file.files?.[0];
    if (!file) return;
    if (this.#text.value === PASSAGE) this.#text.value = "";
    let recording;
    try {
      recording = await readFile(file);
    } catch {
      throw new Error(`The browser cannot read ${file.name} as audio.`);
    }
    this.#take(recording, MAX_FILE_S);
  }

  /**
   * @param {Recording} recording
   * @param {number} maxS
   */
  #take({ samples, sampleRate }, maxS) {
    const seconds = samples.length / sampleRate;
    this.#sample = null;
    this.#audio.hidden = true;
    if (seconds < MIN_S || seconds > maxS)
      throw new Error(`The recording has ${seconds.toFixed(1)} s; it needs ${MIN_S} to ${maxS} s.`);
    this.#sample = encodeWav(samples, sampleRate);
    URL.revokeObjectURL(this.#audio.src);
    this.#audio.src = URL.createObjectURL(this.#sample);
    this.#audio.hidden = false;
    setText(this.#state, `The recording has ${seconds.toFixed(1)} s.`);
  }

  async #send() {
    if (!this.#sample) throw new Error("Record a speaker or choose a file first.");
    const name = this.#name.value.trim();
    const body = new FormData();
    body.append("audio_sample", this.#sample, "recording.wav");
    body.append("name", name);
    body.append("consent", find("consent-text", HTMLElement).innerText);
    if (this.#text.value.trim()) body.append("ref_text", this.#text.value.trim());
    setText(this.#state, "Cloning.");
    await this.server.request(PATH, { method: "POST", body });
    await this.#showVoices();
    setText(this.#state, `The voice ${name} is ready and selected.`);
    this.onChange(name);
  }

  async #showVoices() {
    const { uploaded_voices: voices } = await this.server.request(PATH);
    this.#list.replaceChildren(
      ...voices.map((/** @type {{name: string}} */ { name }) => this.#makeItem(name)),
    );
  }

  /** @param {string} name */
  #makeItem(name) {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Delete";
    button.setAttribute("aria-label", `Delete the voice ${name}`);
    button.addEventListener("click", () => this.#report(this.#delete(name)));
    item.append(name, button);
    return item;
  }

  /** @param {string} name */
  async #delete(name) {
    await this.server.request(`${PATH}/${encodeURIComponent(name)}`, { method: "DELETE" });
    await this.#showVoices();
    setText(this.#state, `The voice ${name} was deleted.`);
    this.#name.focus();
    this.onChange("");
  }
}
