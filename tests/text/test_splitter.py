import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel_tts.text.splitter import Limits, Splitter

SENTENCES = Limits(hard=1)


def split(text: str, language: str = "auto", limits: Limits | None = None) -> list[str]:
    splitter, pieces = Splitter(language, limits), [""]
    for portion, ends in splitter.push(text):
        pieces[-1] += portion
        if ends:
            pieces.append("")
    return pieces


def stripped(text: str, language: str = "auto", limits: Limits = SENTENCES) -> list[str]:
    return [piece.strip() for piece in split(text, language, limits)]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(
        st.sampled_from("ab1 .,!?。，你\n\"')]<>👩\u200d\u0301-:;") | st.characters(), max_size=400
    ),
    cuts=st.lists(st.integers(0, 400), max_size=10),
)
def test_pieces_add_up_and_do_not_depend_on_how_the_text_arrives(
    text: str, cuts: list[int]
) -> None:
    limits = Limits(hard=5, mid=10, weak=20, longest=40)
    whole = split(text, limits=limits)
    assert "".join(whole) == text
    borders = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    splitter, pieces = Splitter(limits=limits), [""]
    for a, b in itertools.pairwise(borders):
        for portion, ends in splitter.push(text[a:b]):
            pieces[-1] += portion
            if ends:
                pieces.append("")
    assert pieces == whole


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
def test_sentences(text: str, language: str, expected: list[str]) -> None:
    assert stripped(text, language) == expected


def test_sentence_ends_come_before_breaths_and_breaths_before_spaces() -> None:
    limits = Limits(hard=10, mid=20, weak=30, longest=100)
    assert (
        stripped("Short. This is a first one. And on", limits=limits)[0]
        == "Short. This is a first one."
    )
    assert (
        stripped("no end in sight here, but a breath there is", limits=limits)[0]
        == "no end in sight here,"
    )
    words = "words and words and words and words and words"
    assert stripped(words, limits=limits)[0] == "words and words and words and"


def test_numbers_with_spaces_and_wide_commas_stay_whole() -> None:
    limits = Limits(hard=2, mid=3, weak=4, longest=50)
    assert "1 000 000" in stripped("pay 1 000 000 now", limits=limits)
    assert any("3，000" in piece for piece in stripped("一共三3，000元，好", limits=limits))


def test_a_text_without_any_border_is_cut_between_characters() -> None:
    pieces = split("a" * 5000)
    assert [len(p) for p in pieces[:-1]] == [600] * (len(pieces) - 1)
    family = "👩\u200d👩\u200d👧"
    limits = Limits(hard=4, mid=4, weak=4, longest=8)
    for piece in split(family * 6 + "e\u0301" * 9, limits=limits):
        assert not piece.startswith(("\u200d", "\u0301"))
        assert not piece.endswith("\u200d")


def test_nothing_is_cut_within_an_address_a_number_or_a_tag() -> None:
    for whole in (
        "https://example.com/" + "abcdefghi/" * 22,
        "3." + "14159265" * 30,
        "<break strength='" + "x y " * 40 + "'/>",
    ):
        text = "word " * 79 + whole + " and more " * 30
        assert any(whole in piece for piece in split(text)), whole[:20]


@pytest.mark.parametrize("char", [*" 9)\n🏽🇩", "\u0301", "\u200d", "\u1161", "<a"])
def test_no_text_makes_an_endless_piece(char: str) -> None:
    """A long run of anything is cut."""
    pieces = split("a" + char * (300_000 // len(char)))
    assert max(len(piece) for piece in pieces) <= 1201


def test_an_opened_angle_is_no_tag_for_ever() -> None:
    text = "a <b " + "word " * 200
    assert all(len(piece) <= 600 for piece in split(text))
