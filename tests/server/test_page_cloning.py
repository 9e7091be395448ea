"""Cloning a voice on the page, from the microphone and from a file, with a simulated Base model."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bench.simulation import simulated_tts
from megakernel_tts import Voice
from tests.browser import Page
from tests.server.driving import Drive, finish, open_page, text_of
from tests.server.running import RunningServer, running_server

STATE = "document.querySelector('#cloning-state').textContent"


@dataclass
class Uploads:
    """Takes the place of the endpoint for voices, and keeps what was uploaded.

    Attributes:
        voices: The voices that the server has.
        forms: The fields of each upload.
    """

    voices: dict[str, Voice]
    forms: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    samples: list[bytes] = field(default_factory=list[bytes])

    def routes(self) -> list[Route]:
        return [
            Route("/v1/audio/voices", self.list),
            Route("/v1/audio/voices", self.upload, methods=["POST"]),
            Route("/v1/audio/voices/{name}", self.delete, methods=["DELETE"]),
        ]

    async def list(self, _: Request) -> Response:
        uploaded = [{"name": name} for name in self.voices]
        return JSONResponse({"voices": [*self.voices], "uploaded_voices": uploaded})

    async def upload(self, request: Request) -> Response:
        async with request.form() as form:
            sample = form["audio_sample"]
            assert not isinstance(sample, str)
            self.samples.append(await sample.read())
            self.forms.append({k: v for k, v in form.items() if isinstance(v, str)})
        self.voices[self.forms[-1]["name"]] = Voice(torch.zeros(4))
        return JSONResponse({"success": True})

    async def delete(self, request: Request) -> Response:
        del self.voices[request.path_params["name"]]
        return JSONResponse({"success": True})


@pytest.fixture(scope="module")
def base_server() -> Iterator[tuple[RunningServer, Uploads]]:
    with simulated_tts(num_slots=2, frame_seconds=0.001) as tts:
        tts.warmup()
        tts._info = replace(tts.info, kind="base", voices={})
        with running_server(tts) as server:
            uploads = Uploads(server.server.streams.catalog._cloned)  # type: ignore[arg-type]
            server.server.app.router.routes[:0] = uploads.routes()
            yield server, uploads


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
    drive: Drive, base_server: tuple[RunningServer, Uploads]
) -> None:
    server, uploads = base_server

    async def test(page: Page) -> None:
        await open_page(page, server)
        await page.run("document.querySelector('#record').focus()")
        await page.press("Enter")
        await page.wait_until("/Stop .[3-9]/.test(document.querySelector('#record').textContent)")
        await page.press("Enter")
        await page.wait_until("!document.querySelector('#recording').hidden")
        await submit(page, "anna")
        assert await page.run("document.querySelector('#voice').value") == "anna"
        await page.run("document.querySelector('#text').focus()")
        await page.type("hello")
        await finish(page)
        assert not page.errors

    drive(test)
    samples, rate = soundfile.read(io.BytesIO(uploads.samples[-1]), dtype="int16")
    assert samples.ndim == 1 and 3 * rate <= len(samples) < 16 * rate
    assert np.abs(samples).max() > 1000  # the browser's microphone beeps
    assert uploads.forms[-1]["name"] == "anna"
    assert uploads.forms[-1]["consent"].startswith("The speaker agrees")
    assert uploads.forms[-1]["ref_text"].startswith("On calm mornings")
    voice, *_ = server.tts._loaded.engine.prompt_builder.opened[-1]  # type: ignore[attr-defined]
    assert voice is uploads.voices["anna"]


def test_a_file_becomes_a_voice_which_can_be_deleted(
    drive: Drive, base_server: tuple[RunningServer, Uploads], recording: Path
) -> None:
    server, uploads = base_server

    async def test(page: Page) -> None:
        await open_page(page, server)
        await choose(page, recording)
        await page.wait_until(f"{STATE} === 'The recording has 4.0 s.'")
        await submit(page, "bert")
        listed = (
            "[...document.querySelectorAll('#cloned-voices li')].map((li) => li.firstChild.data)"
        )
        assert "bert" in await page.run(listed)
        await page.run("document.querySelector('[aria-label=\"Delete the voice bert\"]').click()")
        await page.wait_until(f"{STATE} === 'The voice bert was deleted.'")
        assert "bert" not in await page.run(listed)
        await page.wait_until(
            "![...document.querySelector('#voice')].some((o) => o.value === 'bert')"
        )
        assert not page.errors

    drive(test)
    samples, rate = soundfile.read(io.BytesIO(uploads.samples[-1]))
    assert samples.ndim == 1 and len(samples) == 4 * rate
    assert np.abs(samples).max() == pytest.approx(0.5, abs=0.01)
    assert "ref_text" not in uploads.forms[-1]  # the passage is not what the file says
    assert "bert" not in uploads.voices


def test_unsuitable_recordings_are_refused_in_the_browser(
    drive: Drive, base_server: tuple[RunningServer, Uploads], tmp_path: Path
) -> None:
    server, _ = base_server
    soundfile.write(short := tmp_path / "short.wav", np.zeros(24_000), 24_000)
    (text := tmp_path / "notes.wav").write_text("no audio", encoding="utf-8")

    async def test(page: Page) -> None:
        await open_page(page, server)
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
