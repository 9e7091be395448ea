from itertools import accumulate

import numpy as np
import pytest
from numpy.typing import NDArray

from megakernel_tts.align.estimate import EstimatedWordTimer, spoken_seconds
from megakernel_tts.align.words import Transcript, Word
from tests.align.texts import Spelling

RATE = 24_000


class Follower:
    """An estimate whose text and audio come by turns."""

    def __init__(self) -> None:
        self._spelling = Spelling()
        self._ids: list[int] = []
        self._times = EstimatedWordTimer(Transcript(self._spelling.spell), RATE)

    def write(self, text: str) -> None:
        self._ids += self._spelling.ids(*text)
        self._times.update_text(self._ids, len(self._ids))

    def hear(self, pcm: NDArray[np.int16]) -> list[Word]:
        return self._times.add_audio(pcm[None], last=False)

    def end(self) -> list[Word]:
        return self._times.add_audio(np.zeros((0, 1), np.int16), last=True)

    @property
    def left(self) -> int:
        return self._times.num_pending


def sound(seconds: float) -> NDArray[np.int16]:
    return np.full(round(seconds * RATE), 3000, np.int16)


def pause(seconds: float) -> NDArray[np.int16]:
    return np.zeros(round(seconds * RATE), np.int16)


def times(words: list[Word]) -> list[float]:
    return [word.start for word in words]


def test_words_at_the_ordinary_pace_are_timed_exactly() -> None:
    text = "One two three four five six seven."
    follower = Follower()
    follower.write(text)
    lengths = [spoken_seconds(word) for word in text.split()]
    found = follower.hear(sound(sum(lengths)))
    assert [w.text for w in found] == text.split()
    assert times(found) == pytest.approx([0, *accumulate(lengths)][:-1], abs=0.021)
    assert all(w.estimated for w in found) and follower.end() == []


@pytest.mark.parametrize("size", [100, 480, 1920, 7000])
def test_chunks_of_any_size_give_the_same(size: int) -> None:
    pcm = np.concatenate([sound(0.9), pause(0.4), sound(2.3), pause(0.1), sound(1.0)])
    whole, parts = Follower(), Follower()
    found: list[Word] = []
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
    follower = Follower()
    follower.write(" ".join(clauses))
    found: list[Word] = []
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
    by_word = {word.text: word.start for word in found}
    assert [w.text for w in found] == " ".join(clauses).split()
    for clause, begin, length in zip(clauses[1:], begins[1:], lengths, strict=False):
        early = max(0.0, length - length / pace) + 0.3 * (pace > 1)
        assert begin - early - 0.021 <= by_word[clause.split()[0]] <= begin + 0.021


def test_no_words_begin_in_silence() -> None:
    follower = Follower()
    follower.write("One two three")
    assert follower.hear(pause(3.0)) == []
    assert times(follower.hear(sound(0.1))) == [3.0]


def test_text_that_comes_late_is_timed_when_it_comes() -> None:
    follower = Follower()
    follower.write("One ")
    assert times(follower.hear(sound(1.0))) == [0.0]
    follower.write("two ")
    assert times(follower.hear(sound(0.5))) == [1.0]


def test_words_that_the_estimate_did_not_reach_come_at_the_end() -> None:
    follower = Follower()
    follower.write("One two three four")
    heard = follower.hear(sound(0.4))
    assert [w.text for w in heard] == ["One", "two"]
    assert [(w.text, w.start) for w in follower.end()] == [("three", 0.4), ("four", 0.4)]


def test_the_silence_before_speech_is_no_pause() -> None:
    """A short first clause is still to be said after it."""
    follower = Follower()
    follower.write("Hi, there.")
    found = follower.hear(np.concatenate([pause(1.0), sound(1.0)]))
    assert (found[0].text, found[0].start) == ("Hi,", 1.0)
    assert found[1].start > 1.1


def test_what_is_left_is_counted() -> None:
    follower = Follower()
    follower.write("One two three four")
    assert follower.left == 4
    heard = follower.hear(sound(0.4))
    assert follower.left == 4 - len(heard) > 0
    follower.end()
    assert follower.left == 0
