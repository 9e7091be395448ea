"""A session's text on its way to the talker: split into segments, tokenised as it arrives."""

import threading
from collections import deque
from collections.abc import Sequence

from megakernel_tts.text.pace import ordinary_frames
from megakernel_tts.text.splitter import Splitter
from megakernel_tts.text.tokenizer import IncrementalTokenizer, TextTokenizer


class TextSegment:
    """A part of the text that becomes one prompt; it grows until it is ended.

    Attributes:
        token_ids: Tokens so far.
        num_whole: How many of the tokens end at a word boundary that later text cannot move.
        expected_frames: Frames that the text takes at an ordinary pace.
        ended: Whether the segment is complete.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_whole = 0
        self.expected_frames = 0.0
        self.ended = False


class TextQueue:
    """Segments of a session's text. The session writes and the engine reads, both under `lock`.

    Attributes:
        lock: Must be held for every call.
        ended: Whether the text is complete.
        closed: Whether the stream has finished, so that text is ignored.
    """

    def __init__(self, tokenizer: TextTokenizer, splitter: Splitter) -> None:
        self.lock = threading.Lock()
        self.ended = False
        self.closed = False
        self._tokenizer = tokenizer
        self._splitter = splitter
        self._segments: deque[TextSegment] = deque()
        self._open: tuple[TextSegment, IncrementalTokenizer] | None = None
        self._last_character = ""

    def push(self, text: str, *, last: bool = False) -> None:
        """Adds text.

        Args:
            text: Any part of the text.
            last: Whether the text ends here, so that no character has to be held back.
        """
        portions = [*self._splitter.push(text)]
        for count, (portion, ends) in enumerate(portions, start=1):
            if self._open is None:
                self._open = TextSegment(), IncrementalTokenizer(self._tokenizer)
                self._segments.append(self._open[0])
            segment, tokenizer = self._open
            segment.expected_frames += ordinary_frames(portion, self._last_character)
            self._last_character = portion[-1:] or self._last_character
            if ends or (last and count == len(portions)):
                self._end_segment(portion)
                continue
            segment.token_ids += tokenizer.push(portion)
            if tokenizer.between_words:
                segment.num_whole = len(segment.token_ids)
        if last:
            self.end()

    def flush(self) -> None:
        """Ends the segment that is growing, if any; later text begins another."""
        self._splitter.end_segment()
        self._end_segment()

    def end(self) -> None:
        """Marks the text as complete."""
        self._end_segment()
        self.ended = True

    def close(self) -> None:
        """Drops the text, which will not be spoken any more."""
        self.closed = True
        self._segments.clear()
        self._open = None

    def _end_segment(self, portion: str = "") -> None:
        if self._open is not None:
            segment, tokenizer = self._open
            segment.token_ids += tokenizer.end(portion)
            segment.num_whole = len(segment.token_ids)
            segment.ended = True
            self._open = None
            if not segment.token_ids:  # nothing but whitespace
                self._segments.pop()

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Returns the bytes of each token."""
        return self._tokenizer.token_bytes(ids)

    def front(self) -> TextSegment | None:
        """Returns the segment to speak now, or None until it has a token."""
        has_token = self._segments and self._segments[0].token_ids
        return self._segments[0] if has_token else None

    def pop(self) -> None:
        """Removes the front segment."""
        self._segments.popleft()

    @property
    def num_waiting(self) -> int:
        """Number of segments behind the front one."""
        return max(0, len(self._segments) - 1)

    @property
    def done(self) -> bool:
        """Whether the text is complete and every segment was removed."""
        return self.ended and self.front() is None
