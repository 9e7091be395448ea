/** Text that is sent while it is typed: which part is complete, and which part was sent. */

// A word is complete before white space, after punctuation, and after a character of a script
// that is written without spaces. Punctuation after a digit may be part of a number.
const COMPLETE =
  /\s|(?<=\P{Nd})[.,!?;:…](?=$|\s)|[。，！？；：、]|[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}]/gu;

/**
 * Gives the length of the complete words at the start of a text that may continue.
 * @param {string} text
 * @returns {number}
 */
export function completeLength(text) {
  let length = 0;
  for (const match of text.matchAll(COMPLETE)) length = match.index + match[0].length;
  return length;
}

/**
 * Gives the length of the text that two strings share, cut back to the start of a word.
 * @param {string} text
 * @param {string} other
 * @returns {number}
 */
function sharedLength(text, other) {
  let length = 0;
  while (length < text.length && text[length] === other[length]) length += 1;
  return completeLength(text.slice(0, length));
}

/** The text of a field, and how much of it was taken to be sent. */
export class LiveText {
  /** Number of characters that were taken. */
  takenLength = 0;
  #text = "";

  /** The whole text. */
  get text() {
    return this.#text;
  }

  /** Whether words remain to be taken. */
  get hasMore() {
    return this.#text.slice(this.takenLength).trim() !== "";
  }

  /**
   * Sets the text.
   * @param {string} text
   * @returns {boolean} Whether text that was taken has changed; it counts as not taken from there.
   */
  edit(text) {
    const taken = this.#text.slice(0, this.takenLength);
    this.#text = text;
    if (text.startsWith(taken)) return false;
    this.takenLength = sharedLength(taken, text);
    return true;
  }

  /**
   * Takes the next text.
   * @param {boolean} all Whether to take the last word although it may be incomplete.
   * @returns {string} Empty if there is none.
   */
  take(all) {
    const rest = this.#text.slice(this.takenLength);
    const text = all ? rest : rest.slice(0, completeLength(rest));
    this.takenLength += text.length;
    return text;
  }

  /** Has the text taken again from its start. */
  restart() {
    this.takenLength = 0;
  }
}
