"""Every protocol gives the engine's own speech for a seed, with a real model and real clients."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.cartesia.tts import CartesiaHttpTTSService, CartesiaTTSService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.services.tts_service import TTSService
from pipecat.workers.runner import WorkerRunner

from bench.simulation import words_in_audio
from megakernel_tts import TTS, Sampling
from tests.fakes import TIMEOUT_S
from tests.server.running import RunningServer, connected, pcm_of, running_server, until

SEED = {"seed": 3, "max_new_tokens": 12}
TEXT = "Hello there."


@pytest.fixture(scope="module")
def model(tts: TTS) -> Iterator[RunningServer]:
    """A server with a model that has random weights."""
    tts._warm = True
    with running_server(tts) as server:
        yield server
    tts._warm = False


def of_speech(server: RunningServer) -> NDArray[np.int16]:
    body = {"input": TEXT, "response_format": "pcm"} | SEED
    reply = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=TIMEOUT_S)
    return np.frombuffer(reply.content, "<i2")


def of_speech_events(server: RunningServer) -> NDArray[np.int16]:
    body = {"input": TEXT, "response_format": "pcm", "stream_format": "sse"} | SEED
    reply = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=TIMEOUT_S)
    return np.frombuffer(_audio_of(reply.text, "audio"), "<i2")


def of_bytes(server: RunningServer) -> NDArray[np.int16]:
    body = {"transcript": TEXT, "model_id": "sonic-3"} | SEED
    reply = httpx.post(f"{server.url}/tts/bytes", json=body, timeout=TIMEOUT_S)
    return np.frombuffer(reply.content, "<i2")


def of_events(server: RunningServer) -> NDArray[np.int16]:
    body = {"transcript": TEXT, "model_id": "sonic-3"} | SEED
    reply = httpx.post(f"{server.url}/tts/sse", json=body, timeout=TIMEOUT_S)
    return np.frombuffer(_audio_of(reply.text, "data"), "<i2")


def of_socket(server: RunningServer) -> NDArray[np.int16]:
    async def speak() -> NDArray[np.int16]:
        fields: dict[str, Any] = {"voice": None, **SEED}
        async with connected(server) as client:
            for character in TEXT:
                await client.send("a", character, **fields, **{"continue": True})
            await client.send("a", "", **fields, **{"continue": False})
            return pcm_of(await client.until_done("a"))

    return asyncio.run(speak())


def _audio_of(events: str, name: str) -> bytes:
    data = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    return b"".join(base64.b64decode(event[name]) for event in data if name in event)


@pytest.mark.parametrize(
    ("speak", "layout"),
    [
        (of_speech, "full"),
        (of_speech_events, "full"),
        (of_bytes, "full"),
        (of_events, "full"),
        (of_socket, "streaming"),
    ],
)
def test_audio_is_that_of_the_engine_for_a_seed(
    model: RunningServer, speak: Callable[[RunningServer], NDArray[np.int16]], layout: Any
) -> None:
    sampling = Sampling(seed=3, max_frames=12)
    expected = model.tts.say(TEXT, layout=layout, sampling=sampling).pcm
    pcm = speak(model)
    assert len(pcm) == len(expected) == 12 * 1920
    # Plain torch decodes chunks of other sizes with differences of one step.
    assert np.abs(pcm.astype(int) - expected).max() <= 1


class Sink(FrameProcessor):
    """Collects what a Pipecat service sends."""

    def __init__(self) -> None:
        super().__init__()
        self.audio = b""
        self.words: list[str] = []
        self.errors: list[str] = []
        self.started = asyncio.Event()
        self.stopped = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self.audio += frame.audio
            self.started.set()
        elif isinstance(frame, TTSTextFrame):
            self.words.append(frame.text)
        elif isinstance(frame, ErrorFrame):
            self.errors.append(frame.error)
        elif isinstance(frame, TTSStoppedFrame):
            self.stopped.set()
        await self.push_frame(frame, direction)


async def turn(worker: PipelineWorker, *texts: str) -> None:
    frames = [LLMTextFrame(text) for text in texts]
    await worker.queue_frames([LLMFullResponseStartFrame(), *frames, LLMFullResponseEndFrame()])


async def speak(service: TTSService, *, interrupted: str = "", text: str = TEXT) -> Sink:
    """Speaks a turn, after another one that is interrupted."""
    sink = Sink()
    params = PipelineParams(audio_out_sample_rate=24_000)
    worker = PipelineWorker(Pipeline([service, sink]), params=params)
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    if interrupted:
        await turn(worker, interrupted)
        await asyncio.wait_for(sink.started.wait(), TIMEOUT_S)
        await worker.queue_frames([InterruptionFrame()])
        await asyncio.sleep(0.2)  # Pipecat has no event for the end of an interruption
        sink.audio, sink.words = b"", []
        sink.stopped.clear()
    await turn(worker, *text.split("|"))
    await asyncio.wait_for(sink.stopped.wait(), TIMEOUT_S)
    await worker.cancel()
    await running
    return sink


def socket_service(server: RunningServer) -> TTSService:
    settings = CartesiaTTSService.Settings(voice="ryan", model="simulated")
    return CartesiaTTSService(api_key="none", url=server.socket_url, settings=settings)


def http_service(server: RunningServer) -> TTSService:
    settings = CartesiaHttpTTSService.Settings(voice="ryan", model="simulated")
    return CartesiaHttpTTSService(api_key="none", base_url=server.url, settings=settings)


def openai_service(server: RunningServer) -> OpenAITTSService:
    settings = OpenAITTSService.Settings(voice="alloy", model="simulated")
    return OpenAITTSService(api_key="none", base_url=f"{server.url}/v1", settings=settings)


@pytest.mark.parametrize("make", [socket_service, http_service, openai_service])
def test_unmodified_services_of_pipecat_speak(
    server: RunningServer, make: Callable[[RunningServer], TTSService]
) -> None:
    async def run() -> Sink:
        service = make(server)
        sink = await speak(service)
        if isinstance(service, OpenAITTSService):
            await service._client.close()  # which Pipecat leaves to the collector
        return sink

    sink = asyncio.run(run())
    assert not sink.errors
    assert words_in_audio(np.frombuffer(sink.audio, "<i2")) == [0, 1]


def test_pipecat_gets_every_word_of_every_sentence(server: RunningServer) -> None:
    async def run() -> Sink:
        return await speak(socket_service(server), text="Hello there. |My friend, good day.")

    sink = asyncio.run(run())
    assert not sink.errors
    assert " ".join(sink.words) == "Hello there. My friend, good day."


def test_an_interruption_of_pipecat_stops_the_context(server: RunningServer) -> None:
    async def run() -> Sink:
        sink = await speak(socket_service(server), interrupted="A long turn. " * 200)
        await until(lambda: server.num_streams == 0)
        return sink

    sink = asyncio.run(run())
    assert not sink.errors
    assert words_in_audio(np.frombuffer(sink.audio, "<i2")) == [0, 1]
