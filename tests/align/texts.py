"""Texts of tokens that a test chooses."""

from collections.abc import Sequence

from megakernel_tts.align.words import Transcript


class GrowingVocabulary:
    """A vocabulary to which a test adds tokens."""

    def __init__(self) -> None:
        self._tokens: list[bytes] = []

    def ids(self, *tokens: str | bytes) -> list[int]:
        """Adds tokens; returns their ids."""
        first = len(self._tokens)
        self._tokens += [t.encode() if isinstance(t, str) else t for t in tokens]
        return list(range(first, len(self._tokens)))

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        return [self._tokens[i] for i in ids]


def transcript(*tokens: str | bytes) -> Transcript:
    """The transcript of a complete text of these tokens."""
    vocabulary = GrowingVocabulary()
    text = Transcript(vocabulary.token_bytes)
    ids = vocabulary.ids(*tokens)
    text.update(ids, len(ids))
    return text


def words_of(text: Transcript) -> list[str]:
    return [text[i] for i in range(len(text))]
