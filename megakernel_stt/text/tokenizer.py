"""Token ids to text: the pieces of a SentencePiece vocabulary."""

import re
from pathlib import Path

from tokenizers import Tokenizer as Library

from megakernel_common.errors import CheckpointError
from megakernel_common.fields import read_text

SPACE = "▁"  # of SentencePiece: the beginning of a word

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_LANGUAGE_TAG = re.compile("<([a-z]{2,3}-[A-Z]{2})>")  # which multilingual models emit
_UNKNOWN, _CONTROL, _UNUSED = 2, 3, 5  # types of pieces in a SentencePiece model


class Tokenizer:
    """The pieces of a vocabulary."""

    def __init__(self, pieces: list[str], special: frozenset[int] = frozenset()) -> None:
        """Prepares the bytes of every piece.

        Args:
            pieces: By id; a piece that begins a word begins with `SPACE`.
            special: Ids that are not spoken.
        """
        self.pieces = pieces
        self._bytes = [
            b"" if i in special or _LANGUAGE_TAG.fullmatch(piece) else _utf8(piece)
            for i, piece in enumerate(pieces)
        ]

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int, blank_id: int) -> "Tokenizer":
        """Reads `tokenizer.json` of a folder that transformers saved.

        Args:
            folder: Of the checkpoint.
            vocab_size: Token ids of the model, blank included.
            blank_id: The id that is no token.

        Raises:
            CheckpointError: The file is missing or invalid, or lacks a token of the model.
        """
        file = folder / "tokenizer.json"
        try:
            library = Library.from_str(read_text(file))
        except CheckpointError:
            raise
        except Exception as error:  # the library raises `Exception` itself
            raise CheckpointError(f"{file}: not readable as a tokenizer ({error}).") from error
        pieces = [library.id_to_token(i) for i in range(vocab_size)]
        _check_complete(pieces, file, blank_id)
        added = library.get_added_tokens_decoder()
        special = frozenset(i for i, token in added.items() if token.special) | {blank_id}
        return cls([piece or "" for piece in pieces], special)

    @classmethod
    def from_sentencepiece(
        cls, model: bytes, file: Path, vocab_size: int, blank_id: int
    ) -> "Tokenizer":
        """Reads a SentencePiece model.

        Args:
            model: Its bytes.
            file: Their origin, for messages.
            vocab_size: Token ids of the model, blank included.
            blank_id: The id that is no token.

        Raises:
            CheckpointError: It is damaged, or lacks a token of the model.
        """
        try:
            entries = [_read_piece(value) for number, value in _message(model) if number == 1]
        except (IndexError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: not a SentencePiece model ({error}).") from error
        silent = (_UNKNOWN, _CONTROL, _UNUSED)
        special = frozenset(i for i, (_, kind) in enumerate(entries) if kind in silent)
        pieces = [entries[i][0] if i < len(entries) else None for i in range(vocab_size)]
        _check_complete(pieces, file, blank_id)
        return cls([piece or "" for piece in pieces], special | {blank_id})

    def bytes_of(self, token: int) -> bytes:
        """The UTF-8 of a token, which may be a part of a character; empty if it is not spoken."""
        return self._bytes[token]

    def language_of(self, token: int) -> str | None:
        """The language that a tag names, such as `en-US`; None for a token of another kind."""
        tag = _LANGUAGE_TAG.fullmatch(self.pieces[token])
        return tag[1] if tag else None


def _utf8(piece: str) -> bytes:
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE, " ").encode()


def _check_complete(pieces: list[str | None], file: Path, blank_id: int) -> None:
    missing = [i for i, piece in enumerate(pieces) if piece is None and i != blank_id]
    if missing:
        raise CheckpointError(
            f"{file}: has no token of id {missing[0]}; the model has {len(pieces)} ids."
        )


def _read_piece(message: bytes | int) -> tuple[str, int]:
    """Text and type of a piece."""
    text, kind = "", 1
    for number, value in _message(message):
        if number == 1 and isinstance(value, bytes):
            text = value.decode()
        elif number == 3 and isinstance(value, int):
            kind = value
    return text, kind


def _message(data: bytes | int) -> list[tuple[int, bytes | int]]:
    """The fields of a message in the format of Protocol Buffers, by number.

    Raises:
        TypeError: It is not a message.
        ValueError: It is truncated, or has a group.
        IndexError: It is truncated.
    """
    if isinstance(data, int):
        raise TypeError("a number where a message is expected")
    fields: list[tuple[int, bytes | int]] = []
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            fields.append((number, value))
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of the unknown kind {kind}")
        if at + size > len(data):
            raise ValueError("truncated")
        fields.append((number, data[at : at + size]))
        at += size
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
