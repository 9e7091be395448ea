"""Pauses of a language model, from the times at which the parts of its text arrive."""

from collections.abc import Callable

import pytest
from pipecat.frames.frames import AggregatedTextFrame

from megakernel_tts import TTS
from pipecat_service.pace import WritingPace
from tests.pipecat_service.bot import Bot, leading_spaces, run_conversations, spaced_words


class Writer:
    """A pace on a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pace = WritingPace(lambda: self.now_s)

    def write(self, *intervals_s: float, num_words: int = 1) -> None:
        for interval_s in intervals_s:
            self.now_s += interval_s
            self.pace.add(num_words)


@pytest.mark.parametrize(
    ("words_per_s", "pause_s"), [(3, 0.5), (4, 0.375), (5, 0.3), (7, 0.15), (30, 0.15)]
)
def test_a_pause_is_longer_than_the_intervals_of_the_text(
    words_per_s: float, pause_s: float
) -> None:
    writer = Writer()
    writer.write(*[1 / words_per_s] * 20)
    assert writer.pace.pause_s() == pytest.approx(pause_s, abs=1e-3)
    assert writer.pace.until_pause_s(clause_ended=False) == pytest.approx(pause_s, abs=1e-3)
    assert writer.pace.pause_s(clause_ended=True) == 0.15
    assert writer.pace.slow == (words_per_s < 12.5)
    assert writer.pace.words_per_s == pytest.approx(words_per_s)


def test_before_the_second_part_four_words_per_second_are_assumed() -> None:
    writer = Writer()
    writer.write(0)
    assert writer.pace.pause_s() == 0.375 and writer.pace.slow
    writer.write(0.25, 0.25)
    assert writer.pace.words_per_s == 4, "the second word was taken for one after a pause"


def test_a_stall_leaves_the_pace_as_it_was() -> None:
    writer = Writer()
    writer.write(*[1 / 30] * 5, 3.0)
    assert writer.pace.pause_s() == 0.15
    assert writer.pace.words_per_s == pytest.approx(30)
    writer.write(0.2, 0.2)
    assert writer.pace.pause_s() == pytest.approx(0.3)


def test_parts_that_arrive_in_bursts_pause_longer_than_between_bursts() -> None:
    writer = Writer()
    for _ in range(4):
        writer.write(0.3, *[0.0] * 9)
    assert writer.pace.pause_s() == pytest.approx(0.45)
    writer.write(*[0.01] * 250)
    assert writer.pace.pause_s() == 0.15, "the bursts are no longer recent"


def test_speech_without_audio_waits_less_for_more_text() -> None:
    writer = Writer()
    writer.write(*[1 / 30] * 5)
    assert writer.pace.pause_s(in_gap=True) == pytest.approx(0.1)
    writer.write(*[1 / 5] * 5)
    assert writer.pace.pause_s(in_gap=True) == pytest.approx(0.3), "it would divide steady text"


@pytest.mark.parametrize(
    ("words_per_s", "released_s"), [(3, 0.5), (5, 0.3), (7, 0.15), (10, 0.15), (30, 0.15)]
)
@pytest.mark.parametrize(("tokenize", "num_released"), [(spaced_words, 4), (leading_spaces, 3)])
def test_held_words_are_released_shortly_after_the_last_token(
    engine: TTS,
    words_per_s: int,
    released_s: float,
    tokenize: Callable[[str], list[str]],
    num_released: int,
) -> None:
    """The word at the end, which may go on unless a space follows, is released in time for speech.

    `test_pauses` tests that its speech is not late.
    """
    reply = ["Yes. One two three", 6.0, " four."]
    bot = Bot(engine, reply, word_interval_s=1 / words_per_s, tokenize=tokenize)
    run_conversations([bot], Bot.reply)
    stalled_s = bot.llm.times_s[3]
    groups = bot.timed_frames_of(AggregatedTextFrame)
    released = [frame.text for at, frame in groups if at <= stalled_s + released_s + 1e-3]
    assert len("".join(released).split()) >= num_released
    rest = [at for at, frame in groups if "three" in frame.text]
    assert len(rest) == 1 and rest[0] < stalled_s + 2.0
