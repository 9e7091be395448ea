/** The waterfall of a turn: one row for each kind of event, over a common axis of time. */

import { formatMs } from "./figures.js";
/** @typedef {import("./measurement.js").Measurement} Measurement */

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000; // of a row, in units of its view box
const HEIGHT = 16;
const STEPS_MS = [100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 60_000, 120_000, 600_000];
const MAX_LABELS = 5;

/** @param {number} ms */
const formatS = (ms) => `${(ms / 1000).toFixed(1)} s`;

/**
 * A row: its name, what it shows, as marks (`line`) or intervals (`bar`), and its figure.
 * @typedef {object} Row
 * @property {string} name
 * @property {"line" | "bar"} shape
 * @property {(measurement: Measurement) => [number, number][]} intervals
 * @property {(measurement: Measurement) => string} figure
 */

/**
 * @param {number[]} times
 * @returns {[number, number][]}
 */
const marks = (times) => times.map((time) => [time, time]);

/** @type {Row[]} */
const ROWS = [
  {
    name: "Text sent",
    shape: "line",
    intervals: ({ sentMs }) => marks(sentMs),
    figure: ({ sentMs }) => String(sentMs.length),
  },
  {
    name: "First chunk",
    shape: "bar",
    intervals: ({ firstChunkMs }) => (firstChunkMs === null ? [] : [[0, firstChunkMs]]),
    figure: ({ firstChunkMs }) => (firstChunkMs === null ? "" : `${formatMs(firstChunkMs)} ms`),
  },
  {
    name: "Chunks",
    shape: "line",
    intervals: ({ chunks }) => marks(chunks.map(({ atMs }) => atMs)),
    figure: ({ chunks }) => String(chunks.length),
  },
  {
    name: "Playback",
    shape: "bar",
    intervals: ({ playback, nowMs }) =>
      playback.map(([start, end]) => [Math.min(start, nowMs), Math.min(end, nowMs)]),
    figure: ({ playback }) => {
      const total = playback.reduce((sum, [start, end]) => sum + end - start, 0);
      return total ? formatS(total) : "";
    },
  },
  {
    name: "End",
    shape: "line",
    intervals: ({ endMs }) => (endMs === null ? [] : marks([endMs])),
    figure: ({ endMs }) => (endMs === null ? "" : formatS(endMs)),
  },
];

/** Draws measurements into a table. */
export class Waterfall {
  /** @type {{row: Row, path: SVGPathElement, figure: HTMLTableCellElement}[]} */
  #rows = [];
  /** @type {HTMLElement} */
  #axis;
  #spanMs = 0;

  /** @param {HTMLTableElement} table */
  constructor(table) {
    const axis = table.querySelector(".axis");
    if (!(axis instanceof HTMLElement)) throw new TypeError("The table has no axis.");
    this.#axis = axis;
    this.#rows = ROWS.map((row) => this.#add(table.tBodies[0], row));
  }

  /**
   * @param {HTMLTableSectionElement} body
   * @param {Row} row
   */
  #add(body, row) {
    const line = body.insertRow();
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = row.name;
    line.append(name);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", row.shape);
    svg.append(path);
    line.insertCell().append(svg);
    return { row, path, figure: line.insertCell() };
  }

  /**
   * Draws a turn.
   * @param {Measurement} measurement
   */
  draw(measurement) {
    const endMs = Math.max(measurement.endMs ?? 0, measurement.playback.at(-1)?.[1] ?? 0);
    this.#drawAxis(Math.max(1000, endMs, measurement.sentMs.at(-1) ?? 0));
    const scale = WIDTH / this.#spanMs;
    for (const { row, path, figure } of this.#rows) {
      const intervals = row.intervals(measurement);
      path.setAttribute(
        "d",
        intervals.map(([start, end]) => shape(row.shape, start * scale, end * scale)).join(""),
      );
      figure.textContent = row.figure(measurement);
    }
  }

  /** @param {number} endMs */
  #drawAxis(endMs) {
    const step = STEPS_MS.find((ms) => endMs / ms <= MAX_LABELS) ?? endMs;
    const span = endMs * 1.02;
    if (span === this.#spanMs) return;
    this.#spanMs = span;
    const labels = [];
    for (let time = 0; time < span; time += step) {
      const label = document.createElement("span");
      label.textContent = `${time / 1000} s`;
      label.style.left = `${(100 * time) / span}%`;
      labels.push(label);
    }
    this.#axis.replaceChildren(...labels);
  }
}

/**
 * Gives the outline of a mark or a bar.
 * @param {"line" | "bar"} kind
 * @param {number} start
 * @param {number} end
 */
function shape(kind, start, end) {
  if (kind === "line") return `M${start.toFixed(1)} 0V${HEIGHT}`;
  return `M${start.toFixed(1)} 3H${Math.max(end, start + 1).toFixed(1)}V${HEIGHT - 3}H${start.toFixed(1)}Z`;
}
