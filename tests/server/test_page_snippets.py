"""The programs that the page shows run as they are."""

import subprocess
import wave
from pathlib import Path
from typing import Any

import pytest

from megakernel_tts import TTS
from tests.browser import Page
from tests.server.driving import Drive, open_page, open_with_key
from tests.server.running import RunningServer, locked_by, running_server

NAMES = ["curl", "OpenAI Python", "Pipecat", "LiveKit", "Cartesia Python", "ElevenLabs Python"]
NAMES += ["JavaScript"]


def shown(drive: Drive, server: RunningServer) -> dict[str, str]:
    """The programs on the page, each after its tab was selected."""
    programs: dict[str, str] = {}

    async def read(page: Page) -> None:
        await open_page(page, server)
        for name in NAMES:
            tabs = "[...document.querySelectorAll('[role=tab]')]"
            await page.run(f"{tabs}.find((tab) => tab.textContent === '{name}').click()")
            programs[name] = await page.run("document.querySelector('#snippets code').textContent")

    drive(read)
    return programs


@pytest.fixture(scope="module")
def programs(drive: Drive, server: RunningServer) -> dict[str, str]:
    return shown(drive, server)


def seconds_of(file: Path) -> float:
    with wave.open(str(file)) as audio:
        assert audio.getframerate() == 24_000
        return len(audio.readframes(1 << 30)) / 2 / 24_000


def test_the_program_for_curl_runs(programs: dict[str, str], tmp_path: Path) -> None:
    command = programs["curl"].replace("curl ", "curl --silent --fail ", 1)
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    assert seconds_of(tmp_path / "hello.wav") > 0.5


@pytest.mark.parametrize("name", ["OpenAI Python", "Cartesia Python", "ElevenLabs Python"])
def test_the_python_programs_run(
    programs: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(programs[name], name, "exec"), names)
    if name == "OpenAI Python":  # a program of its own need not close its client
        names["client"].close()
    elif name == "ElevenLabs Python":
        names["client"]._client_wrapper.httpx_client.httpx_client.close()
    assert seconds_of(tmp_path / "hello.wav") > 0.5


def test_the_program_for_pipecat_makes_a_service(
    programs: dict[str, str], server: RunningServer
) -> None:
    names: dict[str, Any] = {}
    exec(compile(programs["Pipecat"], "Pipecat", "exec"), names)
    assert names["tts"]._url == server.socket_url


def test_the_program_for_livekit_makes_a_service(
    programs: dict[str, str], server: RunningServer
) -> None:
    names: dict[str, Any] = {}
    exec(compile(programs["LiveKit"], "LiveKit", "exec"), names)
    assert names["tts"]._opts.base_url == server.url


def test_the_program_in_javascript_runs(
    drive: Drive, programs: dict[str, str], server: RunningServer
) -> None:
    async def run(page: Page) -> None:
        await open_page(page, server)
        await page.run("window.log = []; console.log = (...words) => window.log.push(words)")
        await page.run(programs["JavaScript"])
        await page.wait_until("socket.readyState === WebSocket.CLOSED")
        log = await page.run("window.log")
        words = [word for line in log for word in line if isinstance(word, str)]
        assert [word for word in words if word != "samples"] == ["Hello", "from", "JavaScript."]
        assert sum(line[0] for line in log if line[-1] == "samples") > 12_000

    drive(run)


def test_the_shown_program_is_copied(
    drive: Drive, programs: dict[str, str], server: RunningServer
) -> None:
    async def copy(page: Page) -> None:
        await open_page(page, server)
        button = "document.querySelector('#snippets button:not([role=tab])')"
        await page.run("document.querySelectorAll('[role=tab]')[1].click()")
        await page.run(f"{button}.focus()")
        await page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        await page.press("Enter")
        await page.wait_until(f"{button}.textContent === 'Copied'")
        assert await page.run("window.copied.trim()") == programs[NAMES[1]]
        refuse = "navigator.clipboard.writeText = async () => { throw new Error('not secure'); }"
        await page.run(refuse)  # as on a page over plain HTTP
        await page.press("Enter")
        await page.wait_until(f"{button}.textContent === 'Press Ctrl C'")
        assert (await page.run("getSelection().toString()")).strip() == programs[NAMES[1]]
        assert not page.errors

    drive(copy)


def test_the_programs_show_where_the_key_belongs(drive: Drive, engine: TTS) -> None:
    with running_server(engine, locked_by("right")) as server:
        drive(lambda page: open_with_key(page, server, "right"))
        for program in shown(drive, server).values():
            assert "YOUR_API_KEY" in program and "right" not in program
