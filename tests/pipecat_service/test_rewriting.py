"""Filters and transforms of groups of words make the same of the text as of the whole."""

import asyncio
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipecat.utils.text.base_text_filter import BaseTextFilter
from pipecat.utils.text.markdown_text_filter import MarkdownTextFilter
from pipecat.utils.text.transforms.strip_markdown import strip_markdown

from bench.simulation import words_in_audio
from megakernel_tts import TTS
from pipecat_service import MegakernelTTSService
from pipecat_service.pace import WritingPace
from pipecat_service.rewriting import TextRewriting
from pipecat_service.words import WordGroupAggregator
from tests.pipecat_service.bot import Bot, run_conversations

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:.text_filters. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.MarkdownTextFilter. is deprecated:DeprecationWarning"),
]

ELEVEN = "one two three four five six seven eight nine ten eleven"


async def expand_units(text: str, _: str) -> str:
    """The units of distances and temperatures as words."""
    text = re.sub(r"(\d)\s*km\b", r"\1 kilometres", text)
    return re.sub(r"(\d)\s+degrees\s+C\b", r"\1 degrees Celsius", text)


class BracketFilter(BaseTextFilter):
    """Removes text in double brackets, and keeps its state between groups."""

    def __init__(self) -> None:
        self._inside = False

    async def filter(self, text: str) -> str:
        kept = []
        for part in re.split(r"(\[\[|\]\])", text):
            if part in ("[[", "]]"):
                self._inside = part == "[["
            elif not self._inside:
                kept.append(part)
        return "".join(kept)


REWRITINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "units": lambda: {"text_transforms": [("*", expand_units)]},
    "markdown filter": lambda: {"text_filters": [MarkdownTextFilter()]},
    "markdown transform": lambda: {"text_transforms": [("*", strip_markdown)]},
    "filter with state": lambda: {"text_filters": [BracketFilter()]},
    "filter and transforms": lambda: {
        "text_filters": [MarkdownTextFilter()],
        "text_transforms": [("sentence", expand_units)],
    },
}

PLAIN = st.lists(
    st.sampled_from(["a", "word", "5", "km", "degrees", "C", "it's", "so,", "end.", "-", "2", "*"]),
    min_size=1,
    max_size=4,
).map(" ".join)
MARKED = st.builds(
    lambda mark, words: f"{mark[0]}{' '.join(words)}{mark[1]}",
    st.sampled_from([("**", "**"), ("*", "*"), ("_", "_"), ("`", "`"), ("~~", "~~"), ("**", "**."),
                     ("[", "](https://a.example/b)"), ("[[", "]]"), ("***", "***")]),
    st.lists(st.sampled_from(["bold", "5", "km", "word,", "snake_case", "x"]), min_size=1,
             max_size=12),
)  # fmt: skip
UNENDED = st.sampled_from(["**not ended", "*", "a_b", "[see", "`tick"])
TEXTS = st.lists(PLAIN | MARKED | UNENDED, min_size=1, max_size=6).map(" ".join)
CUTS = st.lists(st.integers(0, 400), max_size=30)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    """A text divided at given places."""
    places = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    return [text[start:stop] for start, stop in pairwise(places)]


class Turn:
    """The groups of a turn, and what Pipecat passes to `run_tts` for each."""

    def __init__(self, engine: TTS, **service: Any) -> None:
        self.service = MegakernelTTSService(engine=engine, **service)
        self.now_s = 0.0
        self.aggregator = WordGroupAggregator(
            pace=WritingPace(lambda: self.now_s), rewriting=TextRewriting(self.service)
        )
        self.groups: list[str] = []
        self.spoken: list[str] = []

    async def write(self, *parts: str) -> None:
        """Adds text of the language model."""
        for part in parts:
            async for group in self.aggregator.aggregate(part):
                await self.speak(group.text)

    async def pause(self) -> None:
        """Lets the text pause."""
        self.now_s += 5.0
        if group := await self.aggregator.release():
            await self.speak(group.text)

    async def end(self) -> None:
        """Ends the text."""
        if group := await self.aggregator.flush():
            await self.speak(group.text)

    async def speak(self, group: str) -> None:
        self.groups.append(group)
        text = self.service._trim_text(group)
        if text and (text := await self.service._transform_text(text, "sentence")):
            self.spoken.append(text.strip() + " " * group[-1].isspace())

    @property
    def text(self) -> str:
        """What the engine speaks, with single spaces."""
        return " ".join("".join(self.spoken).split())


async def whole(engine: TTS, rewriting: str, text: str) -> str:
    """What the engine would speak if the text were one group."""
    turn = Turn(engine, **REWRITINGS[rewriting]())
    await turn.speak(text)
    return turn.text


@pytest.mark.parametrize("rewriting", REWRITINGS)
@settings(max_examples=60, deadline=None)
@given(TEXTS, CUTS)
@example(f"He **{ELEVEN}** said. More words follow.", [])
@example("About 5 km from here, or 30 degrees C now.", list(range(60)))
def test_speech_is_that_of_the_whole_text(
    engine: TTS, rewriting: str, text: str, cuts: list[int]
) -> None:
    async def check() -> None:
        turn = Turn(engine, **REWRITINGS[rewriting]())
        await turn.write(*cut(text, cuts))
        await turn.end()
        assert turn.text == await whole(engine, rewriting, text), turn.groups
        assert "".join(turn.groups).rstrip() == text.rstrip()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("rewriting", "undivided"),
    [("units", "5 km "), ("markdown transform", f"**{ELEVEN}** ")],
)
def test_groups_do_not_end_where_the_text_is_rewritten(
    engine: TTS, rewriting: str, undivided: str
) -> None:
    turn = Turn(engine, **REWRITINGS[rewriting]())
    text = f"About {undivided}and more words follow. And more words."
    asyncio.run(turn.write(*text))
    assert any(undivided in group for group in turn.groups) and len(turn.groups) >= 2


def test_without_rewriting_groups_do_not_wait_for_lookahead(engine: TTS) -> None:
    turn = Turn(engine)
    asyncio.run(turn.write(*"One two "))
    assert turn.groups == ["One two "]


def test_a_pause_releases_text_before_open_markup(engine: TTS) -> None:
    turn = Turn(engine, **REWRITINGS["markdown transform"]())

    async def write() -> None:
        await turn.write("Let me see. **This is")
        await turn.pause()
        assert turn.text == "Let me see."
        assert turn.aggregator.until_release_s == float("inf"), "released again without new text"
        await turn.write(" bold** and")
        await turn.pause()

    asyncio.run(write())
    assert turn.text == "Let me see. This is bold and"


def test_markup_without_an_end_holds_a_limited_text(engine: TTS) -> None:
    turn = Turn(engine, **REWRITINGS["markdown transform"]())
    asyncio.run(turn.write("See **" + "word " * 200))
    held = len(turn.aggregator.text.text)
    assert len(turn.groups) > 10 and held < 500


def test_text_on_which_a_transform_fails_is_released(engine: TTS) -> None:
    """Pipecat reports the error of each group."""

    async def fail(text: str, _: str) -> str:
        raise LookupError(text)

    bot = Bot(engine, "One two three. " * 60, text_transforms=[("*", fail)])
    run_conversations([bot], Bot.reply)
    assert len(bot.errors) > 1 and "One two" in bot.errors[0].error


def test_the_engine_speaks_and_the_conversation_keeps_the_text_as_written(engine: TTS) -> None:
    text = f"It is **{ELEVEN}** or 5 km from here."
    rewriting = REWRITINGS["filter and transforms"]
    bot = Bot(engine, text, tokenize=list, **rewriting())
    run_conversations([bot], Bot.reply)
    assert words_in_audio(bot.output.pcm) == list(range(len(text.split())))
    assert bot.said == [text] and not bot.errors
