"""Cloning a voice on the page, from the microphone and from a file, with a small Base model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from megakernel_tts import TTS
from tests.browser import Page
from tests.server.driving import Drive, open_page, text_of
from tests.server.running import RunningServer, running_server, until

STATE = "document.querySelector('#cloning-state').textContent"

# The beeps of the browser's own microphone are too short to clone.
HUM = """
navigator.mediaDevices.getUserMedia = async () => {
  const context = new AudioContext();
  const hum = new OscillatorNode(context, { frequency: 220 });
  const microphone = context.createMediaStreamDestination();
  hum.connect(microphone);
  hum.start();
  return microphone.stream;
};
"""


@pytest.fixture(scope="module")
def base_server(checkpoint: Callable[..., Path]) -> Iterator[RunningServer]:
    """A server with a Base model that has random weights."""
    with TTS.load(checkpoint("base", "1b7"), device="cpu", slots=2) as tts:
        tts._warm = True
        with running_server(tts) as server:
            yield server


def uploaded(server: RunningServer, name: str) -> dict[str, object]:
    """What the server keeps of an upload."""
    (upload,) = [one for one in server.server.streams.library.uploaded if one.name == name]
    return upload.describe()


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Four seconds of a tone in two channels, as a flac file."""
    tone = 0.5 * np.sin(2 * np.pi * 220 * np.arange(4 * 44_100) / 44_100)
    file = tmp_path / "tone.flac"
    soundfile.write(file, np.stack([tone, tone], axis=1), 44_100)
    return file


async def choose(page: Page, file: Path) -> None:
    """Chooses a file, as the user does in the browser's dialog."""
    await page.call("DOM.enable")
    root = (await page.call("DOM.getDocument"))["root"]["nodeId"]
    node = await page.call("DOM.querySelector", nodeId=root, selector="#file")
    await page.call("DOM.setFileInputFiles", nodeId=node["nodeId"], files=[str(file)])


async def submit(page: Page, name: str) -> None:
    """Names the voice, confirms the consent and clones, with the keyboard alone."""
    await page.run("document.querySelector('#name').focus()")
    await page.type(name)
    await page.press("Tab")
    await page.press(" ")
    await page.press("Tab")
    await page.press("Enter")
    await page.wait_until(f"{STATE}.includes('is ready')")


def test_a_recording_of_the_microphone_becomes_a_voice(
    drive: Drive, base_server: RunningServer
) -> None:
    async def test(page: Page) -> None:
        await open_page(page, base_server)
        await page.run(HUM)
        await page.run("document.querySelector('#record').focus()")
        await page.press("Enter")
        await page.wait_until("/Stop .[3-9]/.test(document.querySelector('#record').textContent)")
        await page.press("Enter")
        await page.wait_until("!document.querySelector('#recording').hidden")
        await submit(page, "Anna")
        await page.wait_until("document.querySelector('#voice').value === 'anna'")
        await page.run("document.querySelector('#text').focus()")
        await page.type("hello ")
        await page.wait_until("window.level() > 0")
        await page.press("Escape")
        await until(lambda: base_server.num_streams == 0)
        assert not page.errors

    drive(test)
    upload = uploaded(base_server, "Anna")
    assert str(upload["consent"]).startswith("The speaker agrees")
    assert str(upload["ref_text"]).startswith("On calm mornings")
    assert upload["mime_type"] == "audio/wav"


def test_a_file_becomes_a_voice_which_can_be_deleted(
    drive: Drive, base_server: RunningServer, recording: Path
) -> None:
    async def test(page: Page) -> None:
        await open_page(page, base_server)
        await choose(page, recording)
        await page.wait_until(f"{STATE} === 'The recording has 4.0 s.'")
        await submit(page, "bert")
        upload = uploaded(base_server, "bert")
        assert upload["file_size"] == 44 + 4 * 48_000 * 2  # 16-bit samples of one channel
        assert "ref_text" not in upload  # the passage is not what the file says
        listed = (
            "[...document.querySelectorAll('#cloned-voices li')].map((li) => li.firstChild.data)"
        )
        assert "bert" in await page.run(listed)
        await page.run("document.querySelector('[aria-label=\"Delete the voice bert\"]').click()")
        await page.wait_until(f"{STATE} === 'The voice bert was deleted.'")
        assert "bert" not in await page.run(listed)
        assert "bert" not in [each.name for each in base_server.server.streams.library.uploaded]
        await page.wait_until(
            "![...document.querySelector('#voice')].some((o) => o.value === 'bert')"
        )
        assert not page.errors

    drive(test)


def test_unsuitable_recordings_are_refused_in_the_browser(
    drive: Drive, base_server: RunningServer, tmp_path: Path
) -> None:
    soundfile.write(short := tmp_path / "short.wav", np.zeros(24_000), 24_000)
    (text := tmp_path / "notes.wav").write_text("no audio", encoding="utf-8")

    async def test(page: Page) -> None:
        await open_page(page, base_server)
        await choose(page, short)
        await page.wait_until(f"{STATE} === 'The recording has 1.0 s; it needs 3 to 60 s.'")
        await choose(page, text)
        await page.wait_until(f"{STATE} === 'The browser cannot read notes.wav as audio.'")
        assert await page.run("document.querySelector('#recording').hidden")

    drive(test)


def test_models_with_voices_of_their_own_show_no_cloning(
    drive: Drive, server: RunningServer
) -> None:
    async def test(page: Page) -> None:
        await open_page(page, server)
        assert await page.run("document.querySelector('#cloning').hidden")
        assert await text_of(page, "#instruct-label") == "Speaking style"

    drive(test)
