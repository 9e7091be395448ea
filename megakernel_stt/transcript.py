"""What was recognised: text, words and tokens."""

from dataclasses import dataclass
from functools import cached_property

from megakernel_stt.text.words import Token, Word, join_words


@dataclass(frozen=True)
class Transcript:
    """The text of some audio.

    Attributes:
        tokens: In order.
        seconds: Length of the audio.
    """

    tokens: tuple[Token, ...]
    seconds: float

    @cached_property
    def text(self) -> str:
        """The text, without spaces at its ends."""
        return "".join(token.text for token in self.tokens).strip()

    @cached_property
    def language(self) -> str | None:
        """The language of the last tag, such as `en-US`; None if the model has named none."""
        tags = [token.language for token in self.tokens if token.language is not None]
        return tags[-1] if tags else None

    @cached_property
    def words(self) -> tuple[Word, ...]:
        """The words with their times."""
        return join_words(self.tokens)
