"""The voices, and the phones of the teacher's alphabet that label the speech.

The teacher Kokoro-82M reads phonemes of one character each. Most are IPA; capital letters are
diphthongs (A as in day, I my, O go, Q British go, W now, Y boy), and ʤ and ʧ are affricates.
"""

from dataclasses import dataclass

PAUSE = "pause"
PHONES = (PAUSE, *"AIOQTWYabdefhijklmnoprstuvwxzæðŋɐɑɒɔəɚɛɜɟɡɣɪɲɹɾʃʊʌʎʒʔʝʤʧβθᵊᵻ")
PUNCTUATION = frozenset(';:,.!?—…"()“”')
_MODIFIERS = frozenset("ˈˌː↓→↗↘̃")  # stress, length, intonation: part of the phone beside them


@dataclass(frozen=True)
class TeacherVoice:
    """A voice of the checkpoint.

    Attributes:
        style: The teacher's style table, or several to be averaged, separated by `+`.
        language: Name in the checkpoint's configuration.
        accent: `us`, `gb` or `es`: how text becomes phonemes.
        row: Its row of the codec embedding.
    """

    style: str
    language: str
    accent: str
    row: int


VOICES = {
    "clara": TeacherVoice("af_heart", "english", "us", 1274),
    "henry": TeacherVoice("am_michael", "english", "us", 1269),
    "olivia": TeacherVoice("bf_emma", "english", "gb", 1083),
    "lucia": TeacherVoice("ef_dora", "spanish", "es", 1086),
}
LANGUAGES = tuple(dict.fromkeys(voice.language for voice in VOICES.values()))
_INDEX = {phone: i for i, phone in enumerate(PHONES)}


def phone_indices(phonemes: str) -> list[int]:
    """Index into `PHONES` for each character.

    Spaces and punctuation are pauses. A modifier takes the phone that follows it, or, as the last
    character of a word, the one before it.
    """
    indices = [_INDEX.get(c, 0) for c in phonemes]
    for i in reversed(range(len(phonemes) - 1)):
        if phonemes[i] in _MODIFIERS:
            indices[i] = indices[i + 1]
    for i in range(1, len(phonemes)):
        if phonemes[i] in _MODIFIERS and not indices[i]:
            indices[i] = indices[i - 1]
    return indices


def join_words(words: list[str]) -> str:
    """A line of the phonemes file: the phonemes of each written word, separated by `|`."""
    return "|".join(words)


def split_words(line: str) -> tuple[str, list[tuple[int, int]]]:
    """Phonemes for the teacher, and the span of each written word in them.

    A word that is not spoken has an empty span.
    """
    text = ""
    spans: list[tuple[int, int]] = []
    for word in line.split("|"):
        text += " " if text and word else ""
        spans.append((len(text), len(text) + len(word)))
        text += word
    return text, spans
