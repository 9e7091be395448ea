"""Every protocol gives the engine's own speech for a seed, with a real model and real clients."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
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
from pipecat.services.elevenlabs.tts import ElevenLabsHttpTTSService, ElevenLabsTTSService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.services.tts_service import TTSService
from pipecat.workers.runner import WorkerRunner

from bench.simulation import words_in_audio
from megakernel_tts import TTS, Sampling
from tests.fakes import TIMEOUT_S
from tests.server.running import (
    LOCKED,
    RunningServer,
    connected,
    pcm_of,
    running_server,
    until,
    wait_until,
)

FRAMES = 6
SEED = {"seed": 3, "max_new_tokens": FRAMES}
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
    reply = httpx.post(f"{server.url}/v1/audio/speech", json=body)
    return np.frombuffer(reply.content, "<i2")


def of_speech_events(server: RunningServer) -> NDArray[np.int16]:
    body = {"input": TEXT, "response_format": "pcm", "stream_format": "sse"} | SEED
    reply = httpx.post(f"{server.url}/v1/audio/speech", json=body)
    return np.frombuffer(_audio_of(reply.text, "audio"), "<i2")


def of_bytes(server: RunningServer) -> NDArray[np.int16]:
    body = {"transcript": TEXT, "model_id": "sonic-3"} | SEED
    reply = httpx.post(f"{server.url}/tts/bytes", json=body)
    return np.frombuffer(reply.content, "<i2")


def of_events(server: RunningServer) -> NDArray[np.int16]:
    body = {"transcript": TEXT, "model_id": "sonic-3"} | SEED
    reply = httpx.post(f"{server.url}/tts/sse", json=body)
    return np.frombuffer(_audio_of(reply.text, "data"), "<i2")


def of_elevenlabs(server: RunningServer) -> NDArray[np.int16]:
    voice = server.tts.info.voices and next(iter(server.tts.info.voices))
    url = f"{server.url}/v1/text-to-speech/{voice}?output_format=pcm_24000"
    reply = httpx.post(url, json={"text": TEXT} | SEED)
    return np.frombuffer(reply.content, "<i2")


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
        (of_elevenlabs, "full"),
        (of_socket, "streaming"),
    ],
)
def test_audio_is_that_of_the_engine_for_a_seed(
    model: RunningServer, speak: Callable[[RunningServer], NDArray[np.int16]], layout: Any
) -> None:
    sampling = Sampling(seed=3, max_frames=FRAMES)
    expected = model.tts.say(TEXT, layout=layout, sampling=sampling).pcm
    pcm = speak(model)
    assert len(pcm) == len(expected) == FRAMES * 1920
    # Plain torch decodes chunks of other sizes with differences of one step.
    assert np.abs(pcm.astype(int) - expected).max() <= 1


class Sink(FrameProcessor):
    """Collects what a Pipecat service sends."""

    def __init__(self) -> None:
        super().__init__()
        self.audio = b""
        self.words: list[str] = []
        self.word_times_ns: list[int] = []
        self.errors: list[str] = []
        self.started = asyncio.Event()
        self.stopped = asyncio.Event()
        self.interrupted = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self.audio += frame.audio
            self.started.set()
        elif isinstance(frame, TTSTextFrame):
            self.words.append(frame.text)
            self.word_times_ns.append(frame.pts or 0)
        elif isinstance(frame, TTSStoppedFrame):
            self.stopped.set()
        elif isinstance(frame, InterruptionFrame):
            self.interrupted.set()
        await self.push_frame(frame, direction)


async def turn(worker: PipelineWorker, *texts: str, ended: bool = True) -> None:
    frames = [LLMTextFrame(text) for text in texts]
    await worker.queue_frames([LLMFullResponseStartFrame(), *frames])
    if ended:
        await worker.queue_frames([LLMFullResponseEndFrame()])


@dataclass
class Interruption:
    """A turn that is interrupted once it speaks.

    Attributes:
        text: Its text.
        ended: Whether the language model has written it to its end.
        stopped: Whether the server has stopped it.
        speaks: Whether the server speaks it, for services that read a reply to its end first; None
            to wait for its audio.
    """

    text: str
    ended: bool
    stopped: Callable[[], bool]
    speaks: Callable[[], bool] | None = None


async def speak(
    service: TTSService,
    text: str = TEXT,
    interruption: Interruption | None = None,
    *,
    resumed: bool = True,
) -> Sink:
    """Speaks a turn, after another one that is interrupted; | separates portions of the text.

    Without `resumed` the pipeline ends within the interrupted turn instead.
    """
    sink = Sink()
    params = PipelineParams(audio_out_sample_rate=24_000)
    worker = PipelineWorker(Pipeline([service, sink]), params=params)

    @worker.event_handler("on_pipeline_error")
    async def on_error(_: PipelineWorker, frame: ErrorFrame) -> None:
        sink.errors.append(frame.error)

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    if interruption is not None:
        await turn(worker, interruption.text, ended=interruption.ended)
        if interruption.speaks is None:
            await asyncio.wait_for(sink.started.wait(), TIMEOUT_S)
        else:
            await until(interruption.speaks)
        if not resumed:
            await worker.cancel()
            await running
            return sink
        await worker.queue_frames([InterruptionFrame()])
        await asyncio.wait_for(sink.interrupted.wait(), TIMEOUT_S)
        await until(interruption.stopped)
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


def elevenlabs_service(server: RunningServer) -> ElevenLabsTTSService:
    settings = ElevenLabsTTSService.Settings(voice="ryan", model="simulated")
    return ElevenLabsTTSService(api_key="none", url=f"ws://{server.authority}", settings=settings)


def elevenlabs_http_service(server: RunningServer) -> ElevenLabsHttpTTSService:
    settings = ElevenLabsHttpTTSService.Settings(voice="ryan", model="simulated")
    return ElevenLabsHttpTTSService(
        api_key="none",
        base_url=server.url,
        aiohttp_session=aiohttp.ClientSession(),
        settings=settings,
    )


def openai_service(server: RunningServer) -> OpenAITTSService:
    settings = OpenAITTSService.Settings(voice="alloy", model="simulated")
    return OpenAITTSService(api_key="none", base_url=f"{server.url}/v1", settings=settings)


SERVICES = [
    socket_service,
    http_service,
    elevenlabs_service,
    elevenlabs_http_service,
    openai_service,
]


async def close_client(service: TTSService) -> None:
    """Closes the HTTP client of a service that leaves this to its owner or to the collector."""
    if isinstance(service, OpenAITTSService):
        await service._client.close()
    elif isinstance(service, ElevenLabsHttpTTSService):
        await service._session.close()


@pytest.mark.parametrize("make", SERVICES)
def test_unmodified_services_of_pipecat_speak(
    server: RunningServer, make: Callable[[RunningServer], TTSService]
) -> None:
    async def run() -> Sink:
        service = make(server)
        sink = await speak(service)
        await close_client(service)
        return sink

    sink = asyncio.run(run())
    assert not sink.errors
    assert words_in_audio(np.frombuffer(sink.audio, "<i2")) == [0, 1]


@pytest.mark.parametrize("make", [socket_service, elevenlabs_service])
def test_pipecat_gets_every_word_of_every_sentence(
    server: RunningServer, make: Callable[[RunningServer], TTSService]
) -> None:
    async def run() -> Sink:
        return await speak(make(server), text="Hello there. |My friend, good day.")

    sink = asyncio.run(run())
    assert not sink.errors
    assert " ".join(sink.words) == "Hello there. My friend, good day."


@pytest.mark.parametrize("make", [socket_service, elevenlabs_service])
def test_word_times_in_pipecat_are_those_of_the_engine(
    server: RunningServer, make: Callable[[RunningServer], TTSService]
) -> None:
    async def run() -> Sink:
        return await speak(make(server), text="Hello there, my friend.")

    times_ns = asyncio.run(run()).word_times_ns
    starts = [word.start for word in server.tts.say("Hello there, my friend.").words]
    assert [(time_ns - times_ns[0]) / 1e9 for time_ns in times_ns] == pytest.approx(starts)


@pytest.mark.parametrize("make", [socket_service, elevenlabs_service])
@pytest.mark.parametrize("ended", [True, False], ids=["whole reply", "unfinished reply"])
def test_an_interruption_of_pipecat_stops_the_context(
    server: RunningServer, make: Callable[[RunningServer], TTSService], ended: bool
) -> None:
    interruption = Interruption("A long turn. " * 200, ended, lambda: server.num_streams == 0)

    async def run() -> Sink:
        return await speak(make(server), interruption=interruption)

    sink = asyncio.run(run())
    assert not sink.errors
    assert words_in_audio(np.frombuffer(sink.audio, "<i2")) == [0, 1]


@pytest.mark.parametrize("make", SERVICES)
@pytest.mark.parametrize("interrupted", [True, False], ids=["interruption", "end of the pipeline"])
def test_pipecat_stops_the_stream_of_a_sentence(
    server: RunningServer, make: Callable[[RunningServer], TTSService], interrupted: bool
) -> None:
    """Services over HTTP send a sentence with each request, as fast as they can read."""
    aborted = server.metric('requests_success_total{finished_reason="abort"}')
    interruption = Interruption(
        " ".join(["on"] * 500),
        True,
        stopped=lambda: server.num_streams == 0,
        speaks=lambda: server.metric("num_requests_running") == 1,
    )

    async def run() -> None:
        service = make(server)
        sink = await speak(service, interruption=interruption, resumed=interrupted)
        await close_client(service)
        assert not interrupted or words_in_audio(np.frombuffer(sink.audio, "<i2")) == [0, 1]

    asyncio.run(run())
    wait_until(lambda: server.num_streams == 0)
    assert server.metric('requests_success_total{finished_reason="abort"}') == aborted + 1


async def first_error(service: TTSService) -> str:
    """Speaks a turn that fails: the error in the pipeline."""
    worker = PipelineWorker(Pipeline([service, Sink()]))
    error = asyncio.get_running_loop().create_future()

    @worker.event_handler("on_pipeline_error")
    async def _(_: PipelineWorker, frame: ErrorFrame) -> None:
        if not error.done():
            error.set_result(frame.error)

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    await turn(worker, TEXT)
    message = await asyncio.wait_for(error, TIMEOUT_S)
    await worker.cancel()
    await running
    return message


@pytest.mark.parametrize("make", SERVICES)
def test_pipecat_reports_an_invalid_key(
    engine: TTS, make: Callable[[RunningServer], TTSService]
) -> None:
    async def run(server: RunningServer) -> str:
        service = make(server)
        message = await first_error(service)
        await close_client(service)
        return message

    with running_server(engine, LOCKED) as server:
        message = asyncio.run(run(server))
        assert "401" in message or "API key" in message
