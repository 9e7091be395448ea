import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel_tts.text.splitter import SplitLimits, Splitter

SENTENCES = SplitLimits(sentence=1)


def split(
    text: str, language: str = "auto", limits: SplitLimits | None = None, ends: Sequence[int] = ()
) -> list[str]:
    """The segments of a text that arrives in portions with these ends."""
    splitter, segments = Splitter(language, limits), [""]
    for start, end in itertools.pairwise([0, *ends, len(text)]):
        for portion, segment_ends in splitter.push(text[start:end]):
            segments[-1] += portion
            if segment_ends:
                segments.append("")
    return segments


def split_stripped(text: str, language: str = "auto", limits: SplitLimits = SENTENCES) -> list[str]:
    return [segment.strip() for segment in split(text, language, limits)]


@settings(max_examples=120, deadline=None)
@given(
    text=st.text(
        st.sampled_from("ab1 .,!?。，你\n\"')]<>👩\u200d\u0301-:;") | st.characters(), max_size=400
    ),
    cuts=st.lists(st.integers(0, 400), max_size=10),
)
def test_segments_concatenate_to_the_text_and_do_not_depend_on_its_portions(
    text: str, cuts: list[int]
) -> None:
    limits = SplitLimits(sentence=5, clause=10, space=20, anywhere=40)
    segments = split(text, limits=limits)
    assert "".join(segments) == text
    ends = sorted({cut % (len(text) + 1) for cut in cuts})
    assert split(text, limits=limits, ends=ends) == segments


def test_a_portion_beyond_the_length_of_a_sentence_is_split() -> None:
    assert split("ab. C", limits=SplitLimits(sentence=4)) == ["ab. ", "C"]
    assert split("ab. C", limits=SplitLimits(sentence=5)) == ["ab. C"]


@pytest.mark.parametrize("text", ["ab. cd. ef. gh.", "ab。cd。ef。gh。", "你好。你好。你好。"])
@pytest.mark.parametrize("sentence", [1, 3, 4, 8, 9, 12])
def test_one_portion_is_split_like_its_characters(text: str, sentence: int) -> None:
    limits = SplitLimits(sentence=sentence)
    for length in range(1, len(text) + 1):
        whole = split(text[:length], limits=limits)
        assert whole == split(text[:length], limits=limits, ends=range(1, length))


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("One. Two! Three? Four", "english", ["One.", "Two!", "Three?", "Four"]),
        ('He said "Go." She went.', "english", ['He said "Go."', "She went."]),
        ("Dr. Smith met Mrs. Jones at 3 p.m. on Main St. yesterday. Fine.", "english",
         ["Dr. Smith met Mrs. Jones at 3 p.m. on Main St. yesterday.", "Fine."]),
        ("It costs 3.50 or 1,000.00. Yes.", "english", ["It costs 3.50 or 1,000.00.", "Yes."]),
        ("See https://example.com/a.b?c=d. Then J. R. Tolkien.", "english",
         ["See https://example.com/a.b?c=d.", "Then J. R. Tolkien."]),
        ("Wait... what? No… really.", "english", ["Wait... what?", "No… really."]),
        ("Am 3. Mai z.B. kam Hr. Maier. Gut.", "german",
         ["Am 3. Mai z.B. kam Hr. Maier.", "Gut."]),
        ("你好。天气真好！“走吧。”他说。", "chinese",
         ["你好。", "天气真好！", "“走吧。”", "他说。"]),
        ("Use [a tag. With dots.] here. And <break time=\"1. s\"/> there. End.", "english",
         ["Use [a tag. With dots.] here.", "And <break time=\"1. s\"/> there.", "End."]),
        ("A title\n\nA paragraph", "auto", ["A title", "A paragraph"]),
        ("क्या हाल है। ठीक।", "auto", ["क्या हाल है।", "ठीक।"]),
        ("« Oui. » Il part.", "french", ["« Oui. »", "Il part."]),
        ("価格は３．５円です。はい。", "japanese", ["価格は３．５円です。", "はい。"]),
        ("Smith et al. 2020, Ph.D. Gov. Lee agrees. Ok.", "english",
         ["Smith et al. 2020, Ph.D. Gov. Lee agrees.", "Ok."]),
        ("The cat sat. It slept in the sun. No. Yes.", "english",
         ["The cat sat.", "It slept in the sun.", "No.", "Yes."]),
        ("See no. 5 and fig. 3 there. Ok.", "english", ["See no. 5 and fig. 3 there.", "Ok."]),
        ("Er kam. »Gut.« „Geh.“ Sie ging.", "german", ["Er kam.", "»Gut.«", "„Geh.“", "Sie ging."]),
        ("Is it me or I. You know.", "english", ["Is it me or I.", "You know."]),
    ],
)  # fmt: skip
def test_sentences_are_split_at_their_ends(text: str, language: str, expected: list[str]) -> None:
    assert split_stripped(text, language) == expected


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Short. This is a first one. And on", "Short. This is a first one."),
        ("no end in sight here, but a breath there is", "no end in sight here,"),
        ("words and words and words and words and words", "words and words and words and"),
    ],
)
def test_sentence_ends_are_preferred_to_clause_ends_and_these_to_spaces(
    text: str, first: str
) -> None:
    limits = SplitLimits(sentence=10, clause=20, space=30, anywhere=100)
    assert split_stripped(text, limits=limits)[0] == first


def test_numbers_with_spaces_or_wide_commas_are_not_split() -> None:
    limits = SplitLimits(sentence=2, clause=3, space=4, anywhere=50)
    assert "1 000 000" in split_stripped("pay 1 000 000 now", limits=limits)
    segments = split_stripped("一共三3，000元，好", limits=limits)
    assert any("3，000" in segment for segment in segments)


def test_text_without_boundaries_is_split_between_graphemes() -> None:
    segments = split("a" * 5000)
    assert [len(segment) for segment in segments[:-1]] == [600] * (len(segments) - 1)
    family = "👩\u200d👩\u200d👧"
    limits = SplitLimits(sentence=4, clause=4, space=4, anywhere=8)
    for segment in split(family * 6 + "e\u0301" * 9, limits=limits):
        assert not segment.startswith(("\u200d", "\u0301"))
        assert not segment.endswith("\u200d")


def test_addresses_numbers_and_tags_are_not_split() -> None:
    for unit in (
        "https://example.com/" + "abcdefghi/" * 22,
        "3." + "14159265" * 30,
        "<break strength='" + "x y " * 40 + "'/>",
    ):
        text = "word " * 79 + unit + " and more " * 30
        assert any(unit in segment for segment in split(text)), unit[:20]


@pytest.mark.parametrize("char", [*" 9)\n🏽🇩", "\u0301", "\u200d", "\u1161", "<a"])
def test_length_of_segments_is_bounded_for_any_text(char: str) -> None:
    segments = split("a" + char * (60_000 // len(char)))
    assert max(len(segment) for segment in segments) <= 1201


def test_tag_that_is_never_closed_does_not_prevent_splits() -> None:
    text = "a <b " + "word " * 200
    assert all(len(segment) <= 600 for segment in split(text))
