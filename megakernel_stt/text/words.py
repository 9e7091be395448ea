"""Tokens with text, times and confidence, and the words that they form.

A token's time is the frame at which it was decoded, which lies after the sound. Streaming models
decode later than offline ones.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megakernel_stt.model.config import FRAME_S
from megakernel_stt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megakernel_stt.network.transducer import Emission

# Marks to which TDT models give durations of their own. They take the end of the token before.
_PUNCTUATION = frozenset("?'¡¿-:,%/.!")


@dataclass(frozen=True)
class Token:
    """A token of the model.

    Attributes:
        id: Its id.
        text: Its text, with the space before a word; empty for a mark that is not spoken and for a
            byte of a character that later tokens complete.
        start: Time in seconds from the beginning of the audio at which it was decoded.
        end: Its end in seconds.
        confidence: Certainty of the model from 0 to 1.
        language: Of a tag that names the language of the speech, such as `en-US`; else None.
    """

    id: int
    text: str
    start: float
    end: float
    confidence: float
    language: str | None = None


@dataclass(frozen=True)
class Word:
    """A word.

    Attributes:
        text: The word with its punctuation.
        start: Time in seconds from the beginning of the audio.
        end: Its end in seconds.
        confidence: The lowest of its tokens, from 0 to 1.
    """

    text: str
    start: float
    end: float
    confidence: float


@dataclass(frozen=True)
class TokenReader:
    """Converts the decoded tokens of one stream in order. Reading returns a new reader.

    Attributes:
        tokenizer: The vocabulary.
        has_durations: Whether the model predicts durations (TDT).
        pending: Bytes of a character that is not complete.
        end: End of the last token in seconds; None before the first.
    """

    tokenizer: Tokenizer
    has_durations: bool
    pending: bytes = b""
    end: float | None = None

    def read(self, emissions: "Iterable[Emission]") -> "tuple[TokenReader, list[Token]]":
        """Converts the next tokens.

        Args:
            emissions: Of the decoder.

        Returns:
            A reader for the tokens after these, and these tokens.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.setstate((self.pending, 0))
        end, tokens = self.end, []
        for emission in emissions:
            text = decoder.decode(self.tokenizer.bytes_of(emission.token))
            start_s = emission.frame * FRAME_S
            end_s = start_s + emission.duration * FRAME_S
            if self.has_durations and text.strip() in _PUNCTUATION and end is not None:
                start_s = end_s = end
            language = self.tokenizer.language_of(emission.token)
            confidence = emission.confidence
            tokens.append(Token(emission.token, text, start_s, end_s, confidence, language))
            end = end_s
        pending = decoder.getstate()[0]
        return TokenReader(self.tokenizer, self.has_durations, pending, end), tokens


def join_words(tokens: Iterable[Token]) -> tuple[Word, ...]:
    """The words of tokens: one begins at each token whose text begins with a space.

    A word begins with its first token and ends with its last. Its confidence is the lowest of its
    tokens.
    """
    words: list[Word] = []
    group: list[Token] = []
    for token in [*tokens, None]:
        if group and (token is None or token.text.startswith(" ")):
            text = "".join(t.text for t in group).strip()
            if text:
                least = min(t.confidence for t in group)
                words.append(Word(text, group[0].start, group[-1].end, least))
            group = []
        if token is not None and token.text:
            group.append(token)
    return tuple(words)
