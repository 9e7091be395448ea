import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from megakernel_common.errors import CheckpointError
from megakernel_tts.checks import check_text
from megakernel_tts.errors import TextError
from megakernel_tts.model.random_checkpoint import write_checkpoint
from megakernel_tts.text import tokenizer as tokenizer_module
from megakernel_tts.text.tokenizer import IncrementalTokenizer, TextTokenizer

SCRIPTS = st.sampled_from(
    [
        *"abcXYZ019 .,!?'’-–\n\r\t\u00a0\u3000ﬁ你好，。한नกعשы👩👧🏳🏽🇩🇪\x00",
        *"\u0323\u1112\u1161\u11ab\u093f\u0e49\u064b\u200d\ufe0f",  # combine with preceding ones
        *("'s", "'ll", "'RE", "e\u0301", "n\u0303", "か\u3099", "<|im_end|>", "<tts_pad>"),
    ]
)
TEXTS = st.lists(SCRIPTS | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join)
# The split in the tokenizer.json of Qwen2 and Qwen3.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTRACTIONS = ["'s", "'T", "'re", "'Ve", "'m", "'LL", "'d"]
ASCII = [*map(chr, range(128))]
ASCII_TEXTS = st.lists(
    st.sampled_from(ASCII) | st.sampled_from([*CONTRACTIONS, *" '\n\r\tsSdDabc"]), max_size=40
).map("".join)


@pytest.fixture(scope="module")
def library(checkpoint: Callable[..., Path]) -> Tokenizer:
    """The library's tokenizer, which tokenises each text as a whole."""
    folder = checkpoint()
    bpe = Tokenizer(models.BPE.from_file(f"{folder}/vocab.json", f"{folder}/merges.txt"))
    bpe.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Callable[..., Path]) -> TextTokenizer:
    return TextTokenizer(checkpoint(), 10_000)


def portions(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@settings(max_examples=600, deadline=None)
@given(text=ASCII_TEXTS | TEXTS)
def test_ids_are_those_of_the_library(
    tokenizer: TextTokenizer, library: Tokenizer, text: str
) -> None:
    """Also of a text whose pre-tokens are known, and of one with the same in another order."""
    for repeated in (text, text, f"{text} {text}"):
        ids = library.encode(repeated, add_special_tokens=False).ids
        assert tokenizer.encode(repeated) == ids
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    assert tokenizer._pretokens(text) == [part for part, _ in split.pre_tokenize_str(text)]


def test_few_and_short_pre_tokens_are_kept(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path], library: Tokenizer
) -> None:
    monkeypatch.setattr(tokenizer_module, "_MAX_KNOWN_PRETOKENS", 20)
    tokenizer, rng = TextTokenizer(checkpoint(), 10_000), random.Random(0)
    longest, longer = "a" * 32, "a" * 33
    assert tokenizer.encode(f"{longest} {longer}") == library.encode(f"{longest} {longer}").ids
    assert tokenizer._known == {longest: library.encode(longest).ids}
    for _ in range(50):
        text = " ".join("".join(rng.choices("abc", k=rng.randint(1, 50))) for _ in range(5))
        assert tokenizer.encode(text) == library.encode(text).ids
    assert len(tokenizer._known) == 20
    assert max(map(len, tokenizer._known)) <= 32


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=12))
def test_incremental_ids_equal_those_of_the_complete_text(
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
def test_incremental_ids_are_exact_at_combining_characters_and_whitespace(
    tokenizer: TextTokenizer, text: str
) -> None:
    """Runs of whitespace, and marks of other Unicode versions than Python's."""
    for cuts in ([], [1], [2], list(range(len(text)))):
        incremental = IncrementalTokenizer(tokenizer)
        ids = [i for portion in portions(text, cuts) for i in incremental.push(portion)]
        assert ids + incremental.end() == tokenizer.encode(text.strip())


@settings(max_examples=120, deadline=None)
@given(text=TEXTS, first=TEXTS, second=TEXTS)
def test_returned_ids_do_not_depend_on_later_text(
    tokenizer: TextTokenizer, text: str, first: str, second: str
) -> None:
    incremental = IncrementalTokenizer(tokenizer)
    early = incremental.push(text)
    for continuation in (first, second):
        assert tokenizer.encode((text + continuation).strip())[: len(early)] == early


def test_word_is_returned_when_the_next_character_ends_it(tokenizer: TextTokenizer) -> None:
    incremental = IncrementalTokenizer(tokenizer)
    assert incremental.push("hello") == []
    assert incremental.push(" ") == tokenizer.encode("hello")
    assert incremental.push("wor") == []
    assert incremental.push("ld.") == tokenizer.encode(" world")
    assert incremental.end() == tokenizer.encode(".")


def test_special_token_strings_are_tokenised_as_text(
    tokenizer: TextTokenizer, checkpoint: Callable[..., Path]
) -> None:
    config = json.loads((checkpoint() / "config.json").read_text())
    control = {value for name, value in config.items() if name.endswith("_token_id")}
    control.discard(config["assistant_token_id"])
    for special in ("<|im_end|>", "<|im_start|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"):
        ids = tokenizer.encode(f"a {special} b")
        assert not control & set(ids)
        assert len(ids) > 5


def test_split_is_that_of_qwen_not_of_mistral(tokenizer: TextTokenizer) -> None:
    """Mistral's would split before the capital, and no merge could cross that boundary."""
    assert tokenizer.stable_length("helloWorld x") == len("helloWorld")
    digits = tokenizer.encode("2024")
    assert len(digits) == 4


def test_lone_surrogate_is_refused_with_its_position() -> None:
    with pytest.raises(TextError, match=r"U\+D83D.* character 2"):
        check_text("ab\ud83d")
    check_text("NUL \x00 and emoji 👩 are text")


def test_damaged_merges_file_is_refused(tmp_path: Path) -> None:
    """With missing merges the tokens of a text would silently change."""
    write_checkpoint(tmp_path)
    file = tmp_path / "merges.txt"
    content = file.read_text(encoding="utf-8")
    for damaged in ("", content[: len(content) // 3], content.split("\n", 8)[8]):
        file.write_text(damaged, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"merges\.txt"):
            TextTokenizer(tmp_path, 10_000)
    file.write_text(content.replace("\n", "\r\n"), encoding="utf-8")
    TextTokenizer(tmp_path, 10_000)


def test_invalid_tokenizer_file_is_refused_by_name(tmp_path: Path) -> None:
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
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"b": vocab["a"]}))
    with pytest.raises(CheckpointError, match=f"vocab.json: 2 tokens have the id {vocab['a']};"):
        TextTokenizer(tmp_path, 10_000)
    del vocab["a"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(CheckpointError, match="1 of the 256 byte tokens"):
        TextTokenizer(tmp_path, 10_000)


def test_incremental_ids_are_exact_for_single_characters(tokenizer: TextTokenizer) -> None:
    rng = random.Random(0)
    alphabet = "ab '\n\t.,9é\u0301你，。👩\u200d"
    text = "".join(rng.choice(alphabet) for _ in range(3000))
    incremental = IncrementalTokenizer(tokenizer)
    ids = [i for char in text for i in incremental.push(char)]
    assert ids + incremental.end() == tokenizer.encode(text.strip())


@given(text=TEXTS)
def test_token_bytes_concatenate_to_the_normalised_text(
    tokenizer: TextTokenizer, text: str
) -> None:
    content = b"".join(tokenizer.token_bytes(tokenizer.encode(text)))
    assert content.decode() == tokenizer.normalize(text)


def test_between_words_is_true_after_a_space(tokenizer: TextTokenizer) -> None:
    """Punctuation after the space is not part of the word."""
    incremental = IncrementalTokenizer(tokenizer)
    between_words: list[bool] = []
    for portion in ("On", "e ", ","):
        incremental.push(portion)
        between_words.append(incremental.between_words)
    assert between_words == [False, True, True]
    incremental.end()
    assert not incremental.between_words
