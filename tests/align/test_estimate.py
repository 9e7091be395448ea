from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megakernel_tts.align.estimate import EstimatedWordTimer, spoken_seconds
from megakernel_tts.align.words import Transcript, Word
from tests.align.texts import GrowingVocabulary

SAMPLE_RATE = 24_000
INTERVAL_SAMPLES = 480


class EstimatedSpeech:
    """An estimated word timer to which a test adds text and audio."""

    def __init__(self) -> None:
        self._vocabulary = GrowingVocabulary()
        self._ids: list[int] = []
        self._times = EstimatedWordTimer(Transcript(self._vocabulary.token_bytes))
        self._samples = np.zeros(0, np.int16)  # of an incomplete interval

    def write(self, text: str, *, queue_all: bool = False) -> None:
        self._ids += self._vocabulary.ids(*text)
        self._times.update_text(self._ids, len(self._ids))
        if queue_all:
            self._times._queue_words()

    def speak(self, pcm: NDArray[np.int16]) -> list[Word]:
        pcm = np.concatenate([self._samples, pcm])
        num_samples = len(pcm) // INTERVAL_SAMPLES * INTERVAL_SAMPLES
        intervals, self._samples = np.split(pcm, [num_samples])
        peaks = np.abs(intervals.reshape(-1, INTERVAL_SAMPLES)).max(axis=1, keepdims=True)
        return self._times.add_audio(peaks.astype(np.uint16), last=False)

    def end(self) -> list[Word]:
        return self._times.add_audio(np.zeros((0, 1), np.uint16), last=True)

    @property
    def num_pending(self) -> int:
        return self._times.num_pending


def sound(seconds: float) -> NDArray[np.int16]:
    return np.full(round(seconds * SAMPLE_RATE), 3000, np.int16)


def pause(seconds: float) -> NDArray[np.int16]:
    return np.zeros(round(seconds * SAMPLE_RATE), np.int16)


def times(words: list[Word]) -> list[float]:
    return [word.start for word in words]


@pytest.mark.parametrize(
    "text",
    [
        "One two three four five six seven.",
        "A word of " + 40 * "a" + " letters, longer than what is kept of earlier texts.",
    ],
    ids=["short words", "a long word"],
)
def test_words_at_the_ordinary_pace_are_exact(text: str) -> None:
    speaker = EstimatedSpeech()
    speaker.write(text)
    lengths = [spoken_seconds(word) for word in text.split()]
    found = speaker.speak(sound(sum(lengths)))
    assert [w.text for w in found] == text.split()
    assert times(found) == pytest.approx([0, *accumulate(lengths)][:-1], abs=0.021)
    assert all(w.estimated for w in found) and speaker.end() == []


@pytest.mark.parametrize("size", [100, 480, 1920, 7000])
def test_chunk_size_does_not_change_words(size: int) -> None:
    pcm = np.concatenate([sound(0.9), pause(0.4), sound(2.3), pause(0.1), sound(1.0)])
    whole, parts = EstimatedSpeech(), EstimatedSpeech()
    found: list[Word] = []
    for speaker in (whole, parts):
        speaker.write("One two three. Four five six, seven eight nine ten.")
    for start in range(0, len(pcm), size):
        found += parts.speak(pcm[start : start + size])
    assert found == whole.speak(pcm)


@pytest.mark.parametrize("pace", [0.75, 1.3])
def test_pause_corrects_the_estimate(pace: float) -> None:
    """The error of faster or slower speech starts from zero at each clause.

    Words of slow speech are early by the excess length of the clause, which cannot be corrected.
    """
    clauses = ["One two three four five.", "Six seven eight nine ten.", "Eleven twelve thirteen."]
    speaker = EstimatedSpeech()
    speaker.write(" ".join(clauses))
    found: list[Word] = []
    starts: list[float] = []
    lengths: list[float] = []
    now = 0.0
    for clause in clauses:
        length = pace * sum(spoken_seconds(word) for word in clause.split())
        starts.append(now)
        lengths.append(length)
        found += speaker.speak(np.concatenate([sound(length), pause(0.3)]))
        now += length + 0.3
    found += speaker.end()
    by_word = {word.text: word.start for word in found}
    assert [w.text for w in found] == " ".join(clauses).split()
    for clause, start, length in zip(clauses[1:], starts[1:], lengths, strict=False):
        early = max(0.0, length - length / pace) + 0.3 * (pace > 1)
        assert start - early - 0.021 <= by_word[clause.split()[0]] <= start + 0.021


def test_no_word_begins_in_silence() -> None:
    speaker = EstimatedSpeech()
    speaker.write("One two three")
    assert speaker.speak(pause(3.0)) == []
    assert times(speaker.speak(sound(0.1))) == [3.0]


def test_late_text_is_timed_from_its_arrival() -> None:
    speaker = EstimatedSpeech()
    speaker.write("One ")
    assert times(speaker.speak(sound(1.0))) == [0.0]
    speaker.write("two ")
    assert times(speaker.speak(sound(0.5))) == [1.0]


def test_remaining_words_begin_at_the_end() -> None:
    speaker = EstimatedSpeech()
    speaker.write("One two three four")
    spoken = speaker.speak(sound(0.4))
    assert [w.text for w in spoken] == ["One", "two"]
    assert [(w.text, w.start) for w in speaker.end()] == [("three", 0.4), ("four", 0.4)]


def test_silence_before_speech_is_not_a_pause() -> None:
    """The short first clause begins after the silence, so the next clause must begin later."""
    speaker = EstimatedSpeech()
    speaker.write("Hi, there.")
    found = speaker.speak(np.concatenate([pause(1.0), sound(1.0)]))
    assert (found[0].text, found[0].start) == ("Hi,", 1.0)
    assert found[1].start > 1.1


def test_num_pending_counts_words_that_were_not_returned() -> None:
    speaker = EstimatedSpeech()
    speaker.write("One two three four")
    assert speaker.num_pending == 4
    spoken = speaker.speak(sound(0.4))
    assert speaker.num_pending == 4 - len(spoken) > 0
    speaker.end()
    assert speaker.num_pending == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "One, two. ", "three ", "1234567890 ", "a b; c: d! ", "e - f, "]),
            st.sampled_from([0.0, 0.04, 0.3, 0.7, 2.0]),
            st.sampled_from([0.0, 0.1, 0.2, 1.0]),
        ),
        max_size=12,
    )
)
def test_words_that_are_queued_when_needed_have_the_times_of_all_words_at_once(
    portions: list[tuple[str, float, float]],
) -> None:
    """Portions of text, each followed by sound and a pause of these lengths in seconds.

    None begins with punctuation, which a word that is queued later takes along.
    """
    found: list[list[tuple[float, int]]] = []
    for queue_all in (False, True):
        speaker, words = EstimatedSpeech(), list[tuple[float, int]]()
        for text, sound_s, pause_s in portions:
            speaker.write(text, queue_all=queue_all)
            for samples in (sound(sound_s), pause(pause_s)):
                words += [(word.start, speaker.num_pending) for word in speaker.speak(samples)]
        words += [(word.start, speaker.num_pending) for word in speaker.end()]
        found.append(words)
    assert found[0] == found[1]
