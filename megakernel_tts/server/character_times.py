"""Times of characters, estimated from the times at which words start."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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


class CharacterTimes:
    """Spreads the characters of words over the chunks of a stream.

    The first character of a word starts with the word, which the engine times. Further ones, and
    the space after the word, follow at an ordinary pace, and not after the start of the next word.
    """

    def __init__(self) -> None:
        """Starts before the first chunk."""
        self._end_s = 0.0  # of the audio so far
        self._pending: deque[tuple[str, float]] = deque()  # characters and their starts in s
        self._last = " "

    def add(self, chunk: SpeechChunk) -> CharacterSpan:
        """The characters that start in the next chunk."""
        for word in chunk.words:
            self._add_word(word)
        self._end_s = chunk.end_s
        return self._take(chunk.start_s, until_s=chunk.end_s)

    def end(self) -> CharacterSpan:
        """The characters that are left at the end of the audio, and a space that ends the text."""
        if (self._pending[-1][0] if self._pending else self._last) != " ":
            self._pending.append((" ", self._end_s))
        return self._take(self._end_s, until_s=float("inf"))

    def _add_word(self, word: Word) -> None:
        self._pending = deque((text, min(start, word.start)) for text, start in self._pending)
        unspaced = all(written.unspaced for written in split_words(word.text))
        for i, character in enumerate(word.text if unspaced else f"{word.text} "):
            self._pending.append((character, word.start + i * SECONDS_PER_CHARACTER))

    def _take(self, start_s: float, *, until_s: float) -> CharacterSpan:
        start_ms, stop_ms = round(1000 * start_s), round(1000 * self._end_s)
        characters: list[str] = []
        starts_ms: list[int] = []
        while self._pending and self._pending[0][1] < until_s:
            self._last, character_s = self._pending.popleft()
            characters.append(self._last)
            starts_ms.append(min(max(start_ms, round(1000 * character_s)), stop_ms))
        return CharacterSpan(start_ms, stop_ms, characters, starts_ms)
