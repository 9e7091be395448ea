"""Times of characters, estimated from the times at which words start."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megakernel_tts import Word, split_words
from megakernel_tts.server.speech_stream import SECONDS_PER_CHARACTER, SpeechChunk


@dataclass(frozen=True)
class CharacterSpan:
    """The characters that start in a part of the audio; times are in ms from the stream's start.

    Attributes:
        start_ms: Start of the part.
        stop_ms: End of the part.
        characters: In order; may be empty.
        starts_ms: Start of each character.
    """

    start_ms: int
    stop_ms: int
    characters: list[str]
    starts_ms: list[int]

    @classmethod
    def join(cls, spans: Sequence["CharacterSpan"]) -> "CharacterSpan":
        """Joins consecutive spans, of which there is at least one."""
        characters = [character for span in spans for character in span.characters]
        starts_ms = [start_ms for span in spans for start_ms in span.starts_ms]
        return cls(spans[0].start_ms, spans[-1].stop_ms, characters, starts_ms)

    @property
    def stops_ms(self) -> list[int]:
        """End of each character: the start of the next one, or the end of the part."""
        return [*self.starts_ms[1:], self.stop_ms] if self.characters else []


class _TimedCharacter(NamedTuple):
    """A character that has not started.

    Attributes:
        text: The character.
        start_s: Its start, in seconds from the stream's start.
        begins_word: Whether it is the first one of a word.
    """

    text: str
    start_s: float
    begins_word: bool


class CharacterTimes:
    """Spreads the characters of words over the chunks of a stream.

    The first character of a word starts with the word, which the engine times. Further ones, and
    the space after the word, follow at an ordinary pace, and not after the start of the next word.
    While a word has characters left, every chunk has one, however short it is.
    """

    def __init__(self) -> None:
        """Starts before the first chunk."""
        self._end_s = 0.0  # of the audio so far
        self._pending: deque[_TimedCharacter] = deque()
        self._last = " "

    def add(self, chunk: SpeechChunk) -> CharacterSpan:
        """The characters that start in the next chunk."""
        for word in chunk.words:
            self._add_word(word)
        self._end_s = chunk.end_s
        return self._take(chunk.start_s, until_s=chunk.end_s)

    def end(self) -> CharacterSpan:
        """The characters that are left at the end of the audio, and a space that ends the text."""
        if (self._pending[-1].text if self._pending else self._last) != " ":
            self._pending.append(_TimedCharacter(" ", self._end_s, begins_word=False))
        return self._take(self._end_s, until_s=float("inf"))

    def _add_word(self, word: Word) -> None:
        self._pending = deque(
            each._replace(start_s=min(each.start_s, word.start)) for each in self._pending
        )
        unspaced = all(written.unspaced for written in split_words(word.text))
        for i, text in enumerate(word.text if unspaced else f"{word.text} "):
            start_s = word.start + i * SECONDS_PER_CHARACTER
            self._pending.append(_TimedCharacter(text, start_s, begins_word=i == 0))

    def _take(self, start_s: float, *, until_s: float) -> CharacterSpan:
        start_ms, stop_ms = round(1000 * start_s), round(1000 * self._end_s)
        taken: list[_TimedCharacter] = []
        while self._pending and self._pending[0].start_s < until_s:
            taken.append(self._pending.popleft())
        if not taken and start_ms < stop_ms and self._pending and not self._pending[0].begins_word:
            taken.append(self._pending.popleft())
        if taken:
            self._last = taken[-1].text
        return CharacterSpan(
            start_ms,
            stop_ms,
            [each.text for each in taken],
            [min(max(start_ms, round(1000 * each.start_s)), stop_ms) for each in taken],
        )
