"""Filters and transforms of groups of words make the same of the text as of the whole."""

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from loguru import logger
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

WORDS = ["a", "word", "5", "km", "degrees", "C", "it's", "so,", "end."]
PLAIN = st.lists(st.sampled_from([*WORDS, "-", "2", "*"]), min_size=1, max_size=4).map(" ".join)
MARKED = st.builds(
    lambda mark, words: f"{mark[0]}{' '.join(words)}{mark[1]}",
    st.sampled_from([("**", "**"), ("*", "*"), ("_", "_"), ("`", "`"), ("~~", "~~"), ("**", "**."),
                     ("[", "](https://a.example/b)"), ("[[", "]]"), ("***", "***")]),
    st.lists(st.sampled_from(["bold", "5", "km", "word,", "snake_case", "x"]), min_size=1,
             max_size=12),
)  # fmt: skip
UNENDED = st.sampled_from(["**not ended", "*", "a_b", "[see", "`tick"])
UNENDED_MARK = re.compile(r"\*\*not ended|(?<!\*)\*\s.*\*\*")  # also a single one before others
TEXTS = st.lists(PLAIN | MARKED | UNENDED, min_size=1, max_size=6).map(" ".join)
CUTS = st.lists(st.integers(0, 400), max_size=30)
# None begins with a mark that starts a list.
SENTENCES = st.lists(
    st.builds("{} {}. ".format, st.sampled_from(WORDS), PLAIN | MARKED), min_size=1, max_size=5
)
CODE = "x += 1234\n" * 76  # 760 characters


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
        """Lets the text pause until all speech has ended."""
        self.now_s += 5.0
        for last_word in (False, True):
            if group := await self.aggregator.release(last_word=last_word):
                await self.speak(group.text)

    async def end(self) -> None:
        """Ends the text."""
        if group := await self.aggregator.flush():
            await self.speak(group.text)

    async def speak(self, group: str) -> None:
        self.groups.append(group)
        text = self.service._trim_text(group)
        if text and (filter_text := getattr(self.service, "_filter_text", None)):  # Pipecat 1.13
            text = await filter_text(text)
        if text and (text := await self.service._transform_text(text, "sentence")):
            self.spoken.append(text.strip() + " " * group[-1].isspace())

    @property
    def text(self) -> str:
        """What the engine speaks, with single spaces, and none before marks."""
        return re.sub(r" ([.,])", r"\1", " ".join("".join(self.spoken).split()))


async def whole(engine: TTS, rewriting: str, text: str) -> str:
    """What the engine would speak if the text were one group."""
    turn = Turn(engine, **REWRITINGS[rewriting]())
    await turn.speak(text)
    return turn.text


@pytest.mark.parametrize("rewriting", REWRITINGS)
@settings(max_examples=30, deadline=None)
@given(TEXTS, CUTS)
@example("[[see " + "this " * 90 + "]] and that.", [])
@example(f"He **{ELEVEN}** said. More words follow.", [])
@example("About 5 km from here, or 30 degrees C now.", list(range(60)))
@example(f"**{ELEVEN}** ~~out~~ ~~out~~ * a", [len(f"**{ELEVEN}** ~~out~~ ~~out~~ ")])
@example(f"[see {ELEVEN}](https://a.example/b)", [len(f"[see {ELEVEN}]")])
def test_speech_is_that_of_the_whole_text(
    engine: TTS, rewriting: str, text: str, cuts: list[int]
) -> None:
    # The Markdown filter changes letters behind a mark without an end in what is passed to it.
    assume(not UNENDED_MARK.search(text) or "filter" not in rewriting)

    async def check() -> None:
        turn = Turn(engine, **REWRITINGS[rewriting]())
        await turn.write(*cut(text, cuts))
        await turn.end()
        assert turn.text == await whole(engine, rewriting, text), turn.groups
        assert "".join(turn.groups).rstrip() == text.rstrip()

    asyncio.run(check())


@pytest.mark.parametrize("rewriting", REWRITINGS)
@settings(max_examples=30, deadline=None)
@given(SENTENCES, CUTS, st.sets(st.integers(0, 5)))
def test_speech_with_pauses_between_sentences_is_that_of_the_whole_text(
    engine: TTS, rewriting: str, sentences: list[str], cuts: list[int], pauses: set[int]
) -> None:
    async def check() -> None:
        turn = Turn(engine, **REWRITINGS[rewriting]())
        for i, sentence in enumerate(sentences):
            await turn.write(*cut(sentence, cuts))
            if i in pauses:
                await turn.pause()
        await turn.end()
        assert turn.text == await whole(engine, rewriting, "".join(sentences)), turn.groups

    asyncio.run(check())


@pytest.mark.parametrize(
    ("rewriting", "parts", "spoken"),
    [
        ("units", ["It is about 5", " km from here."], "It is about 5 km from here."),
        ("units", ["It is about 5 ", "km from here."], "It is about 5 km from here."),
        ("units", ["It is about 5 k", "m from here."], "It is about 5 km from here."),
        ("markdown transform", ["It is **about", " 5** km."], "It is about 5 km."),
    ],
)
def test_a_pause_divides_what_a_transform_would_join_unless_markup_is_open(
    engine: TTS, rewriting: str, parts: list[str], spoken: str
) -> None:
    """Speech does not wait for what a language model may still write: the words are spoken."""
    turn = Turn(engine, **REWRITINGS[rewriting]())

    async def write() -> None:
        for part in parts:
            await turn.write(part)
            await turn.pause()

    asyncio.run(write())
    assert "".join(turn.spoken).replace(" ", "") == spoken.replace(" ", "")


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        (f"Run this:\n```python\n{CODE}```\nThen it works.", "Run this: Then it works."),
        (f"Run this: ~~~{CODE}~~~ Then it works.", "Run this: Then it works."),
        (f"So. <hidden>{CODE}</hidden> Then it works.", "So. Then it works."),
        (f"So. <hidden>{CODE} <b>and</b>", f"So. <hidden>{' '.join(CODE.split())} <b>and</b>"),
    ],
)
def test_a_block_of_any_length_is_not_divided(engine: TTS, text: str, spoken: str) -> None:
    async def remove_hidden(text: str, _: str) -> str:
        return re.sub(r"<hidden>[\s\S]*?</hidden>", "", text)

    transforms = [("*", strip_markdown), ("*", remove_hidden)]
    turn = Turn(engine, text_transforms=transforms)

    async def write() -> None:
        await turn.write(*re.findall(r"\S+\s*", text))
        await turn.end()

    asyncio.run(write())
    assert turn.text == spoken


class LockedFilter(BaseTextFilter):
    """A filter that cannot be copied."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def filter(self, text: str) -> str:
        with self._lock:
            return text.replace("*", "")


@pytest.mark.contract
def test_with_a_filter_that_cannot_be_copied_text_is_spoken_sentence_by_sentence(
    engine: TTS,
) -> None:
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    turn = Turn(engine, text_filters=[LockedFilter()])
    sentences = ["One two **three** four. ", "Five, six seven! ", "Eight nine ten eleven."]
    asyncio.run(turn.write(*"".join(sentences)))
    logger.remove(handler)
    assert turn.groups == sentences[:2]
    assert turn.text == "One two three four. Five, six seven!"
    (line,) = lines
    assert "LockedFilter cannot be copied" in line and "sentence by sentence" in line


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


@pytest.mark.parametrize(("text", "may_divide"), [("5 _km bold", False), ("So _km bold", True)])
def test_open_markup_behind_a_boundary_may_join_what_is_before_it(
    engine: TTS, text: str, may_divide: bool
) -> None:
    """With its end, `5 _km bold_` becomes `5 km bold`, and that `5 kilometres bold`."""
    service = MegakernelTTSService(engine=engine, **REWRITINGS["filter and transforms"]())
    rewriting = TextRewriting(service)
    assert asyncio.run(rewriting.may_divide(text, text.index("_"))) == may_divide


def test_without_rewriting_groups_do_not_wait_for_lookahead(engine: TTS) -> None:
    turn = Turn(engine)
    asyncio.run(turn.write(*"One two "))
    assert turn.groups == ["One two "]


@pytest.mark.contract
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


@pytest.mark.contract
def test_text_on_which_a_transform_fails_is_released(engine: TTS) -> None:
    """Pipecat reports the error of each group."""

    async def fail(text: str, _: str) -> str:
        raise LookupError(text)

    bot = Bot(engine, "One two three. " * 60, text_transforms=[("*", fail)])
    run_conversations([bot], Bot.reply)
    assert len(bot.errors) > 1 and "One two" in bot.errors[0].error


@pytest.mark.contract
def test_the_engine_speaks_and_the_conversation_keeps_the_text_as_written(engine: TTS) -> None:
    text = f"It is **{ELEVEN}** or 5 km from here."
    rewriting = REWRITINGS["filter and transforms"]
    bot = Bot(engine, text, tokenize=list, **rewriting())
    run_conversations([bot], Bot.reply)
    assert words_in_audio(bot.output.pcm) == list(range(len(text.split())))
    assert bot.said == [text] and not bot.errors
