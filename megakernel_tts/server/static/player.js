/** Playback of audio that arrives in chunks, and its clock. */

export const SAMPLE_RATE = 24_000;
const START_DELAY = 960; // samples (40 ms) before the first chunk, for chunks that are delayed
const FADE_S = 0.008; // at a stop, so that it does not click
// Firefox holds the lock of its audio graph while it asks the sound server for the latency. If the
// server's callback waits for that lock, the page never runs again.
const KNOWS_LATENCY = !navigator.userAgent.includes("Firefox/");

/**
 * A chunk in playback: its start by the clock of the context, and in the stream.
 * @typedef {{startS: number, offsetS: number, endS: number}} Piece
 */

/** Plays one stream at a time, without gaps between chunks that arrive in time. */
export class Player {
  /** @type {AudioContext | null} */
  #context = null;
  /** @type {GainNode | null} */
  #output = null;
  /** @type {Set<AudioBufferSourceNode>} */
  #sources = new Set();
  /** @type {Piece[]} */
  #pieces = [];
  #endSample = 0; // of the last chunk, by the clock of the context
  #durationS = 0;
  /**
   * Is called when all audio so far was played.
   * @type {() => void}
   */
  onIdle = () => {};

  /** Whether audio remains to be played. */
  get busy() {
    return this.#sources.size > 0;
  }

  /** Prepares playback; browsers allow it while an event of the user is handled. */
  allow() {
    this.#context ??= new AudioContext({ sampleRate: SAMPLE_RATE, latencyHint: "interactive" });
    if (this.#context.state === "suspended") this.#context.resume();
    return this.#context;
  }

  /** Begins a stream; the one before has ended or was stopped. */
  begin() {
    const context = this.allow();
    this.#output = new GainNode(context);
    this.#output.connect(context.destination);
    this.#pieces = [];
    this.#durationS = 0;
  }

  /**
   * Plays a chunk after the chunks before it.
   * @param {Float32Array} samples
   * @returns {number | null} When it begins, by the browser's clock; null if it follows directly.
   */
  play(samples) {
    const context = this.allow();
    const now = Math.ceil(context.currentTime * SAMPLE_RATE);
    const follows = this.#endSample > now;
    const start = follows ? this.#endSample : now + START_DELAY;
    this.#endSample = start + samples.length;
    this.#schedule(context, samples, start / SAMPLE_RATE);
    const piece = {
      startS: start / SAMPLE_RATE,
      offsetS: this.#durationS,
      endS: this.#endSample / SAMPLE_RATE,
    };
    this.#pieces.push(piece);
    this.#durationS += samples.length / SAMPLE_RATE;
    const delayS = piece.startS - context.currentTime + this.#latencyS;
    return follows ? null : performance.now() + 1000 * delayS;
  }

  /**
   * @param {AudioContext} context
   * @param {Float32Array} samples
   * @param {number} startS
   */
  #schedule(context, samples, startS) {
    const buffer = context.createBuffer(1, samples.length, SAMPLE_RATE);
    buffer.copyToChannel(samples, 0);
    const source = new AudioBufferSourceNode(context, { buffer });
    source.connect(/** @type {GainNode} */ (this.#output));
    source.onended = () => {
      this.#sources.delete(source);
      if (!this.busy) this.onIdle();
    };
    source.start(startS);
    this.#sources.add(source);
  }

  /** Seconds from the context to the loudspeaker, as far as they are known. */
  get #latencyS() {
    return KNOWS_LATENCY && this.#context ? this.#context.outputLatency : 0;
  }

  /** Seconds of the stream that were played; negative before the first sample. */
  get positionS() {
    if (!this.#context) return -1;
    const nowS = this.#context.currentTime - this.#latencyS;
    const piece = this.#pieces.findLast(({ startS }) => startS <= nowS);
    return piece ? piece.offsetS + Math.min(nowS, piece.endS) - piece.startS : -1;
  }

  /** Stops playback at once. */
  stop() {
    const nowS = this.#context?.currentTime ?? 0;
    this.#output?.gain.setTargetAtTime(0, nowS, FADE_S / 4);
    for (const source of this.#sources) {
      source.onended = null;
      source.stop(nowS + FADE_S);
    }
    this.#sources.clear();
    this.#endSample = 0;
  }
}
