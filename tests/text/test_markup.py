from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts.text.markup import Break, Markup, Spoken, TextPart
from megakernel_tts.text.pronunciations import Pronunciations

TABLE = Pronunciations({"GPU": "gee pee you", "sql": "sequel", "重庆": "崇庆", "a-b": "ay bee"})


def read(portions: Sequence[str], table: Pronunciations | None = TABLE) -> list[TextPart]:
    """The parts of a text, with adjacent ones that are spoken as they are written joined."""
    markup, parts = Markup(table), list[TextPart]()
    for portion in portions:
        parts += markup.push(portion)
    return joined([*parts, *markup.end()])


def joined(parts: Sequence[TextPart]) -> list[TextPart]:
    result: list[TextPart] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, Spoken) and part.written is None:
            if isinstance(last, Spoken) and last.written is None:
                result[-1] = Spoken(last.text + part.text)
                continue
        result.append(part)
    return result


def plain(text: str) -> list[TextPart]:
    return [Spoken(text)] if text else []


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("I <3 you: 1 < 2, x<y and z<", "I <3 you: 1 < 2, x<y and z<"),
        ('Hi <emotion value="sad"/>there.', "Hi there."),
        ('Hi.<emotion value="sad"/>There', "Hi. There"),
        ('one<emotion value="sad"/>two', "one two"),
        ("one<emotion/><b>two</b><emotion/>three", "one two three"),
        ("<speak><prosody rate='slow'>Hi</prosody>, you</speak>", "Hi, you"),
        ("wor<b>ld</b>", "world"),
        ("a <<m|ɛ|t>> b", "a  b"),
        ("so it ends <brea", "so it ends <brea"),
        ("</break>Hi", "Hi"),
        ('<break time="0s"/>Hi', "Hi"),
    ],
)
def test_tags_are_not_spoken_and_other_text_is(text: str, spoken: str) -> None:
    assert read([text]) == plain(spoken)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('a <break time="2s"/>b', [Spoken("a "), Break(2.0), Spoken("b")]),
        ('<break time="99s"/>', [Break(10.0)]),
        ("a<break/><break/>b", [Spoken("a"), Break(0.5), Break(0.5), Spoken("b")]),
        # Punctuation behind a break belongs to the text before it, and is nothing to speak.
        ("a<break/>. B", [Spoken("a"), Break(0.5), Spoken("B")]),
        ("a<break/>, <break/>!", [Spoken("a"), Break(0.5), Break(0.5)]),
        ("a<break/> – “b”", [Spoken("a"), Break(0.5), Spoken("“b”")]),
    ],
)
def test_breaks_divide_the_text(text: str, parts: list[TextPart]) -> None:
    assert read([text]) == parts


@pytest.mark.parametrize(
    ("text", "spoken", "written"),
    [
        ("ABC", "A B C", "ABC"),
        ("abc", "A B C", "abc"),
        ("a1-b2,", "A 1- B 2,", "a1-b2,"),
        ("(it)", "(I T)", "(it)"),
        ("ßé", "ß É", "ßé"),
        ("GPU", "G P U", "GPU"),
        ("重庆", "重 庆", "重庆"),
    ],
)
def test_spelled_words_are_separate_characters(text: str, spoken: str, written: str) -> None:
    assert read([f"<spell>{text}</spell>"]) == [Spoken(spoken, written)]
    expected = [Spoken("x "), Spoken(spoken, written), Spoken(" y")]
    assert read([f"x <spell>{text}</spell> y"]) == expected
    assert read([f"x <spell>{text}"]) == expected[:2], "it is spelled to the end of the text"


def test_a_spelled_text_keeps_its_words() -> None:
    parts = [Spoken("A B", "AB"), Spoken(" "), Spoken("1 2", "12"), Spoken(".")]
    assert read(["<spell>AB 12</spell>."]) == parts
    long = read([f"<spell>{'x' * 150}</spell>"])
    assert [len(part.written or "") for part in long if isinstance(part, Spoken)] == [
        64, 0, 64, 0, 22,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("(GPU), ok", [Spoken("("), Spoken("gee pee you", "GPU"), Spoken("), ok")]),
        ("GPUs", [Spoken("GPUs")]),
        ("SQL", [Spoken("sequel", "SQL")]),
        ("G<b>P</b>U", [Spoken("gee pee you", "GPU")]),
        ("在重庆。", [Spoken("在"), Spoken("崇庆", "重庆"), Spoken("。")]),
        ("x<emotion/>GPU", [Spoken("x "), Spoken("gee pee you", "GPU")]),
        ("GPU<break/>s", [Spoken("gee pee you", "GPU"), Break(0.5), Spoken("s")]),
    ],
)
def test_words_of_the_table_are_respelled(text: str, parts: list[TextPart]) -> None:
    assert read([text]) == parts


PIECES = st.sampled_from(
    [
        "a", " ", ".", ", ", "GPU", "sql", "SQ", "重庆", "重", "<", ">", "/", "<b>", "</b>", "x<y ",
        '<break time="1s"/>', "<spell>", "</spell>", "<emotion/>", "<<m|a>>", "<<", "é", "-", "a-b",
    ]
)  # fmt: skip


@given(st.lists(PIECES, max_size=14).map("".join), st.data())
def test_parts_do_not_depend_on_how_the_text_arrives(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    portions = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(portions) == read([text]) == read(text)


@given(st.text(alphabet="ab <>=\"'/GPU.", max_size=60))
def test_without_markup_the_text_is_spoken_as_it_is_written(text: str) -> None:
    """A text without a closing angle bracket has no tag."""
    text = text.replace(">", "")
    assert read([text], None) == plain(text)
    spoken = "".join(part.text for part in read([text], None) if isinstance(part, Spoken))
    assert spoken == text


def test_little_text_is_held_back() -> None:
    """Without a table: only what may be a tag. With one: only what may be a word of it."""
    text = 'Hello there, x<y and 3 < 4. <break time="1s"/>This is a GPU and this is not.'
    for table in (None, TABLE):
        markup, num_spoken = Markup(table), 0
        for i, char in enumerate(text):
            num_spoken += sum(
                len(part.text) for part in markup.push(char) if isinstance(part, Spoken)
            )
            before_tag = i < text.index("<break")
            num_held = i + 1 - num_spoken
            assert num_held <= len("<y and a") or not before_tag
            if char == " " and before_tag and "<y" not in text[max(0, i - 6) : i]:
                assert num_held == 0, text[: i + 1]


def test_a_flush_ends_a_word_but_not_a_tag() -> None:
    markup = Markup(TABLE)
    assert joined([*markup.push("a GPU"), *markup.flush()]) == [
        Spoken("a "), Spoken("gee pee you", "GPU"),
    ]  # fmt: skip
    assert [*markup.push("s <brea"), *markup.flush()] == [Spoken("s ")]
    assert [*markup.push("k/>b"), *markup.end()] == [Break(0.5), Spoken("b")]
    spelled = Markup()
    assert [*spelled.push("<spell>A1"), *spelled.flush()] == [Spoken("A 1", "A1")]
