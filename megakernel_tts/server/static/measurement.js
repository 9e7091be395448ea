/** Times of one turn, in milliseconds from its first text. */

const BURST_S = 0.4; // duration of the audio over which the real-time factor is computed

/**
 * A chunk of audio: when it arrived, and its duration.
 * @typedef {{atMs: number, seconds: number}} Chunk
 */

/**
 * Gives the real-time factor: seconds per second of audio, over the fastest part of a stream.
 *
 * The server waits for text, and sends audio at most 1.5 s before it is played. Between these waits
 * audio arrives as fast as it is made.
 * @param {Chunk[]} chunks
 * @returns {number | null} Null if there is too little audio.
 */
export function realTimeFactor(chunks) {
  let factor = null;
  let first = 0;
  let seconds = 0; // of the chunks after `first`
  for (let last = 1; last < chunks.length; last += 1) {
    seconds += chunks[last].seconds;
    while (seconds - chunks[first + 1].seconds >= BURST_S) {
      first += 1;
      seconds -= chunks[first].seconds;
    }
    if (seconds < BURST_S) continue;
    const here = (chunks[last].atMs - chunks[first].atMs) / 1000 / seconds;
    factor = factor === null ? here : Math.min(factor, here);
  }
  return factor;
}

/** What happened in a turn, and when. */
export class Measurement {
  /**
   * Times at which text was sent.
   * @type {number[]}
   */
  sentMs = [];
  /** @type {Chunk[]} */
  chunks = [];
  /**
   * Intervals in which audio is played, without gaps inside.
   * @type {[number, number][]}
   */
  playback = [];
  /**
   * When the server ended the stream, or the listener interrupted it.
   * @type {number | null}
   */
  endMs = null;
  /** Seconds of audio. */
  audioS = 0;
  /** @type {number | null} */
  #originMs = null;

  /** Records that text was sent. */
  addText() {
    this.#originMs ??= performance.now();
    this.sentMs.push(this.nowMs);
  }

  /**
   * Records a chunk.
   * @param {number} seconds
   * @param {number | null} startMs When it is played, by the browser's clock; null if it is played
   *   directly after the chunk before.
   */
  addChunk(seconds, startMs) {
    this.chunks.push({ atMs: this.nowMs, seconds });
    this.audioS += seconds;
    if (startMs !== null) {
      const start = startMs - (this.#originMs ?? 0);
      this.playback.push([start, start]);
    }
    this.playback[this.playback.length - 1][1] += 1000 * seconds;
  }

  /** Records the end of the stream. */
  end() {
    this.endMs ??= this.nowMs;
  }

  /** Records that playback was stopped. */
  stop() {
    this.end();
    const now = this.nowMs;
    this.playback = this.playback
      .filter(([start]) => start < now)
      .map(([start, end]) => [start, Math.min(end, now)]);
  }

  /** Milliseconds since the first text. */
  get nowMs() {
    return this.#originMs === null ? 0 : performance.now() - this.#originMs;
  }

  /** Milliseconds from the first text to the first audio; null if there is none. */
  get firstChunkMs() {
    return this.chunks.length ? this.chunks[0].atMs : null;
  }

  /** See `realTimeFactor`. */
  get realTimeFactor() {
    return realTimeFactor(this.chunks);
  }
}
