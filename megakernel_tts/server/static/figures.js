/** Figures of the last turn and of the server. */

import { find, setText } from "./elements.js";
/** @typedef {import("./measurement.js").Measurement} Measurement */
/** @typedef {import("./server.js").Status} Status */

const NONE = "–";

const outputs = {
  firstChunk: find("first-chunk", HTMLElement),
  realTimeFactor: find("real-time-factor", HTMLElement),
  numSpeaking: find("num-speaking", HTMLElement),
  numSlots: find("num-slots", HTMLElement),
  numWaiting: find("num-waiting", HTMLElement),
};

/**
 * Formats a time.
 * @param {number} ms
 */
export function formatMs(ms) {
  return ms < 10 ? ms.toFixed(1) : Math.round(ms).toLocaleString("en");
}

/**
 * Shows the figures of a turn.
 * @param {Measurement} measurement
 */
export function showMeasurement({ firstChunkMs, realTimeFactor }) {
  setText(outputs.firstChunk, firstChunkMs === null ? NONE : formatMs(firstChunkMs));
  setText(outputs.realTimeFactor, realTimeFactor === null ? NONE : realTimeFactor.toPrecision(2));
}

/**
 * Shows the figures of the server.
 * @param {Status} status
 */
export function showStatus(status) {
  setText(outputs.numSpeaking, String(status.num_speaking));
  setText(outputs.numSlots, `of ${status.num_slots}`);
  setText(outputs.numWaiting, String(status.num_waiting));
}
