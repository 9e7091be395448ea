"""When a stream's next chunk is due, and how many frames it has."""

import math

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.engine.segment import Segment
from megakernel_tts.session import FRAME_S, ChunkPolicy

_USABLE_SHARE = 0.75  # share of the buffered audio in which the next chunk must be made
_MAX_LATE = 2  # late chunks in succession, after which larger ones are made


class Chunking:
    """Sizes of one stream's chunks.

    A chunk has up to twice as many frames as the one before it: as many as can be made while the
    audio before them is played. Playback is assumed to begin with the first chunk. The time of a
    frame is measured from chunk to chunk, so it includes the codec and the work for other streams.
    If two chunks in succession are late, the engine is too slow for chunks of this size. The size
    is then doubled, since larger chunks cost less per frame. If the audio was played while text was
    missing, sizes begin with the first one again.

    A chunk is cut short if its audio would otherwise be late; see `shorten`. The first one may be
    larger by a frame if many streams share steps; see `round_up_first`. Sizes are equal, whatever
    the speed, if the policy has one size.

    A chunk of n frames is due once n + lookahead frames are pending, so that the words that begin
    in it are known. The stream's first chunk does not wait for the lookahead: no word but the
    first begins in it.

    Attributes:
        size: Frames of the next chunk.
        played_until_s: Clock time at which the audio so far has been played, the deadline of the
            next chunk; -inf before the first chunk.
    """

    def __init__(self, policy: ChunkPolicy, num_lookahead: int, speed: float = 1.0) -> None:
        """Starts with the first chunk.

        Args:
            policy: Sizes of the chunks, and how many frames may be unread.
            num_lookahead: Frames after a word's first one that word alignment needs.
            speed: At which the frames are played.
        """
        self.size = policy.first
        self._playback_s = FRAME_S / speed  # of a frame
        self._policy = policy
        self._num_lookahead = num_lookahead
        self._num_out = 0  # frames that were put into the decode pipeline
        self._last_out_s: float | None = None
        self.played_until_s = -math.inf
        self._frame_s = 0.0
        self._num_late = 0  # in succession

    def plan(self, now_s: float, num_out: int, num_pending: int) -> None:
        """Sets the size of the next chunk, if the one before it was completed.

        Args:
            now_s: Clock time in seconds, before a step of the stream.
            num_out: Frames that the stream has delivered or that are being decoded.
            num_pending: Frames that are pending.
        """
        num_new, self._num_out = num_out - self._num_out, num_out
        if self._last_out_s is None:  # before the first step
            self._last_out_s = now_s
        if num_new <= 0:
            return
        frame_s, self._last_out_s = (now_s - self._last_out_s) / num_new, now_s
        self._frame_s = max(frame_s, (self._frame_s + frame_s) / 2)
        is_late = -math.inf < self.played_until_s < now_s
        self._num_late = self._num_late + 1 if is_late else 0
        self.played_until_s = max(self.played_until_s, now_s) + num_new * self._playback_s
        usable_s = _USABLE_SHARE * (self.played_until_s - now_s)
        num_next = min(2 * self.size, self._policy.largest)
        if self._num_late < _MAX_LATE:
            missing = self._num_lookahead - num_pending
            while num_next > self.size and (num_next + missing) * self._frame_s > usable_s:
                num_next -= 1
        self.size = num_next

    def resume(self, now_s: float, num_out: int) -> None:
        """Records, instead of `plan`, that text was missing since the step before.

        Args:
            now_s: Clock time in seconds, before a step of the stream.
            num_out: Frames that the stream has delivered or that are being decoded.
        """
        num_new, self._num_out = num_out - self._num_out, num_out
        if num_new and self._last_out_s is not None:
            out_s = min(now_s, self._last_out_s + num_new * self._frame_s)
            self.played_until_s = max(self.played_until_s, out_s) + num_new * self._playback_s
        self._last_out_s = now_s
        if self.played_until_s < now_s:
            self.size, self._num_late = self._policy.first, 0
            self.played_until_s = -math.inf

    def shorten(self, num_pending: int) -> None:
        """Makes the next chunk due with the frames that will be pending, if words allow it.

        A chunk that is larger because the ones before it were late keeps its size. So do all chunks
        of a policy with one size.

        Args:
            num_pending: Frames that will be pending after the next step.
        """
        if self._num_late < _MAX_LATE and self._policy.first < self._policy.largest:
            self.size = min(self.size, max(1, num_pending - self._num_lookahead))

    def round_up_first(self, num_pending: int, multiple: int) -> None:
        """Makes the first chunk due after a multiple of so many frames, if the policy allows it.

        It grows by less than `multiple` in all, even if steps end early again and again.

        Args:
            num_pending: Frames that are pending.
            multiple: Frames of each of the next steps.
        """
        size = self.size + (num_pending - self.num_required(first=True)) % multiple
        if size < self._policy.first + multiple:
            self.size = min(size, self._policy.largest)

    def num_required(self, *, first: bool) -> int:
        """Returns the pending frames at which the next chunk is due.

        Args:
            first: Whether it is the stream's first chunk.
        """
        lookahead = 0 if first else self._num_lookahead
        return min(self.size + lookahead, self._policy.ahead)

    def due(self, segment: Segment, *, first: bool) -> bool:
        """Returns whether a chunk is due; without more text, any pending frame makes one due."""
        if not len(segment.pending):
            return False
        return not segment.ready or len(segment.pending) >= self.num_required(first=first)

    def next_chunk(self, segment: Segment) -> NDArray[np.int64]:
        """Returns the codes [frames, groups] of the chunk that is due."""
        return segment.pending[: self.size if segment.ready else self._max_last]

    @property
    def _max_last(self) -> int:
        """The most frames of a chunk that no more text follows; the rest is the next chunk."""
        return self._policy.largest + self._num_lookahead

    def num_expected(self, segment: Segment, num_upcoming: int, *, first: bool) -> int:
        """Returns the frames of the chunk that will be due after a step under way; 0 for none.

        Args:
            segment: The stream's segment, before the step.
            num_upcoming: Frames that the step makes if nothing ends it early.
            first: Whether it is the stream's first chunk.
        """
        num_possible = segment.num_possible
        num_pending = len(segment.pending) + min(num_upcoming, num_possible)
        runs_dry = num_upcoming >= num_possible
        if segment.outcome is not None:
            return 0
        if runs_dry:
            return min(num_pending, self._max_last)
        return min(num_pending, self.size) if num_pending >= self.num_required(first=first) else 0

    def step_range(self, segment: Segment, num_unread: int, *, first: bool) -> tuple[int, int]:
        """Returns the frames to make before a chunk is due, and the most that a step may make.

        A chunk that is due may wait for the end of a step that other streams share, but not until
        another one is due. Both are fewer if the reader lags or more text is to come. A step may go
        beyond the frame limit of a stream, whose other frames are dropped.

        Args:
            segment: The stream's segment.
            num_unread: Frames that the reader has not read, including those not yet decoded.
            first: Whether it is the stream's first chunk.
        """
        num_possible, num_readable = segment.num_possible, self._policy.ahead - num_unread
        num_missing = self.num_required(first=first) - len(segment.pending)
        least = min(num_missing, num_possible, num_readable)
        most = min(max(num_missing, self.size), num_readable)
        return least, most if segment.text_complete else min(most, num_possible)

    def reader_keeps_up(self, num_unread: int) -> bool:
        """Returns whether more frames may be made while `num_unread` are unread."""
        return num_unread < self._policy.ahead
