"""The decode pipeline: batches codes of all streams through the codec.

At most one batch is in flight. It begins once its chunks are due, or while their last frames are
being made, if the backend reports where the codes will be. It is delivered at one point of the loop
or beside the device's next work; see `Loop`.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megakernel_tts.align.intervals import FRAME_INTERVALS, interval_peaks
from megakernel_tts.backends.protocol import PendingCodes
from megakernel_tts.codec.decoder import DecodeRequest, PendingDecodeRequest
from megakernel_tts.codec.vocoder import ConfirmFrames, PendingSamples, Vocoder
from megakernel_tts.engine.lock_pauses import LockPauses
from megakernel_tts.engine.stream import Stream

_log = logging.getLogger("megakernel_tts")


class _ChunkBatch(NamedTuple):
    """Chunks in flight.

    Attributes:
        streams: One for each chunk.
        codes: [frames, groups] of each chunk.
        wait: Waits for the samples of each chunk.
    """

    streams: Sequence[Stream]
    codes: Sequence[NDArray[np.int64]]
    wait: PendingSamples


class _EarlyBatch(NamedTuple):
    """Chunks that the vocoder was given before all of their frames were made.

    Attributes:
        streams: One for each chunk.
        num_frames: Of each chunk, if the step makes all of its frames.
        confirm: Takes how many frames of each chunk there are.
    """

    streams: Sequence[Stream]
    num_frames: Sequence[int]
    confirm: ConfirmFrames


class DecodePipeline:
    """Chunks in the vocoder. A failure ends the streams whose chunks it affects, and no other."""

    def __init__(
        self, vocoder: Vocoder, on_delivered: Callable[[], object], pauses: LockPauses
    ) -> None:
        """Starts with nothing in flight.

        Args:
            vocoder: Decodes the chunks.
            on_delivered: Called after the chunks of a batch were delivered.
            pauses: Of the engine thread.
        """
        self._vocoder = vocoder
        self._on_delivered = on_delivered
        self._pauses = pauses
        self._batch: _ChunkBatch | None = None
        self._early: _EarlyBatch | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a batch was begun and not delivered."""
        return self._batch is not None

    @property
    def has_first_chunk(self) -> bool:
        """Whether the batch in flight has a stream's first chunk, which its reader gets at once."""
        streams = self._batch.streams if self._batch is not None else ()
        # With retries the audio of a segment is delivered at its end.
        return any(not s.delivery.num_frames and not s.request.max_retries for s in streams)

    def begin_early(self, moving: Sequence[Stream], pending_codes: PendingCodes) -> None:
        """Begins the chunks that will be due after the step under way; does not raise.

        The batch in flight is delivered before.

        Args:
            moving: Streams that are stepped.
            pending_codes: Where the codes of each stream will be.
        """
        self._pauses.pause_if_due()
        if self.deliver():
            self._pauses.pause()  # for the readers that were woken
        try:
            chunks = self._early_chunks(moving, pending_codes)
            if chunks:
                requests = [request for _, request in chunks]
                self._early = _EarlyBatch(
                    [stream for stream, _ in chunks],
                    [request.num_frames for request in requests],
                    self._vocoder.decode_pending(requests),
                )
        except Exception:
            _log.warning("A chunk is decoded late: it could not be begun early.", exc_info=True)
        self._pauses.pause_if_due()  # the device still makes the last frame

    def _early_chunks(
        self, moving: Sequence[Stream], pending_codes: PendingCodes
    ) -> list[tuple[Stream, PendingDecodeRequest]]:
        """Returns the requests of the chunks that are begun early, as many as the vocoder takes.

        Those with the earliest deadlines come first.
        """
        upcoming = sorted(
            zip(moving, pending_codes, strict=True), key=lambda pair: pair[0].deadline_s
        )
        chunks: list[tuple[Stream, PendingDecodeRequest]] = []
        num_left = self._vocoder.max_pending_total
        for stream, codes in upcoming:
            request = self._early_request(stream, codes)
            if request is not None and request.num_frames <= num_left:
                chunks.append((stream, request))
                num_left -= request.num_frames
        return chunks

    def _early_request(
        self, stream: Stream, upcoming: NDArray[np.int32]
    ) -> PendingDecodeRequest | None:
        """Returns the request for the chunk that will be due, if the vocoder takes it early.

        Args:
            stream: A stream that is stepped.
            upcoming: Where the codes of its frames will be, [frames, groups].
        """
        num_frames = stream.num_expected(len(upcoming))
        if not 0 < num_frames <= self._vocoder.max_pending_frames:
            return None
        received = stream.active_segment.pending[:num_frames]
        if not len(received):
            received = np.empty((0, upcoming.shape[1]), np.int64)
        num_upcoming = num_frames - len(received)
        return PendingDecodeRequest(stream.active_slot, received, upcoming[:num_upcoming])

    def confirm_early(self, *, step_failed: bool = False) -> None:
        """Confirms, after the step, the early chunks that are due; cancels the rest.

        Args:
            step_failed: Whether the step failed, so that no chunk is due.
        """
        early, self._early = self._early, None
        if early is None:
            return
        counts = [
            0 if step_failed else _num_due(stream, num_frames)
            for stream, num_frames in zip(early.streams, early.num_frames, strict=True)
        ]
        try:
            wait = early.confirm(counts)
        except Exception:
            return  # the chunks are still due: decoding them again reports the failure
        due = [stream for stream, count in zip(early.streams, counts, strict=True) if count]
        self._start([(stream, _next_codes(stream)) for stream in due], wait)

    def decode(self, due: Sequence[Stream]) -> None:
        """Delivers the batch in flight, if any, and begins a batch of the chunks that are due.

        If that fails, each chunk is decoded solo to find the stream at fault.

        Args:
            due: Streams with a chunk that is due. If there is none, nothing is done.
        """
        if not due:
            return
        self.deliver()
        # The order of delivery, and so of the tasks of an event loop that reads them.
        by_deadline = sorted(due, key=lambda stream: stream.deadline_s)
        chunks = [(stream, _next_codes(stream)) for stream in by_deadline if stream.due]
        if not chunks:
            return
        try:
            wait = self._vocoder.decode(
                [DecodeRequest(s.active_slot, torch.from_numpy(codes)) for s, codes in chunks]
            )
        except Exception as error:
            if len(chunks) == 1:
                chunks[0][0].active_segment.fail_decoding(error)
                return
            for stream, _ in chunks:
                self.decode([stream])
            return
        self._start(chunks, wait)

    def _start(
        self, chunks: Sequence[tuple[Stream, NDArray[np.int64]]], wait: PendingSamples
    ) -> None:
        """Puts chunks in flight."""
        for stream, _ in chunks:
            stream.start_decoding()
        self._batch = _ChunkBatch(
            [stream for stream, _ in chunks], [codes for _, codes in chunks], wait
        )

    def deliver(self) -> bool:
        """Waits for the batch in flight and delivers its chunks; does not raise.

        Returns:
            Whether chunks were delivered.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            return False
        for stream in batch.streams:
            stream.active_segment.stop_decoding()
        try:
            results = batch.wait()
            peaks = _find_peaks(batch.codes, results)
        except Exception as error:
            for stream in batch.streams:
                stream.active_segment.fail_decoding(error)
            return False
        self._pauses.restart()
        for stream, codes, samples, chunk_peaks in zip(
            batch.streams, batch.codes, results, peaks, strict=True
        ):
            self._pauses.pause_if_due()
            segment = stream.active_segment
            if samples is None:
                segment.fail_decoding(FloatingPointError("The codec's waveform is not finite."))
                continue
            try:
                stream.delivery.deliver(segment, codes, samples, chunk_peaks)
            except Exception as error:
                segment.fail(error)
        self._on_delivered()
        return True

    def discard(self) -> None:
        """Drops the batch in flight, undelivered."""
        batch, self._batch, self._early = self._batch, None, None
        for stream in batch.streams if batch is not None else ():
            if stream.segment is not None:
                stream.segment.stop_decoding()


def _find_peaks(
    codes: Sequence[NDArray[np.int64]], samples: Sequence[NDArray[np.int16] | None]
) -> list[NDArray[np.uint16]]:
    """Finds the peaks of all chunks at once: with few calls of NumPy for all of them.

    Args:
        codes: [frames, groups] of each chunk.
        samples: [frames * samples per frame] of each chunk; None if they are not finite.

    Returns:
        [frames, intervals] of each chunk; no frames if its samples are not finite.
    """
    counts = [0 if made is None else len(c) for c, made in zip(codes, samples, strict=True)]
    finite = [made for made in samples if made is not None]
    if not finite:
        return [np.empty((0, FRAME_INTERVALS), np.uint16) for _ in counts]
    peaks = interval_peaks(np.concatenate(finite).reshape(sum(counts), -1))
    ends = accumulate(counts)
    return [peaks[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _next_codes(stream: Stream) -> NDArray[np.int64]:
    """Returns the codes [frames, groups] of the chunk that is due."""
    return stream.chunking.next_chunk(stream.active_segment)


def _num_due(stream: Stream, num_expected: int) -> int:
    """Returns the frames of the chunk that is due; 0 if it is longer than expected."""
    if not stream.due:
        return 0
    num_frames = len(stream.chunking.next_chunk(stream.active_segment))
    return num_frames if num_frames <= num_expected else 0
