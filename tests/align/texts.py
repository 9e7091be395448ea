"""Texts as tokens that a test decides."""

from collections.abc import Sequence

from megakernel_tts.align.words import Transcript


class Spelling:
    """A vocabulary that grows as tokens are named."""

    def __init__(self) -> None:
        self._tokens: list[bytes] = []

    def ids(self, *tokens: str | bytes) -> list[int]:
        """The ids of new tokens."""
        first = len(self._tokens)
        self._tokens += [t.encode() if isinstance(t, str) else t for t in tokens]
        return list(range(first, len(self._tokens)))

    def spell(self, ids: Sequence[int]) -> list[bytes]:
        return [self._tokens[i] for i in ids]


def transcript(*tokens: str | bytes) -> Transcript:
    """A whole text of these tokens."""
    spelling = Spelling()
    made = Transcript(spelling.spell)
    ids = spelling.ids(*tokens)
    made.update(ids, len(ids))
    return made


def words_of(text: Transcript) -> list[str]:
    return [text[i] for i in range(len(text))]
