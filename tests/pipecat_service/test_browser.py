"""A browser calls `examples/voice_agent.py` and receives its speech."""

import asyncio
import re
import shutil
from pathlib import Path

import pipecat_ai_prebuilt
import pytest

from tests.browser import Page, chromium
from tests.pipecat_service.scripted_agent import ANSWER, GREETING, QUESTION

CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")

# Keeps every connection of the page in `window.peers`.
RECORD_PEERS = """
window.peers = [];
window.RTCPeerConnection = new Proxy(RTCPeerConnection, {
  construct(target, args) {
    const peer = new target(...args);
    window.peers.push(peer);
    return peer;
  },
});
"""

# Joins as the page does, through the browser's own interfaces.
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

# The prebuilt page uses the microphone through a library that loads most of its code from
# c.daily.co. This class replaces the library, so that the test needs no network.
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

# Energy of the received audio as WebRTC defines it: one second at full scale is 1.
ENERGY = """
(async () => {
  let energy = 0;
  for (const peer of window.peers)
    for (const report of (await peer.getStats()).values())
      if (report.type === "inbound-rtp" && report.kind === "audio")
        energy += report.totalAudioEnergy;
  return energy;
})()
"""
AUDIBLE = 0.001  # energy of a second at -30 dBFS

# Whether the received audio was silent for a second.
PAUSED = f"""
(async () => {{
  const before = await {ENERGY};
  await new Promise((next) => setTimeout(next, 1000));
  return (await {ENERGY}) - before < {AUDIBLE / 10};
}})()
"""

BUTTON = "[...document.querySelectorAll('button')].find((b) => b.innerText === 'Connect')"


async def _open_client(page: Page, agent: str) -> None:
    await page.call("Page.enable")
    await page.call("Page.addScriptToEvaluateOnNewDocument", source=RECORD_PEERS)
    await page.call("Page.navigate", url=f"http://{agent}/client/")
    await page.wait_until(f"Boolean({BUTTON})")


def _microphone() -> str:
    """The replacement, exported under the name by which the page imports the library."""
    assets = Path(pipecat_ai_prebuilt.__file__).parent / "client" / "dist" / "assets"
    (library,) = assets.glob(Path(LIBRARY).name)
    name = re.search(r"export ?\{ ?\w+ as (\w+)", library.read_text(encoding="utf-8"))
    assert name is not None
    return f"{MICROPHONE}\nexport {{ Microphone as {name[1]} }};"


def test_a_browser_receives_a_conversation_over_webrtc(agent: str, tmp_path: Path) -> None:
    async def call() -> None:
        assert CHROMIUM is not None
        async with chromium(CHROMIUM, tmp_path) as page:
            await _open_client(page, agent)
            await page.run(JOIN)
            await page.wait_until(f"{ENERGY}.then((energy) => energy > {AUDIBLE})")
            await page.wait_until(PAUSED)  # the greeting ends before the caller's question
            greeting = await page.run(ENERGY)
            await page.wait_until(f"{ENERGY}.then((energy) => energy > {greeting + AUDIBLE})")

    asyncio.run(call())


@pytest.mark.slow
def test_the_prebuilt_page_shows_and_plays_a_conversation(agent: str, tmp_path: Path) -> None:
    async def call() -> None:
        assert CHROMIUM is not None
        async with chromium(CHROMIUM, tmp_path) as page:
            await page.replace(f"*{LIBRARY}", _microphone())
            await _open_client(page, agent)
            await page.wait_until(f"{BUTTON}.dataset.state === 'initialized'")
            await page.run(f"{BUTTON}.click()")
            await page.wait_until(f"{ENERGY}.then((energy) => energy > {AUDIBLE})")
            for said in (GREETING, QUESTION, ANSWER):
                await page.wait_until(f"document.body.innerText.includes({said!r})")

    asyncio.run(call())
