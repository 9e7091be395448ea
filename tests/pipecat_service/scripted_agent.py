"""`examples/voice_agent.py` with scripted services and a simulated model, for Pipecat's runner."""

import math
from collections.abc import AsyncGenerator
from unittest.mock import patch

from pipecat.frames.frames import BotStoppedSpeakingFrame, Frame, TranscriptionFrame
from pipecat.processors.frame_processor import FrameDirection
from pipecat.runner.types import RunnerArguments
from pipecat.runner.utils import create_transport
from pipecat.services.settings import STTSettings
from pipecat.services.stt_service import STTService
from pipecat.utils.time import time_now_iso8601

from bench.simulation import simulated_tts
from examples import voice_agent
from megakernel_tts import TTS
from tests.pipecat_service.bot import ScriptedLLM, spaced_words

GREETING = "Hello, and welcome. What can I do for you today?"
ANSWER = "I am sorry, I have heard that before."
QUESTION = "Tell me a joke."

_QUESTION_AFTER_S = 4.0  # of audio from the microphone, after the greeting


class ScriptedSTT(STTService):
    """Transcribes one sentence some seconds after the greeting, whatever the audio contains."""

    def __init__(self) -> None:
        super().__init__(settings=STTSettings(model="scripted", language=None))
        self._remaining_s = math.inf

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """See `FrameProcessor`; the agent's speech ends."""
        await super().process_frame(frame, direction)
        if isinstance(frame, BotStoppedSpeakingFrame) and self._remaining_s == math.inf:
            self._remaining_s = _QUESTION_AFTER_S

    async def run_stt(self, audio: bytes) -> AsyncGenerator[Frame | None, None]:
        """Takes a chunk of audio."""
        before_s = self._remaining_s
        self._remaining_s -= len(audio) / 2 / self.sample_rate
        if before_s > 0 >= self._remaining_s:
            yield TranscriptionFrame(QUESTION, "caller", time_now_iso8601(), finalized=True)


async def bot(args: RunnerArguments) -> None:
    """Handles one call."""
    transport = await create_transport(args, voice_agent.TRANSPORTS)
    llm = ScriptedLLM([[GREETING], [ANSWER], [ANSWER]], 0.02, spaced_words)
    await voice_agent.converse(transport, ScriptedSTT(), llm, args)


if __name__ == "__main__":
    from pipecat.runner.run import main

    with patch.object(TTS, "load", lambda _, slots: simulated_tts(slots)):
        voice_agent.engine()
    main()
