"""A browser calls `examples/voice_agent.py` and hears it."""

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.pipecat_service.browser import Page, chromium

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
    await page.until(f"Boolean({BUTTON})", 30)


def test_a_browser_joins_over_webrtc_and_hears_a_conversation(agent: str, tmp_path: Path) -> None:
    async def call() -> None:
        assert CHROMIUM is not None
        async with chromium(CHROMIUM, tmp_path) as page:
            await _opened(page, agent)
            await page.run(JOIN)
            await page.until(f"{HEARD}.then((energy) => energy > {AUDIBLE})", 20)
            await asyncio.sleep(4)  # the greeting ends before the caller is heard
            greeting = await page.run(HEARD)
            await page.until(f"{HEARD}.then((energy) => energy > {greeting + AUDIBLE})", 20)

    asyncio.run(call())


def test_the_prebuilt_page_joins_and_hears_the_greeting(agent: str, tmp_path: Path) -> None:
    """The page fetches its microphone code from c.daily.co: without a network it cannot join."""

    async def call() -> str | None:
        assert CHROMIUM is not None
        async with chromium(CHROMIUM, tmp_path) as page:
            await _opened(page, agent)
            await page.run(f"{BUTTON}.click()")
            offline = "document.body.innerText.includes('Failed to load call object bundle')"
            heard = f"{HEARD}.then((energy) => {offline} || energy > {AUDIBLE})"
            await page.until(heard, 60)
            return "the page could not fetch its code" if await page.run(offline) else None

    if reason := asyncio.run(call()):
        pytest.skip(reason)
