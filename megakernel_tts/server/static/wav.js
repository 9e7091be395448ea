/** Wav files with 16-bit samples. */

const HEADER_BYTES = 44;

/**
 * Encodes one channel.
 * @param {Float32Array} samples From -1 to 1.
 * @param {number} sampleRate
 * @returns {Blob}
 */
export function encodeWav(samples, sampleRate) {
  const view = new DataView(new ArrayBuffer(HEADER_BYTES + 2 * samples.length));
  const write = (/** @type {number} */ offset, /** @type {string} */ text) =>
    [...text].forEach((character, index) => view.setUint8(offset + index, character.charCodeAt(0)));
  write(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  write(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, sampleRate, true);
  view.setUint32(28, 2 * sampleRate, true); // bytes per second
  view.setUint16(32, 2, true); // bytes per sample of all channels
  view.setUint16(34, 16, true); // bits per sample
  write(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, index) => {
    const clipped = Math.max(-1, Math.min(1, sample));
    view.setInt16(HEADER_BYTES + 2 * index, Math.round(32767 * clipped), true);
  });
  return new Blob([view], { type: "audio/wav" });
}
