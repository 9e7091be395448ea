"""A browser calls `examples/voice_agent.py` and hears it."""

import asyncio
import re
import shutil
from pathlib import Path

import pipecat_ai_prebuilt
import pytest

from tests.pipecat_service.browser import Page, chromium
from tests.pipecat_service.scripted_agent import ANSWER, GREETING
from tests.pipecat_service.scripted_agent import HEARD as QUESTION

CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")

# Remembers every connection that the page makes.
WATCH = """
window.peers = [];
window.RTCPeerConnection = new Proxy(RTCPeerConnection, {
  construct(target, args) {
    const peer = new target(...args);
    window.peers.push(peer);
    return peer;
  },
});
"""

# Joins as the page does, with the browser's own means.
JOIN = """
(async () => {
  const peer = new RTCPeerConnection();
  const microphone = await navigator.mediaDevices.getUserMedia({ audio: true });
  peer.addTrack(microphone.getAudioTracks()[0], microphone);
  peer.createDataChannel("chat");
  peer.ontrack = ({ track }) => {
    const player = new Audio();
    player.srcObject = new MediaStream([track]);
    player.play();
  };
  await peer.setLocalDescription(await peer.createOffer());
  while (peer.iceGatheringState !== "complete") await new Promise((r) => setTimeout(r, 20));
  const { sdp, type } = peer.localDescription;
  const headers = { "Content-Type": "application/json" };
  const reply = await fetch("/api/offer", {
    method: "POST", headers, body: JSON.stringify({ sdp, type }),
  });
  await peer.setRemoteDescription(await reply.json());
})()
"""

# The prebuilt page asks a library for the microphone, and that library fetches most of itself from
# c.daily.co. This stands in for it, so that no network is needed: what the page asks, answered with
# the browser's own means.
MICROPHONE = """
class Microphone {
  static getCallInstance() { return Microphone.one; }
  static createCallObject() { return (Microphone.one = new Microphone()); }
  handlers = [];
  on(name, handler) { this.handlers.push([name, handler]); }
  async startCamera() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    [this.track] = stream.getAudioTracks();
    for (const [name, handler] of this.handlers)
      if (name === "track-started")
        handler({ track: this.track, participant: this.participants().local });
    return { camera: {}, mic: {}, speaker: {} };
  }
  participants() {
    const audio = { persistentTrack: this.track };
    return { local: { local: true, user_id: "caller", user_name: "", tracks: { audio } } };
  }
  async enumerateDevices() {
    return { devices: await navigator.mediaDevices.enumerateDevices() };
  }
  isLocalAudioLevelObserverRunning() { return true; }
  localScreenAudio() { return false; }
  localScreenVideo() { return false; }
  setLocalAudio() {}
  setLocalVideo() {}
  leave() {}
}
"""
LIBRARY = "/client/assets/daily-esm-*.js"

# The energy of all that was received, as the standard defines it: a full-scale second is 1.
HEARD = """
(async () => {
  let energy = 0;
  for (const peer of window.peers)
    for (const report of (await peer.getStats()).values())
      if (report.type === "inbound-rtp" && report.kind === "audio")
        energy += report.totalAudioEnergy;
  return energy;
})()
"""
AUDIBLE = 0.01  # a second at -20 dBFS

BUTTON = "[...document.querySelectorAll('button')].find((b) => b.innerText === 'Connect')"


async def _opened(page: Page, agent: str) -> None:
    await page.call("Page.enable")
    await page.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    await page.call("Page.navigate", url=f"http://{agent}/client/")
    await page.until(f"Boolean({BUTTON})")


def _microphone() -> str:
    """The stand-in, under the name by which the page imports the library."""
    assets = Path(pipecat_ai_prebuilt.__file__).parent / "client" / "dist" / "assets"
    (library,) = assets.glob(Path(LIBRARY).name)
    name = re.search(r"export ?\{ ?\w+ as (\w+)", library.read_text(encoding="utf-8"))
    assert name is not None
    return f"{MICROPHONE}\nexport {{ Microphone as {name[1]} }};"


def test_a_browser_joins_over_webrtc_and_hears_a_conversation(agent: str, tmp_path: Path) -> None:
    async def call() -> None:
        assert CHROMIUM is not None
        async with chromium(CHROMIUM, tmp_path) as page:
            await _opened(page, agent)
            await page.run(JOIN)
            await page.until(f"{HEARD}.then((energy) => energy > {AUDIBLE})")
            await asyncio.sleep(4)  # the greeting ends before the caller is heard
            greeting = await page.run(HEARD)
            await page.until(f"{HEARD}.then((energy) => energy > {greeting + AUDIBLE})")

    asyncio.run(call())


def test_the_prebuilt_page_joins_and_hears_a_conversation(agent: str, tmp_path: Path) -> None:
    async def call() -> None:
        assert CHROMIUM is not None
        async with chromium(CHROMIUM, tmp_path) as page:
            await page.replace(f"*{LIBRARY}", _microphone())
            await _opened(page, agent)
            await page.until(f"{BUTTON}.dataset.state === 'initialized'")
            await page.run(f"{BUTTON}.click()")
            await page.until(f"{HEARD}.then((energy) => energy > {AUDIBLE})")
            for said in (GREETING, QUESTION, ANSWER):
                await page.until(f"document.body.innerText.includes({said!r})")

    asyncio.run(call())
