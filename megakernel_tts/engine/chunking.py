"""When a stream's next chunk is due, and how many frames it has."""

from torch import Tensor

from megakernel_tts.engine.segment import Segment
from megakernel_tts.session import ChunkPolicy


class Chunking:
    """Sizes of one stream's chunks.

    A chunk of n frames is due once n + lookahead frames are pending, so that the words that begin
    in it are known. The stream's first chunk does not wait for the lookahead: no word but the
    first begins in it.

    Attributes:
        size: Frames of the next chunk.
    """

    def __init__(self, policy: ChunkPolicy, num_lookahead: int) -> None:
        """Starts with the first chunk.

        Args:
            policy: Sizes of the chunks, and how many frames may be unread.
            num_lookahead: Frames after a word's first one that word alignment needs.
        """
        self.size = policy.first
        self._policy = policy
        self._num_lookahead = num_lookahead

    def num_required(self, *, first: bool) -> int:
        """Returns the pending frames at which the next chunk is due.

        Args:
            first: Whether it is the stream's first chunk.
        """
        lookahead = 0 if first else self._num_lookahead
        return min(self.size + lookahead, self._policy.ahead)

    def due(self, segment: Segment, *, first: bool) -> bool:
        """Returns whether a chunk is due; without more text, any pending frame makes one due."""
        if not segment.pending:
            return False
        return not segment.ready or len(segment.pending) >= self.num_required(first=first)

    def next_chunk(self, segment: Segment) -> list[Tensor]:
        """Returns the codes [groups] of each frame of the chunk that is due."""
        return segment.pending[: self.size] if segment.ready else segment.pending

    def num_expected(self, segment: Segment, num_upcoming: int, *, first: bool) -> int:
        """Returns the frames of the chunk that will be due after a step under way; 0 for none.

        Args:
            segment: The stream's segment, before the step.
            num_upcoming: Frames that the step makes if nothing ends it early.
            first: Whether it is the stream's first chunk.
        """
        num_pending = len(segment.pending) + num_upcoming
        runs_dry = num_upcoming >= segment.num_possible
        if segment.outcome is not None:
            return 0
        if runs_dry:
            return num_pending
        return min(num_pending, self.size) if num_pending >= self.num_required(first=first) else 0

    def num_until_due(self, segment: Segment, num_unread: int, *, first: bool) -> int:
        """Returns the frames to make before a chunk is due, the text runs dry or the reader lags.

        Args:
            segment: The stream's segment.
            num_unread: Frames that the reader has not read, including those not yet decoded.
            first: Whether it is the stream's first chunk.
        """
        num_missing = self.num_required(first=first) - len(segment.pending)
        return min(num_missing, segment.num_possible, self._policy.ahead - num_unread)

    def reader_keeps_up(self, num_unread: int) -> bool:
        """Returns whether more frames may be made while `num_unread` are unread."""
        return num_unread < self._policy.ahead

    def advance(self) -> None:
        """Doubles the size, up to the policy's largest."""
        self.size = min(2 * self.size, self._policy.largest)
