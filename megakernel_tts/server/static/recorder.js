/** Recordings of a speaker, from the microphone or a file. */

const FILE_RATE = 48_000; // of the samples of a file, whatever its own rate

/**
 * One channel of audio.
 * @typedef {{samples: Float32Array, sampleRate: number}} Recording
 */

/** Whether this page may use the microphone: browsers allow only secure pages to. */
export const canRecord = Boolean(navigator.mediaDevices);

/** Records the microphone until it is stopped. */
export class Recorder {
  /** @type {Float32Array[]} */
  #blocks = [];
  #length = 0;

  /**
   * @param {MediaStream} stream
   * @param {AudioContext} context
   * @param {(level: number, seconds: number) => void} onLevel
   */
  constructor(stream, context, onLevel) {
    this.stream = stream;
    this.context = context;
    const node = new AudioWorkletNode(context, "recorder", { numberOfOutputs: 0 });
    node.port.onmessage = ({ data }) => {
      this.#blocks.push(data);
      this.#length += data.length;
      onLevel(Math.max(...data.map(Math.abs)), this.#length / context.sampleRate);
    };
    context.createMediaStreamSource(stream).connect(node);
  }

  /**
   * Asks for the microphone and starts.
   * @param {(level: number, seconds: number) => void} onLevel Receives the peak from 0 to 1, and
   *   the duration so far.
   * @throws {DOMException} There is no microphone, or it is not allowed.
   */
  static async start(onLevel) {
    const processing = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
    const stream = await navigator.mediaDevices.getUserMedia({ audio: processing });
    const context = new AudioContext();
    await context.audioWorklet.addModule(new URL("recorder-worklet.js", import.meta.url));
    return new Recorder(stream, context, onLevel);
  }

  /**
   * Stops and gives the recording.
   * @returns {Recording}
   */
  stop() {
    const { sampleRate } = this.context;
    for (const track of this.stream.getTracks()) track.stop();
    this.context.close();
    const samples = new Float32Array(this.#length);
    let offset = 0;
    for (const block of this.#blocks) {
      samples.set(block, offset);
      offset += block.length;
    }
    return { samples, sampleRate };
  }
}

/**
 * Reads a file in any format that the browser plays.
 * @param {File} file
 * @returns {Promise<Recording>}
 * @throws {DOMException} It holds no audio.
 */
export async function readFile(file) {
  const context = new OfflineAudioContext(1, 1, FILE_RATE);
  const buffer = await context.decodeAudioData(await file.arrayBuffer());
  const samples = new Float32Array(buffer.length);
  for (let channel = 0; channel < buffer.numberOfChannels; channel += 1)
    buffer.getChannelData(channel).forEach((sample, index) => {
      samples[index] += sample / buffer.numberOfChannels;
    });
  return { samples, sampleRate: FILE_RATE };
}
