from itertools import accumulate

import numpy as np
import pytest
from numpy.typing import NDArray

from pipecat_service.timing import WordTime, WordTimes, spoken_seconds

RATE = 24_000


def sound(seconds: float) -> NDArray[np.int16]:
    return np.full(round(seconds * RATE), 3000, np.int16)


def pause(seconds: float) -> NDArray[np.int16]:
    return np.zeros(round(seconds * RATE), np.int16)


def times(words: list[WordTime]) -> list[float]:
    return [word.seconds for word in words]


def test_words_at_the_ordinary_pace_are_timed_exactly() -> None:
    text = "One two three four five six seven."
    follower = WordTimes(RATE)
    follower.write(text)
    lengths = [spoken_seconds(word) for word in text.split()]
    found = follower.hear(sound(sum(lengths)))
    assert [w.text for w in found] == text.split()
    assert times(found) == pytest.approx([0, *accumulate(lengths)][:-1], abs=0.021)
    assert all(w.estimated for w in found) and follower.end() == []


@pytest.mark.parametrize("size", [100, 480, 1920, 7000])
def test_chunks_of_any_size_give_the_same(size: int) -> None:
    pcm = np.concatenate([sound(0.9), pause(0.4), sound(2.3), pause(0.1), sound(1.0)])
    whole, parts = WordTimes(RATE), WordTimes(RATE)
    found: list[WordTime] = []
    for follower in (whole, parts):
        follower.write("One two three. Four five six, seven eight nine ten.")
    for start in range(0, len(pcm), size):
        found += parts.hear(pcm[start : start + size])
    assert found == whole.hear(pcm)


@pytest.mark.parametrize("pace", [0.75, 1.3])
def test_a_pause_sets_the_estimate_right(pace: float) -> None:
    """A speaker who is faster or slower than ordinary: at each clause the error starts anew.

    A slow speaker's words come too early by what the clause is too long, which cannot be undone.
    """
    clauses = ["One two three four five.", "Six seven eight nine ten.", "Eleven twelve thirteen."]
    follower = WordTimes(RATE)
    follower.write(" ".join(clauses))
    found: list[WordTime] = []
    begins: list[float] = []
    lengths: list[float] = []
    now = 0.0
    for clause in clauses:
        length = pace * sum(spoken_seconds(word) for word in clause.split())
        begins.append(now)
        lengths.append(length)
        found += follower.hear(np.concatenate([sound(length), pause(0.3)]))
        now += length + 0.3
    found += follower.end()
    by_word = {word.text: word.seconds for word in found}
    assert [w.text for w in found] == " ".join(clauses).split()
    for clause, begin, length in zip(clauses[1:], begins[1:], lengths, strict=False):
        early = max(0.0, length - length / pace) + 0.3 * (pace > 1)
        assert begin - early - 0.021 <= by_word[clause.split()[0]] <= begin + 0.021


def test_no_words_begin_in_silence() -> None:
    follower = WordTimes(RATE)
    follower.write("One two three")
    assert follower.hear(pause(3.0)) == []
    assert times(follower.hear(sound(0.1))) == [3.0]


def test_text_that_comes_late_is_timed_when_it_comes() -> None:
    follower = WordTimes(RATE)
    follower.write("One ")
    assert times(follower.hear(sound(1.0))) == [0.0]
    follower.write("two ")
    assert times(follower.hear(sound(0.5))) == [1.0]


def test_words_that_the_estimate_did_not_reach_come_at_the_end() -> None:
    follower = WordTimes(RATE)
    follower.write("One two three four")
    heard = follower.hear(sound(0.4))
    assert [w.text for w in heard] == ["One", "two"]
    assert [(w.text, w.seconds) for w in follower.end()] == [("three", 0.4), ("four", 0.4)]
