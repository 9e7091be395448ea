"""Names that standard terms have replaced are no identifiers."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.test_layering import COMMON, NAME, ROOT, STT, tree_of

FOLDERS = COMMON.name, NAME, STT.name, "pipecat_service", "bench", "examples", "tests"

# Word of an identifier -> the term to use instead.
REPLACED_WORDS = {
    "alone": "solo",
    "bell": "wakeup",
    "company": "batch",
    "crew": "block context",
    "doze": "poll interval",
    "ending": "what ends, such as `last_frame`",
    "everybody": "the noun",
    "heard": "played, received, transcript",
    "house": "package",
    "look": "poll",
    "meanwhile": "overlap",
    "meeting": "block barrier",
    "neighbours": "other streams",
    "nobody": "the noun",
    "overhear": "attention capture",
    "patience": "timeout",
    "patient": "timeout",
    "seat": "admit",
    "sounding": "decoding",
    "suspension": "slot snapshot",
    "told": "reported",
    "utterance": "segment",
    "utterances": "segments",
    "watch": "detect, timer, attention capture",
    "watched": "captured",
    "whom": "the noun",
}
# Whole identifiers, without leading underscores, whose words have other uses.
REPLACED_NAMES = {
    "Gate": "mbarrier, lock",
    "Halves": "hi/lo split",
    "Part": "prefill chunk",
    "Place": "target",
    "PromptPart": "PromptRange",
    "go_on": "resume",
    "no_room": "out_of_memory",
    "put_back": "restore",
    "take_out": "snapshot",
}
# Standard uses: "look up" is the verb of a table, corpora consist of utterances, words have
# endings, and in the name of a test "alone" is an adverb.
STANDARD_NAMES = {"look_up"}
STANDARD_WORDS = {
    "ending": ("examples/train_voice/",),
    "utterance": ("examples/train_voice/", "tests/test_train_voice"),
    "utterances": ("examples/train_voice/", "tests/test_train_voice"),
}


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each function, class, argument, variable, attribute and alias."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name) | ast.Name(id=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield node.lineno, name
            case _:
                pass


@cache
def words_of(name: str) -> frozenset[str]:
    """Words of an identifier in snake case or camel case, in lower case."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return frozenset(word.lower() for word in words)


def is_standard(word: str, name: str, file: str) -> bool:
    """Whether a replaced word is used in another, standard meaning."""
    adverb = word == "alone" and name.startswith("test_")
    return adverb or name in STANDARD_NAMES or file.startswith(STANDARD_WORDS.get(word, ()))


def replaced_names(file: Path) -> Iterator[str]:
    """Each replaced name in a file, with its place and the standard term."""
    path = file.relative_to(ROOT).as_posix()
    for line, name in identifiers(tree_of(file)):
        if (bare := name.lstrip("_")) in REPLACED_NAMES:
            yield f"{path}:{line}: {name}: {REPLACED_NAMES[bare]}"
        for word in words_of(name) & REPLACED_WORDS.keys():
            if not is_standard(word, name, path):
                yield f"{path}:{line}: {name}: {REPLACED_WORDS[word]}"


def test_replaced_names_are_no_identifiers() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    found = [name for file in files for name in replaced_names(file)]
    assert not found, "\n".join(found)


def test_identifiers_are_found_wherever_a_name_is_bound() -> None:
    source = """
import a as alias
class Kind:
    field: int
def function(argument):
    try:
        call(keyword=1).attribute
    except E as caught:
        variable = 0
    match argument:
        case [*rest]:
            pass
        case whole:
            pass
"""
    found = {name for _, name in identifiers(ast.parse(source))}
    assert found >= {"alias", "Kind", "field", "function", "argument", "keyword", "attribute"}
    assert found >= {"caught", "variable", "rest", "whole"}
