"""Text -> token ids: Qwen's byte-level BPE, whole or as the text arrives.

The tokenizer knows no special tokens: whatever a user writes is spoken text, `<|im_end|>` too.
The ids that frame a text come from the config (see `prompt`).
"""

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from megakernel_tts.errors import CheckpointError
from megakernel_tts.model.fields import read_json, read_text

# Qwen2's own split, which the models were trained with. (A flag of transformers 4.57 swaps in
# Mistral's, which cuts "helloWorld" in two.)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Qwen's split, then bytes as printable characters."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_characters() -> dict[str, int]:
    """The byte that each printable character of a byte-level BPE stands for (as in GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    plain += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in plain]
    shown = {chr(byte): byte for byte in plain}
    return shown | {chr(256 + i): byte for i, byte in enumerate(others)}


class TextTokenizer:
    """A checkpoint's `vocab.json` and `merges.txt`."""

    def __init__(self, folder: Path, text_vocab: int) -> None:
        """Reads the files.

        Args:
            folder: The checkpoint.
            text_vocab: Rows of the text embedding; every id must be below.

        Raises:
            CheckpointError: A file is missing or broken, or an id is out of range.
        """
        vocab_file, merges_file = folder / "vocab.json", folder / "merges.txt"
        vocab = read_json(vocab_file)
        if not isinstance(vocab, dict) or not all(
            type(i) is int and 0 <= i < text_vocab for i in vocab.values()
        ):
            raise CheckpointError(
                f"{vocab_file}: must be an object of tokens and ids below {text_vocab}, "
                "the text_vocab_size of config.json."
            )
        missing = [c for c in pre_tokenizers.ByteLevel.alphabet() if c not in vocab]
        if missing:
            raise CheckpointError(
                f"{vocab_file}: {len(missing)} of the 256 byte tokens are missing, "
                f"for one {json.dumps(missing[0])}."
            )
        lines = read_text(merges_file).split("\n")
        try:
            if lines[0].startswith("#version"):
                del lines[0]
            merges = [tuple(line.rstrip("\r").split(" ")) for line in lines if line]
            model = models.BPE(vocab=vocab, merges=merges)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # the library raises a bare Exception for a bad merge
            raise CheckpointError(
                f"{merges_file}: not usable with vocab.json ({error})."
            ) from error
        made = {"".join(merge) for merge in merges}.union(pre_tokenizers.ByteLevel.alphabet())
        if lost := [token for token in vocab if token not in made]:
            raise CheckpointError(
                f"{merges_file}: no line makes {json.dumps(lost[0])} and {len(lost) - 1} other "
                "tokens of vocab.json; the file is damaged."
            )
        self._bpe = Tokenizer(model)
        self._normalizer = normalizers.NFC()
        self._bpe.normalizer = self._normalizer  # pyright: ignore[reportAttributeAccessIssue]
        self._bpe.pre_tokenizer = qwen_pre_tokenizer()  # pyright: ignore[reportAttributeAccessIssue]
        self._split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
        self._byte_of = byte_characters()

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Outer whitespace is the caller's to strip."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def spell(self, ids: Sequence[int]) -> list[bytes]:
        """Each token's bytes; those of a whole text are the normalised text in UTF-8."""
        tokens = (self._bpe.id_to_token(i) or "" for i in ids)
        return [bytes(self._byte_of[char] for char in token) for token in tokens]

    def normalize(self, text: str) -> str:
        """NFC by the tokenizer's own tables; Python's may be of another Unicode version."""
        return self._normalizer.normalize_str(text)

    def settled(self, text: str) -> int:
        """How many leading characters of a normalised text no later character can re-tokenise.

        A pre-token ends for good once a character follows that does not combine with what stands
        before it. One that ends in whitespace is not cut off: the split looks beyond whitespace.
        """
        spans = self._split.pre_tokenize_str(text)
        for _, (start, _) in reversed(spans):
            if 0 < start and _stands_alone(text[start]) and not text[start - 1].isspace():
                return start
        return 0


def _stands_alone(char: str) -> bool:
    """Whether normalisation never merges or reorders the character with those before it."""
    # Letters that compose with what precedes: Hangul vowels and finals, Kirat Rai vowels.
    joins = "\u1160" <= char <= "\u11ff" or "\U00016d63" <= char <= "\U00016d6a"
    # An unassigned character may be a mark of a Unicode version that Python does not know yet.
    return not joins and unicodedata.category(char)[0] != "M" and unicodedata.category(char) != "Cn"


class IncrementalTokenizer:
    """Tokenises a text as it arrives; the ids add up to those of the whole text.

    Outer whitespace is stripped.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending = ""
        self._started = False

    def push(self, text: str) -> list[int]:
        """Takes more text; gives the ids that are certain by now."""
        pending = self._take(text)
        settled = self._tokenizer.settled(pending)
        self._pending = pending[settled:]
        return self._tokenizer.encode(pending[:settled]) if settled else []

    @property
    def between_words(self) -> bool:
        """Whether whitespace is known to follow the ids that were given."""
        return self._pending[:1].isspace()

    def end(self, text: str = "") -> list[int]:
        """Ends the text, perhaps with a last part; gives the remaining ids."""
        rest, self._pending = self._take(text).rstrip(), ""
        return self._tokenizer.encode(rest) if rest else []

    def _take(self, text: str) -> str:
        """What is pending, with more text."""
        pending = self._tokenizer.normalize(self._pending + text)
        if not self._started:
            pending = pending.lstrip()
            self._started = bool(pending)
        return pending
