"""What a page of the browser plays, and which words it shows meanwhile."""

import base64
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.simulation import RATE
from tests.browser import BrowserPage

# Records every piece of audio with the time at which it starts, and when it is stopped. An analyser
# receives what the loudspeaker does, and holds the last 85 ms.
_RECORD = """
window.pieces = [];
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (when) {
  const samples = this.buffer.getChannelData(0);
  const integers = Int16Array.from(samples, (sample) => Math.round(32768 * sample));
  let bytes = "";
  for (const byte of new Uint8Array(integers.buffer)) bytes += String.fromCharCode(byte);
  const nowS = this.context.currentTime;
  const endS = when + this.buffer.duration;
  this.piece = { startS: when, endS, nowS, stopDelayS: null, samples: btoa(bytes) };
  window.pieces.push(this.piece);
  return start.call(this, when);
};
const stop = AudioBufferSourceNode.prototype.stop;
AudioBufferSourceNode.prototype.stop = function (when) {
  this.piece.stopDelayS = when - this.context.currentTime;
  return stop.call(this, when);
};
const connect = AudioNode.prototype.connect;
AudioNode.prototype.connect = function (target, ...more) {
  if (target instanceof AudioDestinationNode) {
    window.analyser ??= new AnalyserNode(this.context);
    connect.call(this, window.analyser);
  }
  return connect.call(this, target, ...more);
};
window.level = () => {
  const samples = new Float32Array(window.analyser?.fftSize ?? 1);
  window.analyser?.getFloatTimeDomainData(samples);
  return Math.max(...samples.map(Math.abs));
};
window.leadS = () => {
  const last = window.pieces.at(-1);
  return last ? last.endS - window.analyser.context.currentTime : 0;
};
window.words = [];
const recordWords = () => {
  const mark = document.querySelector("mark");
  const record = () => mark.textContent && window.words.push(mark.textContent);
  new MutationObserver(record).observe(mark, { childList: true });
};
if (document.readyState === "loading") addEventListener("DOMContentLoaded", recordWords);
else recordWords();
"""


@dataclass(frozen=True)
class Piece:
    """Audio that was scheduled.

    Attributes:
        start_s: By the clock of the audio.
        scheduled_s: When it was scheduled.
        stop_delay_s: From the call that stopped it until that took effect; None if it was not.
        pcm: int16 [samples].
    """

    start_s: float
    scheduled_s: float
    stop_delay_s: float | None
    pcm: NDArray[np.int16]

    @property
    def end_s(self) -> float:
        """When it ends if it is not stopped."""
        return self.start_s + len(self.pcm) / RATE


async def record(page: BrowserPage) -> None:
    """Records what the pages that are opened from now on play and show."""
    await page.run_on_load(_RECORD)


async def pieces(page: BrowserPage) -> list[Piece]:
    """The audio so far, in the order in which it was scheduled."""
    return [
        Piece(
            one["startS"],
            one["nowS"],
            one["stopDelayS"],
            np.frombuffer(base64.b64decode(one["samples"]), "<i2"),
        )
        for one in await page.run("window.pieces")
    ]


async def shown_words(page: BrowserPage) -> list[str]:
    """The words that were highlighted so far."""
    return await page.run("window.words")


async def interrupt_audio(page: BrowserPage, condition: str) -> None:
    """Interrupts speech by the key while a condition holds and audio is scheduled.

    A busy browser may have played that audio before a key arrives from outside of the page.
    """
    key = 'document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }))'
    await page.wait_until(f"{condition} && window.leadS() > 0.02 && ({key}, true)")
