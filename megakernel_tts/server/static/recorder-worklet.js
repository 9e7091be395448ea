/** Passes the samples of the microphone to the page, 2,048 at a time. */

const BLOCK = 2048;

class RecorderProcessor extends AudioWorkletProcessor {
  #block = new Float32Array(BLOCK);
  #length = 0;

  /** @param {Float32Array[][]} inputs */
  process([[channel]]) {
    for (const sample of channel ?? []) {
      this.#block[this.#length] = sample;
      this.#length += 1;
      if (this.#length < BLOCK) continue;
      this.port.postMessage(this.#block);
      this.#length = 0;
    }
    return true;
  }
}

registerProcessor("recorder", RecorderProcessor);
