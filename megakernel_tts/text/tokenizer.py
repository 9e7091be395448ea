"""Qwen's byte-level BPE tokenizer, for whole text and for text that arrives in portions.

It has no special tokens, so any user text, including `<|im_end|>`, is tokenised as spoken text.
The special ids of a prompt are taken from the config (see `prompt.py`).
"""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from megakernel_common.errors import CheckpointError
from megakernel_common.fields import read_json, read_text

_MAX_KNOWN_PRETOKENS = 32_768
_MAX_KNOWN_LENGTH = 32  # characters; few words of ASCII are longer


def _split_pattern(letters: str, digits: str) -> str:
    """The split of Qwen2, with which the models were trained.

    A flag of transformers 4.57 selects Mistral's split, which separates "helloWorld".

    Args:
        letters: All letters, for a regular expression's set of characters.
        digits: All digits, likewise.
    """
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n{letters}{digits}]?[{letters}]+|[{digits}]"
        rf"| ?[^\s{letters}{digits}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_SPLIT = _split_pattern(r"\p{L}", r"\p{N}")
# Of ASCII. After a pause it takes less than half the time of the library's split.
_ASCII_SPLIT = re.compile(_split_pattern("a-zA-Z", "0-9"), re.ASCII)


def qwen_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Qwen's split, followed by byte-level characters."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_characters() -> dict[str, int]:
    """Maps the printable characters of a byte-level BPE to bytes (as in GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    unprintable = [byte for byte in range(256) if byte not in printable]
    identity = {chr(byte): byte for byte in printable}
    return identity | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


class TextTokenizer:
    """The tokenizer of a checkpoint: `vocab.json` and `merges.txt`."""

    def __init__(self, folder: Path, text_vocab_size: int) -> None:
        """Reads the files.

        Args:
            folder: Of the checkpoint.
            text_vocab_size: Rows of the text embedding; every id must be lower.

        Raises:
            CheckpointError: A file is missing or invalid, or an id is out of range or repeated.
        """
        vocab_file, merges_file = folder / "vocab.json", folder / "merges.txt"
        vocab = read_json(vocab_file)
        if not isinstance(vocab, dict) or not all(
            type(i) is int and 0 <= i < text_vocab_size for i in vocab.values()
        ):
            raise CheckpointError(
                f"{vocab_file}: must be an object of tokens and ids below {text_vocab_size}, "
                "the text_vocab_size of config.json."
            )
        if len(set(vocab.values())) < len(vocab):
            ((index, count),) = Counter(vocab.values()).most_common(1)
            raise CheckpointError(
                f"{vocab_file}: {count} tokens have the id {index}; the ids must be distinct."
            )
        missing = [c for c in pre_tokenizers.ByteLevel.alphabet() if c not in vocab]
        if missing:
            raise CheckpointError(
                f"{vocab_file}: {len(missing)} of the 256 byte tokens are missing, "
                f"for example {json.dumps(missing[0])}."
            )
        lines = read_text(merges_file).split("\n")
        try:
            if lines[0].startswith("#version"):
                del lines[0]
            merges = [tuple(line.rstrip("\r").split(" ")) for line in lines if line]
            model = models.BPE(vocab=vocab, merges=merges)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # the library raises a bare Exception for an invalid merge
            raise CheckpointError(f"{merges_file}: does not match vocab.json ({error}).") from error
        reachable = {"".join(merge) for merge in merges}.union(pre_tokenizers.ByteLevel.alphabet())
        if unreachable := [token for token in vocab if token not in reachable]:
            raise CheckpointError(
                f"{merges_file}: no merge gives {json.dumps(unreachable[0])} and "
                f"{len(unreachable) - 1} other tokens of vocab.json; the file is damaged."
            )
        self._bpe = Tokenizer(model)
        self._normalizer = normalizers.NFC()
        self._bpe.normalizer = self._normalizer  # pyright: ignore[reportAttributeAccessIssue]
        self._bpe.pre_tokenizer = qwen_pre_tokenizer()  # pyright: ignore[reportAttributeAccessIssue]
        self._split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
        self._byte_of = byte_characters()
        self._known: dict[str, list[int]] = {}  # ids of pre-tokens
        self._bytes_of: dict[int, bytes] = {}  # of the ids so far

    def encode(self, text: str) -> list[int]:
        """The ids of a text. The caller strips outer whitespace.

        Those of ASCII are put together from the ids of pre-tokens of earlier texts, if all are
        known, which takes less time after a pause than the library.
        """
        if not text.isascii():
            return self._bpe.encode(text, add_special_tokens=False).ids
        pretokens, known = _ASCII_SPLIT.findall(text), self._known
        try:
            return [i for pretoken in pretokens for i in known[pretoken]]
        except KeyError:
            encoding = self._bpe.encode(text, add_special_tokens=False)
        ids_of: dict[int | None, list[int]] = defaultdict(list)
        for i, index in zip(encoding.ids, encoding.word_ids, strict=True):
            ids_of[index].append(i)
        for index, pretoken in enumerate(pretokens):
            if len(pretoken) <= _MAX_KNOWN_LENGTH and len(known) < _MAX_KNOWN_PRETOKENS:
                known[pretoken] = ids_of[index]
        return encoding.ids

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token. Those of a whole text are the normalised text in UTF-8."""
        known = self._bytes_of
        for i in ids:
            if i not in known:
                token = self._bpe.id_to_token(i) or ""
                known[i] = bytes(self._byte_of[char] for char in token)
        return [known[i] for i in ids]

    def normalize(self, text: str) -> str:
        """NFC with the tokenizer's tables; Python's may have another Unicode version."""
        if text.isascii():  # is in NFC
            return text
        return self._normalizer.normalize_str(text)

    def stable_length(self, text: str) -> int:
        """The length of the prefix of a normalised text whose tokens no later text can change.

        A pre-token is final when the character after it does not combine with preceding characters.
        A boundary after whitespace is not used, because the split depends on what follows
        whitespace.
        """
        start = len(text)
        for pretoken in reversed(self._pretokens(text)):
            start -= len(pretoken)
            if 0 < start and _never_combines(text[start]) and not text[start - 1].isspace():
                return start
        return 0

    def _pretokens(self, text: str) -> list[str]:
        if text.isascii():
            return _ASCII_SPLIT.findall(text)
        return [pretoken for pretoken, _ in self._split.pre_tokenize_str(text)]


def _never_combines(char: str) -> bool:
    """Whether normalisation never merges or reorders the character with preceding ones."""
    # Letters that compose with preceding ones: Hangul vowels and finals, Kirat Rai vowels.
    composes = "\u1160" <= char <= "\u11ff" or "\U00016d63" <= char <= "\U00016d6a"
    category = unicodedata.category(char)
    # An unassigned character may be a combining mark in a newer Unicode version than Python's.
    return not composes and category[0] != "M" and category != "Cn"


class IncrementalTokenizer:
    """Tokenises text that arrives in portions; the ids are those of the whole text.

    Outer whitespace is stripped.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending = ""
        self._num_encoded = 0  # characters
        self._started = False

    def push(self, text: str) -> list[int]:
        """Adds text; returns the new ids that no later text can change."""
        pending = self._with_pending(text)
        length = self._tokenizer.stable_length(pending)
        self._pending = pending[length:]
        self._num_encoded += length
        return self._tokenizer.encode(pending[:length]) if length else []

    @property
    def num_characters(self) -> int:
        """Characters of the normalised text so far, without outer whitespace at its start."""
        return self._num_encoded + len(self._pending)

    @property
    def between_words(self) -> bool:
        """Whether whitespace follows the ids that were returned."""
        return self._pending[:1].isspace()

    def end(self, text: str = "") -> list[int]:
        """Adds the last text; returns the remaining ids."""
        rest, self._pending = self._with_pending(text).rstrip(), ""
        self._num_encoded += len(rest)
        return self._tokenizer.encode(rest) if rest else []

    def _with_pending(self, text: str) -> str:
        pending = self._tokenizer.normalize(self._pending + text)
        if not self._started:  # leading whitespace is dropped
            pending = pending.lstrip()
            self._started = bool(pending)
        return pending
