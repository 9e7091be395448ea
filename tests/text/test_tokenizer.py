import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel_tts.checks import check_text
from megakernel_tts.errors import CheckpointError, TextError
from megakernel_tts.model.random_checkpoint import write_checkpoint
from megakernel_tts.text.tokenizer import IncrementalTokenizer, TextTokenizer

SCRIPTS = st.sampled_from(
    [
        *"abcXYZ019 .,!?'’-–\n\r\t\u00a0\u3000ﬁ你好，。한नกعשы👩👧🏳🏽🇩🇪\x00",
        *"\u0323\u1112\u1161\u11ab\u093f\u0e49\u064b\u200d\ufe0f",  # combine with what precedes
        *("'s", "'ll", "'RE", "e\u0301", "n\u0303", "か\u3099", "<|im_end|>", "<tts_pad>"),
    ]
)
TEXTS = st.lists(SCRIPTS | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Callable[..., Path]) -> TextTokenizer:
    return TextTokenizer(checkpoint(), 10_000)


def portions(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@settings(max_examples=600, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=12))
def test_incremental_ids_add_up_to_the_whole(
    tokenizer: TextTokenizer, text: str, cuts: list[int]
) -> None:
    incremental = IncrementalTokenizer(tokenizer)
    ids = [i for portion in portions(text, cuts) for i in incremental.push(portion)]
    assert ids + incremental.end() == tokenizer.encode(text.strip())


@pytest.mark.parametrize(
    "text",
    [
        "a\u202f\u2003'", "?s \t.", " \n \n  x", "a  \u0ce9", "x\r\n\r\n y", "'re 'rest 'LL",
        "\u1dcc\u1df8", "\U0001e8d1\ua82c", "\u08fd\u08d0", "\u0323\u0d3c\u0d10", "a\u0331\u0301",
        "\u1112\u1161\u11ab", "\U00016d63\U00016d67\U00016d67", "か\u3099", "\x1c a\x1f b",
    ],
)  # fmt: skip
def test_hard_borders(tokenizer: TextTokenizer, text: str) -> None:
    """Cases that broke earlier rules: whitespace runs, marks of other Unicode versions."""
    for cuts in ([], [1], [2], list(range(len(text)))):
        incremental = IncrementalTokenizer(tokenizer)
        ids = [i for portion in portions(text, cuts) for i in incremental.push(portion)]
        assert ids + incremental.end() == tokenizer.encode(text.strip())


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, first=TEXTS, second=TEXTS)
def test_settled_ids_do_not_depend_on_what_comes(
    tokenizer: TextTokenizer, text: str, first: str, second: str
) -> None:
    incremental = IncrementalTokenizer(tokenizer)
    early = incremental.push(text)
    for continuation in (first, second):
        assert tokenizer.encode((text + continuation).strip())[: len(early)] == early


def test_words_are_emitted_as_soon_as_they_end(tokenizer: TextTokenizer) -> None:
    incremental = IncrementalTokenizer(tokenizer)
    assert incremental.push("hello") == []
    assert incremental.push(" ") == tokenizer.encode("hello")
    assert incremental.push("wor") == []
    assert incremental.push("ld.") == tokenizer.encode(" world")
    assert incremental.end() == tokenizer.encode(".")


def test_special_strings_are_spoken_text(
    tokenizer: TextTokenizer, checkpoint: Callable[..., Path]
) -> None:
    config = json.loads((checkpoint() / "config.json").read_text())
    control = {value for name, value in config.items() if name.endswith("_token_id")}
    control.discard(config["assistant_token_id"])
    for special in ("<|im_end|>", "<|im_start|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"):
        ids = tokenizer.encode(f"a {special} b")
        assert not control & set(ids)
        assert len(ids) > 5


def test_qwens_split_and_not_mistrals(tokenizer: TextTokenizer) -> None:
    """Mistral's split would cut before the capital, and "Wor" could never join "hello"."""
    assert tokenizer.settled("helloWorld x") == len("helloWorld")
    digits = tokenizer.encode("2024")
    assert len(digits) == 4


def test_lone_surrogates_are_refused_with_their_place() -> None:
    with pytest.raises(TextError, match=r"U\+D83D.* character 2"):
        check_text("ab\ud83d")
    check_text("NUL \x00 and emoji 👩 are text")


def test_a_damaged_merges_file_is_refused(tmp_path: Path) -> None:
    """Without its merges a text would silently become other tokens."""
    write_checkpoint(tmp_path)
    file = tmp_path / "merges.txt"
    whole = file.read_text(encoding="utf-8")
    for damaged in ("", whole[: len(whole) // 3], whole.replace("\n", "\n\n", 1).split("\n", 9)[9]):
        file.write_text(damaged, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"merges\.txt"):
            TextTokenizer(tmp_path, 10_000)
    file.write_text(whole.replace("\n", "\r\n"), encoding="utf-8")
    TextTokenizer(tmp_path, 10_000)


def test_broken_tokenizer_files_name_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    with pytest.raises(CheckpointError, match=r"vocab.json: .*below 10"):
        TextTokenizer(tmp_path, 10)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nnot a merge at all\n")
    with pytest.raises(CheckpointError, match=r"merges\.txt"):
        TextTokenizer(tmp_path, 10_000)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match=r"merges\.txt: the file is missing"):
        TextTokenizer(tmp_path, 10_000)
    del vocab["a"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(CheckpointError, match="1 of the 256 byte tokens"):
        TextTokenizer(tmp_path, 10_000)


def test_long_random_text_in_single_characters(tokenizer: TextTokenizer) -> None:
    rng = random.Random(0)
    alphabet = "ab '\n\t.,9é\u0301你，。👩\u200d"
    text = "".join(rng.choice(alphabet) for _ in range(3000))
    incremental = IncrementalTokenizer(tokenizer)
    ids = [i for char in text for i in incremental.push(char)]
    assert ids + incremental.end() == tokenizer.encode(text.strip())


@given(text=TEXTS)
def test_tokens_spell_the_normalised_text(tokenizer: TextTokenizer, text: str) -> None:
    spelled = b"".join(tokenizer.spell(tokenizer.encode(text)))
    assert spelled.decode() == tokenizer.normalize(text)


def test_it_is_known_whether_a_word_may_go_on(tokenizer: TextTokenizer) -> None:
    incremental = IncrementalTokenizer(tokenizer)
    known = [(incremental.push(part), incremental.between_words)[1] for part in ("On", "e ", ",")]
    assert known == [False, True, True], "what stands alone after a space is no part of the word"
    incremental.end()
    assert not incremental.between_words
