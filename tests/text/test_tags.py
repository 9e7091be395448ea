import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megakernel_tts.text.tags import MAX_TAG_CHARACTERS, Tag, read_tag

TAGS = [
    '<break time="0.8s"/>', "<break time='500ms' />", "<break/>", "<spell>", "</spell>",
    '<emotion value="happy"/>', "<volume ratio=0.5/>", '<speed ratio="1.5" />', "<<m|ɛ|t>>",
    '<?xml version="1.0"?>', "<!-- a note -->", "<speak>", "</speak>", '<prosody rate="slow">',
    '<phoneme alphabet="ipa" ph="təˈmeɪtoʊ">', '<say-as interpret-as="date" format="dmy">',
    '<mstts:express-as style="cheerful">', "<p>", "<br />", "<BREAK TIME = “1s”/>",
]  # fmt: skip
TEXTS = [
    "< b", "<3", "<-", "<=", "<b and c", "<b and c>", "<a@b.c>", "<https://a.b>", "<< a", "<<>>",
    '<b a="x>', "<>", "</>", "</ b>", "<b <", '<b a="1"b="2">', "<!>", "<? ",
]  # fmt: skip


@pytest.mark.parametrize("text", TAGS)
def test_a_tag_is_read_as_soon_as_it_is_complete(text: str) -> None:
    for stop in range(1, len(text)):
        assert read_tag(text[:stop], 0) == "incomplete", text[:stop]
    for behind in ("", " word", ">", "<b>"):
        tag = read_tag(f"a {text}{behind}", 2)
        assert isinstance(tag, Tag) and tag.text == text


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_tag_is_not_read(text: str) -> None:
    assert read_tag(text, 0) is None
    assert read_tag(f"{text} and more text", 0) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ('<break time="0.8s"/>', 0.8),
        ('<break time="800ms"/>', 0.8),
        ("<break time='.25s' />", 0.25),
        ("<break time=2s/>", 2.0),
        ('<break strength="weak" time="1.5 s">', 1.5),
        ('<Break Time="1S"/>', 1.0),
        ('<break time="0s"/>', 0.0),
        ('<break time="10.5s"/>', 10.0),
        ('<break time="99999999999999s"/>', 10.0),
        ("<break/>", 0.5),
        ('<break time="soon"/>', 0.5),
        ('<break time="-1s"/>', 0.5),
        ('<break time="1"/>', 0.5),
    ],
)
def test_breaks_last_as_long_as_they_say_up_to_ten_seconds(text: str, seconds: float) -> None:
    tag = read_tag(text, 0)
    assert isinstance(tag, Tag) and tag.kind == "break"
    assert tag.seconds == pytest.approx(seconds)


@given(st.text(alphabet="<>/ab3|é=\"' -?!\n", max_size=24))
@example("<<a>>")
def test_what_cannot_become_a_tag_never_does(text: str) -> None:
    """The answer for a text does not change with what follows, unless it is `incomplete`."""
    answers = (
        [read_tag(text[:stop], 0) for stop in range(1, len(text) + 1)] if text[:1] == "<" else []
    )
    decided = [answer for answer in answers if answer != "incomplete"]
    assert len(set(decided)) <= 1
    assert answers[: len(answers) - len(decided)] == ["incomplete"] * (len(answers) - len(decided))


def test_a_long_tag_is_text() -> None:
    longest = f'<b a="{"x" * (MAX_TAG_CHARACTERS - 8)}">'
    assert isinstance(read_tag(longest, 0), Tag) and len(longest) == MAX_TAG_CHARACTERS
    longer = longest.replace("x", "xx", 1)
    assert read_tag(longer, 0) is None
    assert read_tag(longer[: MAX_TAG_CHARACTERS - 1], 0) == "incomplete"
    assert read_tag(longer[:MAX_TAG_CHARACTERS], 0) is None, "nothing is held back for longer"
