"""What the recogniser shall write for a text: its spoken words in lower case."""

import re
import unicodedata

from examples.train_voice.spoken import spoken_words
from examples.train_voice.symbols import SPELLED


def target(text: str) -> str:
    """Spoken words of an English text.

    Args:
        text: A text as it is written.

    Returns:
        Words of the letters a to z and apostrophes, separated by spaces: numbers in words, spelled
        letters one by one, without punctuation and accents.
    """
    said = " ".join(" ".join(group) for group in spoken_words(text, "english"))
    return plain(said.replace(SPELLED, " ").replace("why fie", "wifi"))


def plain(words: str) -> str:
    """Words in lower case without punctuation and accents, separated by single spaces."""
    letters = unicodedata.normalize("NFKD", words.lower().replace("’", "'"))
    letters = "".join(c for c in letters if not unicodedata.combining(c))
    found = (word.strip("'") for word in re.sub(r"[^a-z' ]", " ", letters).split())
    return " ".join(word for word in found if word)
