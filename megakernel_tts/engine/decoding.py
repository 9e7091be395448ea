"""The loop's way from frames to sound: which chunks are being decoded, and for whom.

A chunk is begun once it is due or, where the device can tell codes before the host knows them,
while its last frames are being made. One batch of chunks is under way at a time; it is delivered
beside whatever the device does next.
"""

import logging
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel_tts.backends.protocol import PendingCodes
from megakernel_tts.codec.decoder import DecodeRequest
from megakernel_tts.codec.vocoder import ConfirmFrames, PendingSamples, Vocoder
from megakernel_tts.engine.stream import Segment, Stream, speaking

_log = logging.getLogger("megakernel_tts")


class _Begun(NamedTuple):
    """What is being decoded: who speaks, the codes [frames, groups] of each, their samples."""

    speaking: Sequence[tuple[Stream, Segment]]
    codes: Sequence[Tensor]
    decoding: PendingSamples


class _Expected(NamedTuple):
    """Chunks that are being decoded before it is known whether all of their frames are made."""

    speaking: Sequence[tuple[Stream, Segment]]
    frames: Sequence[int]
    settle: ConfirmFrames


class DecodePipeline:
    """Chunks on their way through the vocoder. What goes wrong ends the streams that it hits."""

    def __init__(self, vocoder: Vocoder) -> None:
        """Nothing is under way."""
        self._vocoder = vocoder
        self._begun: _Begun | None = None
        self._expected: _Expected | None = None

    def expect(self, moving: Sequence[Stream], coming: PendingCodes) -> None:
        """Begins to decode the chunks that will be due after this step; nothing here raises.

        Args:
            moving: Who is stepped; what was being decoded has been delivered.
            coming: Where the codes of each will be.
        """
        try:
            chunks = [stream.expect(rows) for stream, rows in zip(moving, coming, strict=True)]
            here = [
                c is not None and c.num_frames <= self._vocoder.max_pending_frames for c in chunks
            ]
            parts = [chunk for chunk in compress(chunks, here) if chunk is not None]
            if parts:
                frames = [part.num_frames for part in parts]
                who = [*compress(speaking(moving), here)]
                self._expected = _Expected(who, frames, self._vocoder.decode_pending(parts))
        except Exception:
            _log.warning("A chunk is decoded late: it could not be begun early.", exc_info=True)

    def settle(self, *, failed: bool = False) -> None:
        """After the step: what was expected and is due is being decoded; the rest never was.

        Args:
            failed: Whether the step was, so that nothing is due.
        """
        expected, self._expected = self._expected, None
        if expected is None:
            return
        who, most, settle = expected
        due = [0 if failed or not s.due else len(s.outgoing) for s, _ in who]
        counts = [count if count <= frames else 0 for count, frames in zip(due, most, strict=True)]
        try:
            decoding = settle(counts)
        except Exception:
            return  # they are still due: decoded again, it fails again, and they are told
        leaving = [*compress(who, counts)]
        self._begin(leaving, [torch.stack(stream.outgoing) for stream, _ in leaving], decoding)

    def decode(self, due: Sequence[Stream]) -> None:
        """Begins to decode pending frames; if that fails, each alone, to find the culprit.

        Args:
            due: Whose slots they have; what was being decoded before has been delivered.
        """
        who = speaking(due)
        if not who:
            return
        parts: list[DecodeRequest] = []
        for stream, _ in who:
            assert stream.slot is not None
            parts.append(DecodeRequest(stream.slot, torch.stack(stream.outgoing)))
        try:
            decoding = self._vocoder.decode(parts)
        except Exception as error:
            if len(who) > 1:
                for stream in due:
                    self.decode([stream])
                    self.deliver()
                return
            _silence(who, error)
            return
        self._begin(who, [codes for _, codes in parts], decoding)

    def _begin(
        self,
        who: Sequence[tuple[Stream, Segment]],
        codes: Sequence[Tensor],
        decoding: PendingSamples,
    ) -> None:
        """What is outgoing is being decoded."""
        for stream, _ in who:
            stream.begin_decoding()
        self._begun = _Begun(who, codes, decoding)

    def deliver(self) -> None:
        """Hands over what is being decoded, if anything is, to those who still listen."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        who, parts, decoding = begun
        listening = [stream.utterance is u for stream, u in who]
        try:
            made = decoding()
        except Exception as error:
            _silence([*compress(who, listening)], error)
            return
        rate = self._vocoder.sample_rate
        everything = zip(who, parts, made, strict=True)
        for (stream, u), codes, samples in compress(everything, listening):
            if samples is None:
                error = FloatingPointError("The codec's waveform is not finite.")
                _silence([(stream, u)], error)
                continue
            try:
                stream.deliver(codes=codes, samples=samples, rate=rate)
            except Exception as error:
                u.fail(error)


def _silence(who: Sequence[tuple[Stream, Segment]], error: Exception) -> None:
    """Ends streams before frames that cannot be heard: nothing after a gap is heard either."""
    for _, u in who:
        u.pending = []
        u.fail(error)
