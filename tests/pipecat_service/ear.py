"""Pipecat's harness hears the agent through this: whether it speaks, not what it says."""

from collections.abc import AsyncGenerator, Mapping

import numpy as np
from pipecat.frames.frames import Frame, TranscriptionFrame
from pipecat.services.settings import STTSettings
from pipecat.services.stt_service import SegmentedSTTService
from pipecat.utils.time import time_now_iso8601

LOUD = 1000  # of 32767
ENOUGH = 0.5  # seconds


class Ear(SegmentedSTTService):
    """Writes "speech" for every segment in which half a second is loud."""

    def __init__(self) -> None:
        super().__init__(settings=STTSettings(model="ear", language=None))

    @property
    def wants_wav_segments(self) -> bool:
        """Samples without a header."""
        return False

    async def run_stt(self, audio: bytes) -> AsyncGenerator[Frame | None, None]:
        """Takes a segment."""
        loud = np.abs(np.frombuffer(audio, np.int16).astype(int)) > LOUD
        if np.count_nonzero(loud) > ENOUGH * self.sample_rate:
            yield TranscriptionFrame("speech", "agent", time_now_iso8601(), finalized=True)


def ear(_: Mapping[str, object]) -> Ear:
    """What the scenario file names."""
    return Ear()
