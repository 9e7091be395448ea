"""Times at which a recogniser has computed the chunks of its streams."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import count
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from megakernel_stt import STT
from megakernel_stt.engine.recogniser import Recogniser, Recognition


class StepTimer:
    """A recogniser that records when each chunk of a stream was computed.

    Attributes:
        steps: Index of a stream in the order of opening, its frames so far, and the end of the
            step, in seconds of `perf_counter`. Chunks of final results are not recorded.
    """

    def __init__(self, recogniser: Recogniser) -> None:
        """Records nothing yet.

        Args:
            recogniser: Computes the chunks.
        """
        self.steps: list[tuple[int, int, float]] = []
        self._recogniser = recogniser
        # A reference would keep the state slots of streams that have ended.
        self._streams = WeakKeyDictionary[Recognition[Any], int]()
        self._next_stream = count()

    @property
    def chunk_s(self) -> float | None:
        """See `Recogniser`."""
        return self._recogniser.chunk_s

    def start(self, prompt: int) -> Recognition[Any]:
        """See `Recogniser`."""
        recognition = self._recogniser.start(prompt)
        self._streams[recognition] = next(self._next_stream)
        return recognition

    def is_ready(self, recognition: Recognition[Any]) -> bool:
        """See `Recogniser`."""
        return self._recogniser.is_ready(recognition)

    def missing_s(self, recognition: Recognition[Any]) -> float:
        """See `Recogniser`."""
        return self._recogniser.missing_s(recognition)

    def check_length(self, recognition: Recognition[Any]) -> None:
        """See `Recogniser`."""
        self._recogniser.check_length(recognition)

    def step(self, recognitions: Sequence[Recognition[Any]]) -> None:
        """See `Recogniser`."""
        self._recogniser.step(recognitions)
        now_s = perf_counter()
        self.steps += [
            (self._streams[each], each.num_frames, now_s) for each in recognitions if not each.ended
        ]


@contextmanager
def timed_steps(stt: STT, lookahead_ms: int) -> Generator[StepTimer]:
    """Times the steps of sessions with this lookahead that are opened in the block."""
    recogniser = stt._recognisers[lookahead_ms]
    timer = StepTimer(recogniser)
    stt._recognisers[lookahead_ms] = timer
    try:
        yield timer
    finally:
        stt._recognisers[lookahead_ms] = recogniser
