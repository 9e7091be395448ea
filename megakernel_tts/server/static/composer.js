/** The text, its controls, and the words that are being spoken in it. */

import { find, setChoices, setText } from "./elements.js";
/** @typedef {import("./server.js").Status} Status */
/** @typedef {import("./speaker.js").Speaker} Speaker */

const capitalized = (/** @type {string} */ name) => name.charAt(0).toUpperCase() + name.slice(1);

/** The form in which text is written. */
export class Composer {
  #text = find("text", HTMLTextAreaElement);
  #mirror = [...find("mirror", HTMLDivElement).children];
  #voice = find("voice", HTMLSelectElement);
  #language = find("language", HTMLSelectElement);
  #instruct = find("instruct", HTMLInputElement);
  #stop = find("stop", HTMLButtonElement);
  #state = find("speech-state", HTMLParagraphElement);
  /** @type {Status["voices"]} */
  #voices = [];
  /** @type {string[]} */
  #languages = [];

  /**
   * @param {Speaker} speaker
   * @param {() => void} onVoice Called when another voice is selected.
   */
  constructor(speaker, onVoice) {
    this.speaker = speaker;
    this.onVoice = onVoice;
    this.#text.addEventListener("input", (event) => {
      if (!(event instanceof InputEvent && event.isComposing)) this.#edit();
    });
    this.#text.addEventListener("compositionend", () => this.#edit());
    this.#text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#finish(event);
    });
    find("composer", HTMLFormElement).addEventListener("submit", (event) => this.#finish(event));
    this.#stop.addEventListener("click", () => this.#interrupt());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) this.#interrupt();
    });
    this.#voice.addEventListener("change", () => this.#changeVoice());
    for (const control of [this.#language, this.#instruct])
      control.addEventListener("change", () => this.#applySettings());
  }

  /** Name of the selected voice; null if the model has none. */
  get voice() {
    return this.#voice.value || null;
  }

  /**
   * Shows the voices and languages of the model.
   * @param {Status} status
   */
  describe(status) {
    this.#voices = status.voices;
    this.#languages = status.languages;
    setChoices(
      this.#voice,
      status.voices.map(({ name }) => [name, capitalized(name)]),
    );
    find("voice-field", HTMLDivElement).hidden = status.voices.length === 0;
    find("instruct-field", HTMLDivElement).hidden = !status.takes_instruct;
    const describesVoice = status.kind === "voice_design";
    find("instruct-label", HTMLLabelElement).textContent = describesVoice
      ? "Description of the voice"
      : "Speaking style";
    this.#changeVoice();
  }

  /**
   * Selects a voice.
   * @param {string} name Its case does not matter.
   */
  selectVoice(name) {
    const voice = this.#voices.find((each) => each.name.toLowerCase() === name.toLowerCase());
    if (!voice) return;
    this.#voice.value = voice.name;
    this.#changeVoice();
  }

  focus() {
    this.#text.focus();
  }

  #changeVoice() {
    const voice = this.#voices.find(({ name }) => name === this.voice);
    const languages = voice?.languages ?? this.#languages;
    setChoices(this.#language, [
      ["auto", "Automatic"],
      ...languages.map((name) => /** @type {[string, string]} */ ([name, capitalized(name)])),
    ]);
    this.#applySettings();
    this.onVoice();
  }

  #applySettings() {
    this.speaker.settings = {
      voice: this.voice,
      language: this.#language.value,
      instruct: this.#instruct.value,
    };
  }

  #edit() {
    this.speaker.player.allow();
    this.speaker.edit(this.#text.value);
    this.update();
  }

  /** @param {Event} event */
  #finish(event) {
    event.preventDefault();
    this.speaker.player.allow();
    this.speaker.finish();
  }

  #interrupt() {
    if (!this.speaker.speaking) return;
    this.speaker.interrupt();
    this.focus(); // the button that had the focus may be disabled now
  }

  /** Shows the state of the turn, and its words in the text. */
  update() {
    this.#stop.disabled = !this.speaker.speaking;
    setText(this.#state, this.#describeState());
    const { text, takenLength } = this.speaker.text;
    const range = this.speaker.turn?.spokenRange ?? [takenLength, takenLength];
    const [start, end] = range.map((offset) => Math.min(offset, takenLength));
    const parts = [
      text.slice(0, start),
      text.slice(start, end),
      text.slice(end, takenLength),
      `${text.slice(takenLength)}\n`, // an empty last line has a height only if a line follows
    ];
    parts.forEach((part, index) => setText(this.#mirror[index], part));
  }

  #describeState() {
    const { turn } = this.speaker;
    if (!turn) return "Ready.";
    if (turn.state === "speaking") return "Speaking.";
    if (turn.state === "failed") return turn.error;
    const seconds = turn.measurement.audioS.toFixed(1);
    if (turn.state === "finished") return `Finished: ${seconds} s of audio.`;
    const played = this.speaker.text.text.slice(0, turn.spokenRange[1]);
    const lastWord = played.trim().split(/\s+/).at(-1);
    return lastWord ? `Interrupted after “${lastWord}”.` : "Interrupted.";
  }
}
