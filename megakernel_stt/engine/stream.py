"""One stream: packets to samples to events. The engine thread owns it."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel_common.errors import EngineClosedError
from megakernel_stt.audio import Resampler, full_scale
from megakernel_stt.engine.recogniser import Recogniser, Recognition
from megakernel_stt.errors import RecognitionError
from megakernel_stt.model.config import FRAME_S, SAMPLE_RATE
from megakernel_stt.session import EventQueue, Final, Inbox, Packet, Partial, Request
from megakernel_stt.transcript import Transcript


class Stream:
    """One stream.

    A request forks the recognition: the fork gets the samples that the resampler holds back, and
    ends. The stream itself is not changed by it.

    Attributes:
        recogniser: Computes its chunks.
        live: Whether its audio is spoken now, so that its chunks precede synthesis.
        finished: Whether its last event was delivered.
    """

    def __init__(
        self,
        recogniser: Recogniser,
        prompt: int,
        inbox: Inbox,
        events: EventQueue,
        *,
        live: bool = True,
    ) -> None:
        """Begins a stream.

        Args:
            recogniser: Computes its chunks.
            prompt: Index of the language.
            inbox: Its audio and requests.
            events: Its events.
            live: See the attribute.
        """
        self.recogniser = recogniser
        self.live = live
        self.finished = False
        self._inbox = inbox
        self._events = events
        self._resampler = Resampler(SAMPLE_RATE)
        self._sample_rate = SAMPLE_RATE
        self._recognition = recogniser.start(prompt)
        self._fork: Recognition[Any] | None = None
        self._request: Request = "finalize"  # that the fork answers
        self._num_reported = 0  # tokens

    @property
    def abandoned(self) -> bool:
        """Whether the session's events have no reader."""
        return self._events.abandoned

    @property
    def holds_slot(self) -> bool:
        """Whether it occupies a slot: until its last event is delivered, or it has no reader."""
        return not (self.finished or self.abandoned)

    def next_chunk(self) -> Recognition[Any] | None:
        """Reads entries until there is a chunk to compute.

        Returns:
            The recognition that is ready, None if the stream waits for audio.
        """
        while not self.finished:
            if self._fork is not None:
                if self.recogniser.is_ready(self._fork):
                    return self._fork
                self._answer(self._fork)
                continue
            if self.recogniser.is_ready(self._recognition):
                return self._recognition
            entry = self._inbox.get(self.recogniser.missing_s(self._recognition))
            if entry is None:
                return None
            if isinstance(entry, str):
                self._request = entry
                self._fork = self._recognition.fork_ended(self._resampler.rest())
                continue
            for samples, sample_rate in _joined(entry):
                self._add(samples, sample_rate)
        return None

    def report(self) -> None:
        """Delivers a partial result if there are new tokens."""
        tokens = self._recognition.tokens
        if len(tokens) > self._num_reported:
            self._num_reported = len(tokens)
            decoded_s = self._recognition.num_frames * FRAME_S
            self._events.put(Partial(Transcript(tokens, decoded_s)))

    def finish(self, error: RecognitionError | EngineClosedError | None = None) -> None:
        """Delivers the end of the events, or an error; further audio is ignored."""
        self.finished = True
        self._inbox.close()
        self._events.finish(error)

    def _add(self, samples: NDArray[np.float32], sample_rate: int) -> None:
        """Adds samples [samples] of a sampling rate."""
        if sample_rate != self._sample_rate:
            self._push(self._resampler.rest())
            self._resampler = Resampler(sample_rate)
            self._sample_rate = sample_rate
        self._push(self._resampler.push(samples))

    def _push(self, samples: NDArray[np.float32]) -> None:
        self._recognition.add(samples)
        self.recogniser.check_length(self._recognition)

    def _answer(self, fork: Recognition[Any]) -> None:
        """Delivers the result of a fork."""
        self.finished = self._request == "end"
        self._fork = None
        transcript = Transcript(fork.tokens, fork.num_samples / SAMPLE_RATE)
        self._events.put(Final(transcript, self.finished))


def _joined(packets: Sequence[Packet]) -> Iterator[tuple[NDArray[np.float32], int]]:
    """Samples and sampling rates of packets; adjacent ones of bytes and one rate are joined."""
    for (sample_rate, kind), group in groupby(packets, lambda p: (p.sample_rate, type(p.samples))):
        parts = [packet.samples for packet in group]
        for samples in [b"".join(parts)] if kind is bytes else parts:  # type: ignore[arg-type]
            yield full_scale(samples), sample_rate
