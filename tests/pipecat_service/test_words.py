import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts import split_words
from pipecat_service.pace import WritingPace
from pipecat_service.words import WordGroupAggregator, has_words, needs_space


def groups(parts: list[str]) -> list[str]:
    """Groups released while a text arrives and at its end."""

    async def collect() -> list[str]:
        aggregator = WordGroupAggregator(pace=WritingPace(lambda: 0.0))
        found = [g.text for part in parts async for g in aggregator.aggregate(part)]
        rest = await aggregator.flush()
        return [*found, rest.text] if rest else found

    return asyncio.run(collect())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, how are you?", ["Hello, ", "how ", "are you?"]),
        ("One two three four", ["One two ", "three four"]),
        ("a b " + "c " * 7, ["a b ", "c c c c c c ", "c "]),
        ("It is 3.14, or so. Yes!", ["It is ", "3.14, ", "or so. ", "Yes!"]),
        ('"Well," she said.', ['"Well," ', "she ", "said."]),
        ("... so – it goes", ["... so – it ", "goes"]),
        ("你好，世界。再见", ["你好，", "世界。", "再见"]),
        ("Say 你好 now", ["Say 你", "好 now"]),
        ("...", ["..."]),
        (
            'Hi <break time="1 s"/> you <b c="d e">there</b>',
            ['Hi <break time="1 s"/> ', 'you <b c="d e">there</b>'],
        ),
        ('So.<break time="1s"/> A <<m|ɛ|t>> <b', ['So.<break time="1s"/> ', "A ", "<<m|ɛ|t>> <b"]),
        (" \n ", []),
    ],
)
def test_groups_are_the_first_words_then_clauses(text: str, expected: list[str]) -> None:
    assert groups([text]) == groups(list(text)) == expected


@given(st.lists(st.text(st.sampled_from("ab ,.!?\n你好。é’”")), max_size=30))
def test_groups_add_up_to_the_text_and_cut_no_word(parts: list[str]) -> None:
    text = "".join(parts)
    found = groups(parts)
    assert "".join(found).rstrip() == text.rstrip()
    whole = [word.text for word in split_words(text) if word.spoken]
    cut = [word.text for group in found for word in split_words(group) if word.spoken]
    assert cut == whole
    assert all(has_words(group) for group in found[:-1])


@pytest.mark.parametrize("tag", ['<break time="1 s"/>', "<b a='x y' c=z>", "<<m|ɛ|t>>", "<x"])
def test_a_pause_releases_no_part_of_a_tag(tag: str) -> None:
    async def released(text: str) -> str:
        aggregator = WordGroupAggregator(pace=WritingPace(lambda: 0.0))
        groups = [group.text async for group in aggregator.aggregate(text)]
        group = await aggregator.release(last_word=True)
        return "".join([*groups, group.text if group else ""])

    for stop in range(1, len(tag)):
        assert asyncio.run(released(f"One two {tag[:stop]}")) == "One two "
    if tag[-1] == ">":
        assert asyncio.run(released(f"One two {tag}")) == f"One two {tag}"


def test_an_interruption_discards_text_that_was_not_released() -> None:
    async def interrupted() -> list[str]:
        aggregator = WordGroupAggregator(pace=WritingPace(lambda: 0.0))
        _ = [g async for g in aggregator.aggregate("One two three four, fi")]
        assert aggregator.text.text == "fi"
        await aggregator.handle_interruption()
        return [g.text async for g in aggregator.aggregate("Six seven eight")]

    assert asyncio.run(interrupted()) == ["Six seven "]


@pytest.mark.parametrize(
    ("last", "first", "expected"),
    [
        (".", "A", True),
        ("ß", "A", True),
        (" ", "A", False),
        ("a", "\n", False),
        ("。", "你", False),
        ("好", "你", False),
    ],
)
def test_words_of_spaced_scripts_need_a_space(last: str, first: str, expected: bool) -> None:
    assert needs_space(last, first) is expected
