"""Clones a voice from a recording and speaks with it in a Pipecat pipeline, into clone_voice.wav.

    python examples/clone_voice.py me.wav "What I say in the recording."

Cloning needs a Base model: by default Qwen/Qwen3-TTS-12Hz-0.6B-Base is downloaded. The voice is
saved in voice.safetensors; `Voice.load` reads it without the recording.
"""

import argparse
import asyncio
import wave

from pipecat.frames.frames import EndFrame, Frame, TTSAudioRawFrame, TTSSpeakFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.workers.runner import WorkerRunner

from megakernel_tts import TTS, MegakernelTTSError, Sampling, Voice
from pipecat_service import MegakernelTTSService

RATE = 24_000


class Recorder(FrameProcessor):
    """Writes the speech to a file instead of a transport."""

    def __init__(self, file: wave.Wave_write) -> None:
        super().__init__()
        self.num_frames = 0
        self._file = file

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self._file.writeframes(frame.audio)
            self.num_frames += frame.num_frames
        await self.push_frame(frame, direction)


async def main(recording: str, transcript: str, text: str, model: str, seconds: float) -> None:
    with TTS.load(model) as engine:
        await engine.awarmup()
        voice = await asyncio.to_thread(engine.clone, recording, transcript)
        voice.save("voice.safetensors")
        tts = MegakernelTTSService(
            engine=engine,
            voices={"cloned": Voice.load("voice.safetensors")},  # values of the setting `voice`
            settings=MegakernelTTSService.Settings(
                voice="cloned", sampling=Sampling(max_frames=round(seconds * 12.5))
            ),
            sample_rate=RATE,
        )
        with wave.open("clone_voice.wav", "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            recorder = Recorder(file)
            worker = PipelineWorker(Pipeline([tts, recorder]), enable_rtvi=False)
            runner = WorkerRunner()
            await runner.add_workers(worker)
            await worker.queue_frames([TTSSpeakFrame(text), EndFrame()])
            await runner.run()
    if not recorder.num_frames:
        raise SystemExit("Nothing was spoken; the log above gives the reason.")
    print("The voice is in voice.safetensors, its speech in clone_voice.wav.")


def duration(value: str) -> float:
    """Seconds of speech."""
    if not 0 < (seconds := float(value)) <= 160:
        raise ValueError(value)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", help="3 to 15 s of one speaker")
    parser.add_argument("transcript", help="the text of the recording")
    parser.add_argument("--text", default="Hello. This is my voice, and I never said this.")
    parser.add_argument("--model", default="Qwen/Qwen3-TTS-12Hz-0.6B-Base")
    parser.add_argument("--seconds", type=duration, default=60, help="of speech, 160 at most")
    options = parser.parse_args()
    try:
        asyncio.run(main(**vars(options)))
    except MegakernelTTSError as error:
        raise SystemExit(f"{error}") from None
