"""A session's text on its way to the talker: split into pieces, each tokenised as it arrives."""

import threading
from collections import deque
from collections.abc import Sequence

from megakernel_tts.text.pace import ordinary_frames
from megakernel_tts.text.splitter import Splitter
from megakernel_tts.text.tokenizer import IncrementalTokenizer, TextTokenizer


class TextSegment:
    """One stretch of text that is spoken as one utterance; it grows until it is ended.

    Attributes:
        ids: Its tokens.
        whole: How many of them certainly end with a whole word.
        frames: What it takes at an ordinary pace.
        ended: Whether nothing more will come.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.whole = 0
        self.frames = 0.0
        self.ended = False


class TextQueue:
    """Written by the one who pushes text, read by the engine; both under `lock`."""

    def __init__(self, tokenizer: TextTokenizer, splitter: Splitter) -> None:
        self.lock = threading.Lock()
        self.ended = False
        self.closed = False
        self._tokenizer = tokenizer
        self._splitter = splitter
        self._pieces: deque[TextSegment] = deque()
        self._open: tuple[TextSegment, IncrementalTokenizer] | None = None
        self._before = ""  # the last character of the text so far

    def push(self, text: str, *, last: bool = False) -> None:
        """Adds text; of the last it need not be found out what later text could change."""
        portions = [*self._splitter.push(text)]
        for number, (portion, ends) in enumerate(portions, start=1):
            if self._open is None:
                self._open = TextSegment(), IncrementalTokenizer(self._tokenizer)
                self._pieces.append(self._open[0])
            piece, tokenizer = self._open
            piece.frames += ordinary_frames(portion, self._before)
            self._before = portion[-1:] or self._before
            if ends or (last and number == len(portions)):
                self._end_piece(portion)
                continue
            piece.ids += tokenizer.push(portion)
            if tokenizer.between_words:
                piece.whole = len(piece.ids)
        if last:
            self.end()

    def end(self) -> None:
        """Ends the text."""
        self._end_piece()
        self.ended = True

    def close(self) -> None:
        """Forgets the text: nobody will speak it any more."""
        self.closed = True
        self._pieces.clear()
        self._open = None

    def _end_piece(self, portion: str = "") -> None:
        if self._open is not None:
            piece, tokenizer = self._open
            piece.ids += tokenizer.end(portion)
            piece.whole = len(piece.ids)
            piece.ended = True
            self._open = None

    def spell(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of tokens."""
        return self._tokenizer.spell(ids)

    def front(self) -> TextSegment | None:
        """The piece to speak now, once something of it is known."""
        while self._pieces and self._pieces[0].ended and not self._pieces[0].ids:
            self._pieces.popleft()  # nothing but whitespace
        return self._pieces[0] if self._pieces and self._pieces[0].ids else None

    def pop(self) -> None:
        """Drops the piece that was spoken."""
        self._pieces.popleft()

    @property
    def done(self) -> bool:
        """Whether everything was spoken and nothing will come."""
        return self.ended and self.front() is None
