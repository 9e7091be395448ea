"""The page in Firefox: what it plays and shows, and an interruption. Chromium has further tests."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.firefox import FirefoxPage, firefox
from tests.server.driving import STATE, assert_in_order, finish, open_page, text_of
from tests.server.hearing import interrupt_audio, pieces, record, shown_words
from tests.server.running import RunningServer, until

TEXT = "one two three four five six"
LONG = " and a turn of very many words that is cut off before its end, " * 6


# The page must not read it: Firefox can block for ever (static/player.js).
NO_LATENCY = """
Object.defineProperty(AudioContext.prototype, "outputLatency", {
  get() {
    throw new Error("the page reads outputLatency");
  },
});
"""


async def speak(page: FirefoxPage, server: RunningServer) -> None:
    """The samples of the engine are played, and their words are marked meanwhile."""
    await page.insert(TEXT)
    await finish(page)
    played = await pieces(page)
    assert np.array_equal(np.concatenate([piece.pcm for piece in played]), server.speech(TEXT))
    assert_in_order(await shown_words(page), TEXT)
    assert float((await text_of(page, "#first-chunk")).replace(",", "")) > 0


async def interrupt(page: FirefoxPage, server: RunningServer) -> None:
    """A key stops the loudspeaker and the engine; the words that were not played stay grey."""
    await page.wait_until("window.level() === 0")
    aborted = server.metric('requests_success_total{finished_reason="abort"}')
    num_shown = len(await shown_words(page))
    await page.type(LONG)
    await interrupt_audio(page, f"window.words.length > {num_shown + 2} && window.level() > 0.05")
    await until(lambda: server.num_streams == 0)
    assert server.metric('requests_success_total{finished_reason="abort"}') == aborted + 1
    await page.wait_until("window.level() === 0")
    stop_delay_s = (await pieces(page))[-1].stop_delay_s
    assert stop_delay_s is not None and stop_delay_s <= 0.01
    spoken, silent = await text_of(page, ".mirror span"), await text_of(page, ".mirror i")
    assert spoken + silent == TEXT + LONG and silent
    assert await page.run(STATE) == f"Interrupted after “{spoken.split()[-1]}”."


def test_the_page_speaks_and_is_interrupted(server: RunningServer, tmp_path: Path) -> None:
    program = next(filter(None, map(shutil.which, ("firefox-esr", "firefox"))), None)
    if program is None or shutil.which("pulseaudio") is None:
        pytest.skip("no firefox and pulseaudio")

    async def test() -> None:
        async with firefox(program, tmp_path) as page:
            await record(page)
            await page.run_on_load(NO_LATENCY)
            await open_page(page, server)
            await speak(page, server)
            await interrupt(page, server)
            assert not await page.errors()

    asyncio.run(test())
