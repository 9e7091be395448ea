"""Speaks typed text in a Pipecat pipeline, into a wav file; needs no keys and no microphone.

    python examples/text_only.py                  # repeats what you type, in text_only.wav
    python examples/text_only.py --speaker        # plays it; needs 'pipecat-ai[local]'
    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_MODEL=... python examples/text_only.py

A language model answers if OPENAI_API_KEY or OPENAI_BASE_URL (any compatible endpoint) is set.
"""

import argparse
import asyncio
import os
import sys
import wave
from importlib import import_module

from loguru import logger
from pipecat.frames import frames
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner

from megakernel_tts import TTS, MegakernelTTSError
from pipecat_service import MegakernelTTSService


class Echo(FrameProcessor):
    """Replaces a language model: repeats the user's text."""

    async def process_frame(self, frame: frames.Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if not isinstance(frame, frames.LLMContextFrame):
            await self.push_frame(frame, direction)
            return
        await self.push_frame(frames.LLMFullResponseStartFrame())
        text = frame.context.messages[-1]["content"]  # type: ignore[index]
        await self.push_frame(frames.LLMTextFrame(str(text)))
        await self.push_frame(frames.LLMFullResponseEndFrame())


class WavOutput(BaseOutputTransport):
    """Writes the audio to a file instead of playing it."""

    def __init__(self, file: str) -> None:
        super().__init__(TransportParams(audio_out_enabled=True, audio_out_end_silence_secs=0))
        self._file = wave.open(file, "wb")  # closed when the pipeline ends

    async def start(self, frame: frames.StartFrame) -> None:
        await super().start(frame)
        self._file.setparams((1, 2, self.sample_rate, 0, "NONE", ""))
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: frames.OutputAudioRawFrame) -> bool:
        self._file.writeframes(frame.audio)
        return True

    async def cleanup(self) -> None:
        await super().cleanup()
        self._file.close()


def output(speaker: bool) -> FrameProcessor:
    if not speaker:
        return WavOutput("text_only.wav")
    try:
        import_module("pyaudio").PyAudio().get_default_output_device_info()
        audio = import_module("pipecat.transports.local.audio")
    except ImportError:
        raise SystemExit("--speaker needs PyAudio: pip install 'pipecat-ai[local]'.") from None
    except OSError:
        raise SystemExit("--speaker finds no loudspeaker; omit it to write a file.") from None
    parameters = audio.LocalAudioTransportParams(audio_out_enabled=True)
    return audio.LocalAudioTransport(parameters).output()


def language_model() -> FrameProcessor:
    key, url = os.getenv("OPENAI_API_KEY"), os.getenv("OPENAI_BASE_URL")
    if not (key or url):
        return Echo()
    settings = OpenAILLMService.Settings(model=os.getenv("OPENAI_MODEL", "gpt-4.1-mini"))
    return OpenAILLMService(api_key=key or "none", base_url=url, settings=settings)


async def main(speaker: bool, model: str) -> None:
    with TTS.load(model) as engine:
        await engine.awarmup()
        tts = MegakernelTTSService(engine=engine)
        user, assistant = LLMContextAggregatorPair(LLMContext())
        steps = [user, language_model(), tts, output(speaker), assistant]
        worker = PipelineWorker(Pipeline(steps), enable_rtvi=False)
        runner = WorkerRunner()
        await runner.add_workers(worker)
        running = asyncio.create_task(runner.run())
        print("Type a text to speak; end with Ctrl-D.")
        while line := await asyncio.to_thread(sys.stdin.readline):
            text = line.strip()
            ask = frames.LLMMessagesAppendFrame([{"role": "user", "content": text}], run_llm=True)
            await worker.queue_frame(ask)
        await worker.queue_frame(frames.EndFrame())  # after the current speech
        await running


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speaker", action="store_true", help="play the speech")
    parser.add_argument("--model", default="demo", help="demo, a folder or a hub id")
    options = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    try:
        asyncio.run(main(options.speaker, options.model))
    except MegakernelTTSError as error:
        raise SystemExit(f"{error}") from None
