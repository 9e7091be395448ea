import json
from pathlib import Path
from typing import Any

import pytest

from megakernel_tts import MegakernelTTSError, PronunciationError, Pronunciations
from megakernel_tts.text.pronunciations import Occurrence


def found(table: dict[str, str], text: str, *, text_ended: bool = True) -> list[str]:
    """The words of a table in a text."""
    words, idx, pronunciations = [], 0, Pronunciations(table)
    while (idx := pronunciations.next_start(text, idx)) < len(text):
        word = pronunciations.find(text, idx, text[idx - 1 : idx], text_ended=text_ended)
        if word == "incomplete":
            return [*words, "incomplete"]
        if isinstance(word, Occurrence):
            assert word.respelling in table.values()
            words.append(text[idx : word.stop])
        idx = word.stop if isinstance(word, Occurrence) else idx + 1
    return words


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        (["GPU"], "GPU (GPU), GPU's GPU-based GPUs aGPU GPU4 _GPU GPU", ["GPU"] * 5),
        (["sql"], "sql SQL Sql MySQL", ["sql", "SQL", "Sql"]),
        (["us", "US"], "us US Us", ["us", "US", "Us"]),
        (["US"], "us US Us", ["US"]),
        (["C", "C++"], "C C++ C# CC", ["C", "C++", "C"]),
        (["e.g."], "e.g. this, e.g, that", ["e.g."]),
        (["ça"], "ça Ça ca", ["ça", "Ça"]),
        (["e"], "e e\u0301", ["e"]),
        (["重庆"], "我住在重庆。", ["重庆"]),
        (["New-York", "New"], "New-York New-Yorks New", ["New-York", "New", "New"]),
        ([], "any text", []),
    ],
)
def test_words_are_found_whole_and_the_longest_first(
    words: list[str], text: str, expected: list[str]
) -> None:
    assert found({word: f"{i}" for i, word in enumerate(words)}, text) == expected


def test_a_word_in_capitals_has_its_own_respelling() -> None:
    table = Pronunciations({"us": "uss", "US": "you ess"})
    for text, respelling in (("us", "uss"), ("Us", "uss"), ("US", "you ess")):
        assert table.find(text, 0, "", text_ended=True) == Occurrence(2, respelling)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("GPU", ["incomplete"]), ("GPU ", ["GPU"]), ("GP", ["incomplete"]), ("GPx", []), ("xG", [])],
)
def test_the_end_of_a_text_may_decide(text: str, expected: list[str]) -> None:
    assert found({"GPU": "x"}, text, text_ended=False) == expected


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([("a", "b")], "list"),
        ({"": "x"}, "letter"),
        ({"a b": "x"}, "space"),
        ({"a\nb": "x"}, "space"),
        ({"...": "x"}, "letter"),
        ({"<b>": "x"}, "tag"),
        ({"a": "<b>x"}, "tag"),
        ({"a": " "}, "letter"),
        ({"a": 1}, "string"),
        ({1: "a"}, "string"),
        ({"a": {"b": "c"}}, "string"),
        ({"a": "\ud800"}, "surrogate"),
        ({"a" * 65: "x"}, "65 characters"),
        ({"a": "x" * 201}, "201 characters"),
        ({f"a{i}": "x" for i in range(10_001)}, "10,001"),
    ],
)
def test_invalid_tables_are_refused(table: Any, message: str) -> None:
    with pytest.raises(PronunciationError, match=message) as caught:
        Pronunciations(table)
    assert isinstance(caught.value, MegakernelTTSError) and isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 400


def test_a_table_is_a_mapping_in_normal_form() -> None:
    table = Pronunciations({" cafe\u0301": "  caf\n fay "})
    assert dict(table) == {"café": "caf fay"} and len(table) == 1
    assert table == Pronunciations(table) == {"café": "caf fay"}
    assert not Pronunciations() and not Pronunciations({})


def test_entries_of_the_second_table_replace_others() -> None:
    union = Pronunciations({"a": "one", "b": "two"}) | Pronunciations({"b": "three", "c": "four"})
    assert dict(union) == {"a": "one", "b": "three", "c": "four"}
    assert union.find("C", 0, "", text_ended=True) == Occurrence(1, "four")


def test_tables_are_read_from_json_and_toml(tmp_path: Path) -> None:
    table = {"nginx": "engine ex", "C++": "see plus plus"}
    as_json, as_toml = tmp_path / "table.json", tmp_path / "table.toml"
    as_json.write_text(json.dumps(table), encoding="utf-8")
    as_toml.write_text('nginx = "engine ex"\n"C++" = "see plus plus"\n', encoding="utf-8")
    assert Pronunciations.load(as_json) == Pronunciations.load(str(as_toml)) == table


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"["),
        ("a.json", b"[1]"),
        ("a.json", b"[" * 100_000),
        ("a.json", b'{"a": 1}'),
        ("a.toml", b"[words]\na = 'b'"),
        ("a.toml", b"a = b"),
        ("a.toml", b"\xff"),
    ],
)
def test_errors_of_a_file_name_it(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PronunciationError, match=name):
        Pronunciations.load(tmp_path / name)
    with pytest.raises(OSError, match="missing"):
        Pronunciations.load(tmp_path / "missing.toml")
