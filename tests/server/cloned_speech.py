"""Requests for cloned voices and for speech with them, and the speech that is expected."""

import io
from functools import cache
from typing import Any

import httpx
import numpy as np
import soundfile
from numpy.typing import NDArray

from megakernel_tts import TTS, Sampling
from tests.server.running import RunningServer

TEXT = "Hello there."
TRANSCRIPT = "the quick brown fox"
CONSENT = "Anna agreed on paper"
SAMPLING = {"seed": 1, "max_new_tokens": 6}


def audio_file(seconds: float = 1.0, kind: str = "WAV", rate: int = 24_000) -> bytes:
    """A recording, which is noise."""
    wave = 0.1 * np.random.default_rng(0).standard_normal(round(seconds * rate))
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format=kind)
    return file.getvalue()


RECORDING = audio_file()


def upload(server: RunningServer, recording: bytes = RECORDING, **fields: str) -> httpx.Response:
    data = {"name": "Anna", "consent": CONSENT} | fields
    files = {"audio_sample": ("anna.wav", recording, "audio/wav")}
    return httpx.post(f"{server.url}/v1/audio/voices", data=data, files=files)


def speak(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"input": TEXT, "response_format": "pcm"} | SAMPLING | fields
    return httpx.post(f"{server.url}/v1/audio/speech", json=body)


def listed(server: RunningServer) -> dict[str, Any]:
    return httpx.get(f"{server.url}/v1/audio/voices").json()


def pcm_of(reply: httpx.Response) -> NDArray[np.int16]:
    assert reply.status_code == 200, reply.text
    return np.frombuffer(reply.content, "<i2")


@cache
def expected(tts: TTS, text: str | None) -> NDArray[np.int16]:
    """The speech of the engine with the voice of the recording."""
    voice = tts.clone(io.BytesIO(RECORDING), text)
    return tts.say(TEXT, voice, sampling=Sampling(seed=1, max_frames=6)).pcm


def assert_same(pcm: NDArray[np.int16], other: NDArray[np.int16]) -> None:
    """Plain torch decodes chunks of other sizes with differences of one step."""
    assert len(pcm) == len(other) == 6 * 1920
    assert np.abs(pcm.astype(int) - other).max() <= 1


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    return reply.json()["error"]
