"""`examples/voice_agent.py` with a scripted ear and mind: a program for Pipecat's runner."""

from collections.abc import AsyncGenerator

from pipecat.frames.frames import Frame, TranscriptionFrame
from pipecat.runner.types import RunnerArguments
from pipecat.runner.utils import create_transport
from pipecat.services.settings import STTSettings
from pipecat.services.stt_service import STTService
from pipecat.utils.time import time_now_iso8601

from examples import voice_agent
from tests.pipecat_service.bot import ScriptedLLM

GREETING = "Hello, and welcome. What can I do for you today?"
ANSWER = "I am sorry, I have heard that before."
HEARD = "Tell me a joke."

_PATIENCE = 6.0  # seconds of the microphone after which the caller is taken to have spoken


class ScriptedSTT(STTService):
    """Hears one sentence after some seconds, whatever comes from the microphone."""

    def __init__(self) -> None:
        super().__init__(settings=STTSettings(model="scripted", language=None))
        self._left = _PATIENCE

    async def run_stt(self, audio: bytes) -> AsyncGenerator[Frame | None, None]:
        """Takes a piece of audio."""
        before, self._left = self._left, self._left - len(audio) / 2 / self.sample_rate
        if before > 0 >= self._left:
            yield TranscriptionFrame(HEARD, "caller", time_now_iso8601(), finalized=True)


async def bot(args: RunnerArguments) -> None:
    """One call."""
    transport = await create_transport(args, voice_agent.TRANSPORTS)
    mind = ScriptedLLM([[GREETING], [ANSWER], [ANSWER]], delay=0.02)
    await voice_agent.converse(transport, ScriptedSTT(), mind, args)


if __name__ == "__main__":
    from pipecat.runner.run import main

    voice_agent.engine()
    main()
