/** The server of this page: its addresses, its key, and its state. */

const KEY = "megakernel-tts-api-key"; // name in the session's storage

/** The server needs a valid key. */
export class KeyNeededError extends Error {}

/**
 * What `/status` reports.
 * @typedef {object} Status
 * @property {string} version
 * @property {string} model
 * @property {string | null} note A remark on the model.
 * @property {string} kind `base`, `custom_voice` or `voice_design`.
 * @property {{name: string, languages: string[]}[]} voices The default one first.
 * @property {string[]} languages
 * @property {boolean} takes_instruct Whether the model follows an instruction.
 * @property {boolean} takes_voices Whether voices can be uploaded.
 * @property {number} num_slots Streams that can speak at once.
 * @property {number} num_speaking
 * @property {number} num_waiting
 * @property {string | null} unready_reason
 */

/** Sends requests with the key of the user. */
export class Server {
  #base = new URL(".", document.baseURI);

  /** The URL of the server, without a slash at its end. */
  get url() {
    return this.#base.href.replace(/\/$/, "");
  }

  /** The same for WebSockets. */
  get socketUrl() {
    return this.url.replace(/^http/, "ws");
  }

  /** The key; empty if there is none. */
  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(key) {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  }

  /**
   * Sends a request.
   * @param {string} path Without a slash at its start.
   * @param {RequestInit} [options]
   * @returns {Promise<any>} The JSON value of the reply.
   * @throws {KeyNeededError} The key is missing or invalid.
   * @throws {Error} The server refused the request, for the reason in the message.
   */
  async request(path, options = {}) {
    const headers = new Headers(options.headers);
    if (this.key) headers.set("X-API-Key", this.key);
    const reply = await fetch(new URL(path, this.#base), { ...options, headers });
    const value = await reply.json().catch(() => ({}));
    if (reply.status === 401) throw new KeyNeededError(value.error?.message);
    if (!reply.ok) throw new Error(value.error?.message ?? `The server answered ${reply.status}.`);
    return value;
  }

  /** @returns {Promise<Status>} */
  status() {
    return this.request("status");
  }

  /** Opens Cartesia's WebSocket, to which browsers add no headers. */
  openSocket() {
    const query = this.key ? `?api_key=${encodeURIComponent(this.key)}` : "";
    return new WebSocket(`${this.socketUrl}/tts/websocket${query}`);
  }
}
