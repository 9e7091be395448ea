"""A session's text on its way to the talker: split into segments, tokenised as it arrives."""

import threading
from collections import deque
from collections.abc import Sequence

from megakernel_tts.text.markup import Break, Markup, Replacement, TextPart
from megakernel_tts.text.pace import ordinary_frames
from megakernel_tts.text.splitter import Splitter
from megakernel_tts.text.tokenizer import IncrementalTokenizer, TextTokenizer


class TextSegment:
    """A part of the text that becomes one prompt; it grows until its text has ended.

    Attributes:
        token_ids: Tokens so far.
        replacements: Of words, in order; those of the tokens so far are all there.
        num_whole: How many of the tokens end at a word boundary that later text cannot move.
        expected_frames: Frames that the text takes at an ordinary pace.
        text_ended: Whether no more text will be added to it.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.replacements: list[Replacement] = []
        self.num_whole = 0
        self.expected_frames = 0.0
        self.text_ended = False


class TextQueue:
    """Segments of a session's text. The session writes and the engine reads, both under `lock`.

    Attributes:
        lock: Must be held for every call.
        text_ended: Whether no more text will be added.
        closed: Whether the stream has finished, so that text is ignored.
    """

    def __init__(
        self, tokenizer: TextTokenizer, splitter: Splitter, markup: Markup | None = None
    ) -> None:
        """Starts without text.

        Args:
            tokenizer: Of the model.
            splitter: Divides the text into segments.
            markup: Reads the markup; without respellings if None.
        """
        self.lock = threading.Lock()
        self.text_ended = False
        self.closed = False
        self._tokenizer = tokenizer
        self._splitter = splitter
        self._markup = markup or Markup()
        self._segments: deque[TextSegment | Break] = deque()
        self._open: tuple[TextSegment, IncrementalTokenizer] | None = None
        self._last_character = ""

    def push(self, text: str, *, text_ended: bool = False) -> None:
        """Adds text.

        Args:
            text: Any part of the text.
            text_ended: Whether the text ends here, so that no character has to be held back.
        """
        parts = [*self._markup.push(text)]
        if text_ended:
            parts += self._markup.end()
        for count, part in enumerate(parts, start=1):
            self._add(part, text_ended=text_ended and count == len(parts))
        if text_ended:
            self._end_text()

    def _add(self, part: TextPart, *, text_ended: bool = False) -> None:
        """Adds a part of the text.

        Args:
            part: The part.
            text_ended: Whether the text ends with it.
        """
        if isinstance(part, Break):
            self._splitter.end_segment()
            self._end_segment()
            self._segments.append(part)
            return
        portions, written = [*self._splitter.push(part.text)], part.written
        for count, (portion, ends) in enumerate(portions, start=1):
            if self._open is None:
                self._open = TextSegment(), IncrementalTokenizer(self._tokenizer)
                self._segments.append(self._open[0])
            segment, tokenizer = self._open
            segment.expected_frames += ordinary_frames(portion, self._last_character)
            self._last_character = portion[-1:] or self._last_character
            start = tokenizer.num_characters
            ends |= text_ended and count == len(portions)
            new_ids = tokenizer.end(portion) if ends else tokenizer.push(portion)
            # Before its tokens, which the engine thread may read at once.
            if written is not None and portion:
                stop = tokenizer.num_characters
                segment.replacements.append(Replacement(start, stop, written))
                written = ""
            segment.token_ids += new_ids
            if ends:
                self._mark_segment_ended()
            elif tokenizer.between_words:
                segment.num_whole = len(segment.token_ids)

    def flush(self) -> None:
        """Ends the segment that is growing, if any; later text begins another."""
        for part in self._markup.flush():
            self._add(part)
        self._splitter.end_segment()
        self._end_segment()

    def end(self) -> None:
        """Ends the text."""
        for part in self._markup.end():
            self._add(part)
        self._end_text()

    def _end_text(self) -> None:
        self._end_segment()
        self.text_ended = True

    def close(self) -> None:
        """Drops the text, which will not be spoken any more."""
        self.closed = True
        self._segments.clear()
        self._open = None

    def _end_segment(self) -> None:
        """Ends the segment that is growing, if any."""
        if self._open is not None:
            segment, tokenizer = self._open
            segment.token_ids += tokenizer.end()
            self._mark_segment_ended()

    def _mark_segment_ended(self) -> None:
        assert self._open is not None
        segment, self._open = self._open[0], None
        segment.num_whole = len(segment.token_ids)
        segment.text_ended = True
        if not segment.token_ids:  # nothing but whitespace
            self._segments.pop()

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Returns the bytes of each token."""
        return self._tokenizer.token_bytes(ids)

    def front(self) -> TextSegment | None:
        """Returns the segment to speak now, or None until it has a token, or before a break."""
        front = self._segments[0] if self._segments else None
        return front if isinstance(front, TextSegment) and front.token_ids else None

    def pop(self) -> None:
        """Removes the front segment."""
        self._segments.popleft()

    def take_break(self) -> Break | None:
        """Removes the break before the next segment, if there is one, and returns it."""
        front = self._segments[0] if self._segments else None
        if not isinstance(front, Break):
            return None
        self._segments.popleft()
        return front

    @property
    def num_waiting(self) -> int:
        """Number of segments and breaks behind the front one."""
        return max(0, len(self._segments) - 1)

    @property
    def exhausted(self) -> bool:
        """Whether the text has ended, and every segment and break was removed."""
        return self.text_ended and not self._segments

    @property
    def needs_no_slot(self) -> bool:
        """Whether a break comes next, or nothing more, and the stream has not finished."""
        front = self._segments[0] if self._segments else None
        return not self.closed and (self.exhausted or isinstance(front, Break))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until text is added or the text is ended."""
        return not (self.text_ended or self._segments)
