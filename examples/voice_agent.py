"""A voice agent: recognition by Deepgram, answers by OpenAI, speech by this machine.

    pip install '.[voice-agent]'
    export DEEPGRAM_API_KEY=... OPENAI_API_KEY=...
    python examples/voice_agent.py              # then open http://localhost:7860/client

OPENAI_BASE_URL selects a compatible endpoint, which needs no key: for Ollama
http://localhost:11434/v1 with OPENAI_MODEL=llama3.2. MEGAKERNEL_TTS_MODEL selects the voice model.
The agent also accepts phone calls (`-t twilio -x your.host`, or telnyx, plivo, exotel), WebSocket
clients at /ws-client, and `pipecat eval` at /ws.
"""

import gc
import os
from functools import cache, partial

from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.evals.transport import EvalTransportParams
from pipecat.frames.frames import LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators import llm_response_universal as aggregators
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.runner.types import RunnerArguments
from pipecat.runner.utils import create_transport
from pipecat.serializers.protobuf import ProtobufFrameSerializer
from pipecat.services.deepgram.stt import DeepgramSTTService
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.transports.base_transport import BaseTransport, TransportParams
from pipecat.transports.websocket.fastapi import FastAPIWebsocketParams
from pipecat.workers.runner import WorkerRunner

from megakernel_tts import TTS
from pipecat_service import MegakernelTTSService

INSTRUCTION = "What you write is spoken: use two or three plain sentences, no markdown or emoji."
PHONES = ("twilio", "telnyx", "plivo", "exotel")  # the runner adds their serializers
WEBSOCKET = partial(FastAPIWebsocketParams, audio_in_enabled=True, audio_out_enabled=True)
TRANSPORTS = {
    "webrtc": lambda: TransportParams(audio_in_enabled=True, audio_out_enabled=True),
    "websocket": lambda: WEBSOCKET(serializer=ProtobufFrameSerializer()),
    "eval": lambda: EvalTransportParams(audio_in_enabled=True, audio_out_enabled=True),
    **dict.fromkeys(PHONES, WEBSOCKET),
}


@cache
def engine() -> TTS:
    """The engine of all calls, loaded and warmed up before the first."""
    tts = TTS.load(os.getenv("MEGAKERNEL_TTS_MODEL", "demo"), slots=8)
    tts.warmup()
    gc.freeze()  # a full garbage collection would interrupt all speech for 0.1 s
    return tts


def key(name: str, purpose: str) -> str:
    if value := os.getenv(name):
        return value
    raise SystemExit(
        f"{name} is not set, and without it this agent cannot {purpose}: export {name}=..., or try "
        "examples/text_only.py, which needs no keys."
    )


def speech_to_text() -> FrameProcessor:
    return DeepgramSTTService(api_key=key("DEEPGRAM_API_KEY", "recognise speech"))


def language_model() -> FrameProcessor:
    url = os.getenv("OPENAI_BASE_URL")
    # The client requires a key, even for an endpoint that needs none.
    api_key = os.getenv("OPENAI_API_KEY") or ("none" if url else key("OPENAI_API_KEY", "answer"))
    model = os.getenv("OPENAI_MODEL", "gpt-4.1-mini")
    settings = OpenAILLMService.Settings(model=model, system_instruction=INSTRUCTION)
    return OpenAILLMService(api_key=api_key, base_url=url, settings=settings)


async def converse(
    transport: BaseTransport, stt: FrameProcessor, llm: FrameProcessor, args: RunnerArguments
) -> None:
    """Handles one call."""
    tts = MegakernelTTSService(engine=engine())
    context = LLMContext()
    user_params = aggregators.LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer())
    user, assistant = aggregators.LLMContextAggregatorPair(context, user_params=user_params)
    steps = [transport.input(), stt, user, llm, tts, transport.output(), assistant]
    worker = PipelineWorker(
        Pipeline(steps),
        params=PipelineParams(enable_metrics=True, enable_usage_metrics=True),
        idle_timeout_secs=args.pipeline_idle_timeout_secs,
    )
    runner = WorkerRunner(handle_sigint=args.handle_sigint)
    await runner.add_workers(worker)

    @transport.event_handler("on_client_connected")
    async def greet(*_: object) -> None:
        context.add_message({"role": "user", "content": "Greet the caller in one sentence."})
        await worker.queue_frame(LLMRunFrame())

    @transport.event_handler("on_client_disconnected")
    async def hang_up(*_: object) -> None:
        await runner.cancel()

    await runner.run()


async def bot(args: RunnerArguments) -> None:
    """Entry point of Pipecat's runner for a call."""
    transport = await create_transport(args, TRANSPORTS)
    await converse(transport, speech_to_text(), language_model(), args)


if __name__ == "__main__":
    from pipecat.runner.run import main

    for service in (speech_to_text, language_model, engine):
        service()  # reports missing keys before the first call
    main()
