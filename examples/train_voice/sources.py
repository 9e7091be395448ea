"""Public-domain and freely licensed texts of Debian packages, as sentences and paragraphs.

| package | content | licence |
| --- | --- | --- |
| r-cran-janeaustenr | six novels by Jane Austen | public domain |
| sword-text-web | the World English Bible, in modern English | public domain |
| sword-text-sparv | the Spanish Reina-Valera Bible of 1909 | public domain |
| wordnet-base | definitions and example sentences of WordNet 3.0 | WordNet licence (permissive) |
| wamerican-small | words and names of SCOWL | permissive |
"""

import bz2
import lzma
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

DEBIAN = Path("/usr")
_AUSTEN = "lib/R/site-library/janeaustenr/data/Rdata.rdb"
_SWORD = {
    "english": "share/sword/modules/texts/ztext/engWEB2015eb",
    "spanish": "share/sword/modules/texts/ztext/spaRV1909eb",
}
_WORDNET = "share/wordnet"
_END = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"'“‘(¿¡]*[A-ZÁÉÍÓÚÑ])")
_TITLE = re.compile(r"\b(Mr|Mrs|Ms|Dr|St|Rev|Capt|Col|Esq|Gen|Lt|Sr|Sra|No|etc|viz)\.$|\b[A-Z]\.$")


def sentences(paragraph: str) -> list[str]:
    """Splits a paragraph; quotation marks at the end of a sentence stay with it."""
    found: list[str] = []
    at = 0
    for match in _END.finditer(paragraph):
        marks = match.group().rstrip()
        sentence = paragraph[at : match.start()] + marks
        if not _TITLE.search(sentence):
            found.append(sentence.strip())
            at = match.end()
    return [*found, paragraph[at:].strip()]


def novels(root: Path = DEBIAN) -> Iterator[str]:
    """Paragraphs of Jane Austen's novels."""
    packed = (root / _AUSTEN).read_bytes()
    for text in _strings(packed):
        for paragraph in text.split("\n\n"):
            line = " ".join(paragraph.split()).replace("_", "").replace("--", "—")
            if len(line) > 40 and line[-1] in '.!?"' and not re.search(r"CHAPTER|VOLUME", line):
                yield line


def _strings(packed: bytes) -> Iterator[str]:
    """Text of the character vectors of an R database: each element a line."""
    at = 0
    while at < len(packed):
        kind = packed[at + 4 : at + 5]
        if kind == b"2":
            unpacker = bz2.BZ2Decompressor()
        elif kind == b"Z":
            unpacker = lzma.LZMADecompressor(lzma.FORMAT_AUTO)
        else:
            unpacker = zlib.decompressobj()
        content = unpacker.decompress(packed[at + (5 if kind in b"2Z" else 4) :])
        at = len(packed) - len(unpacker.unused_data)
        lines: list[str] = []
        # An element: flags whose low byte is 9 (CHARSXP), its length, its bytes.
        for match in re.finditer(rb"\x00[\x00\x04][\x00-\x0f]\x09", content):
            (size,) = struct.unpack(">I", content[match.end() : match.end() + 4])
            if size < 200:
                lines.append(content[match.end() + 4 : match.end() + 4 + size].decode("latin-1"))
        yield "\n".join(lines)


def verses(language: str, root: Path = DEBIAN) -> Iterator[str]:
    """Paragraphs of a translation of the Bible without its notes."""
    folder = root / _SWORD[language]
    for part in ("ot", "nt"):
        index = (folder / f"{part}.bzs").read_bytes()
        packed = (folder / f"{part}.bzz").read_bytes()
        for at in range(0, len(index), 12):
            start, size, _ = struct.unpack("<III", index[at : at + 12])
            book = zlib.decompress(packed[start : start + size]).decode("utf-8", "ignore")
            yield from _paragraphs(book, language)


def _paragraphs(book: str, language: str) -> Iterator[str]:
    book = re.sub(r"<(note|title)\b.*?</\1>", " ", book, flags=re.DOTALL)
    pieces = re.split(r'<div [^>]*(?:type="x-p"|type="paragraph")[^>]*>|<l\b[^>]*>|<chapter', book)
    for piece in pieces:
        text = re.sub(r"^[^<>]*>", "", piece)
        line = " ".join(re.sub(r"<[^>]+>", "", text).split())
        line = re.sub(r"\s+([,.;:!?])", r"\1", line)
        if language == "spanish":
            line = _modern_spanish(line)
        if len(line) > 20 and line[-1] in '.!?"”’' and not re.search(r"[\[\]{}\d¶]", line):
            yield line


def _modern_spanish(text: str) -> str:
    """Today's spelling of words that the edition of 1909 accents."""
    text = re.sub(r"\b([áÁ])\b", lambda m: "a" if m[1] == "á" else "A", text)
    text = re.sub(r"\b(é|ó|ú|fué|dió|vió|fuí)\b", lambda m: _PLAIN[m[1]], text)
    return re.sub(r"\b[A-ZÁÉÍÓÚÑ]{2,}\b", lambda m: m[0].capitalize(), text)


_PLAIN = {"é": "e", "ó": "o", "ú": "u", "fué": "fue", "dió": "dio", "vió": "vio", "fuí": "fui"}


def definitions(root: Path = DEBIAN) -> Iterator[tuple[str, str, str]]:
    """Words of WordNet: (part of speech, word, definition or example)."""
    for part in ("noun", "verb", "adj", "adv"):
        lines = (root / _WORDNET / f"data.{part}").read_text(encoding="utf-8").splitlines()
        for line in lines:
            if line.startswith("  "):
                continue
            data, _, gloss = line.partition(" | ")
            word = re.sub(r"\(\w+\)$", "", data.split()[4]).replace("_", " ")
            for text in re.findall(r'"([^"]+)"', gloss):
                yield "example", word, text
            yield part, word, gloss.split('; "')[0].strip()
