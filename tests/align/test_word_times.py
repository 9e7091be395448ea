from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts.align.intervals import interval_peaks
from megakernel_tts.align.word_times import AlignedWordTimer, with_ends
from megakernel_tts.align.words import Word
from tests.align.synthetic_attention import SAMPLE_RATE, SAMPLES_PER_FRAME, attending, loud_frames
from tests.align.texts import transcript

TOKENS = ["One", ",", " two", " thr", "ee", "."]
ATTENDED = [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 5, 5]
STARTS = [("One,", 0.0), ("two", 0.32), ("three.", 0.48)]


def follow(
    tokens: Sequence[str],
    attended: Sequence[int],
    ends: Sequence[int],
    audible: Sequence[bool] | None = None,
    lookahead: int = 0,
) -> list[tuple[str, float]]:
    """The words and starts of a segment whose chunks end at `ends`."""
    text = transcript(*tokens)
    timer = AlignedWordTimer(text, 3, 1e-4)
    scores = attending(attended, len(tokens))
    shown = np.pad(
        scores, ((0, 0), (0, 0), (3, 2)), constant_values=9.0
    )  # positions of the prompt and after the text
    peaks = interval_peaks(loud_frames(audible or [True] * len(attended)))
    words: list[Word] = []
    made = start = 0
    for stop in [*ends, len(attended)]:
        num_scored = min(stop + lookahead, len(attended))
        if num_scored > made:
            timer.add_scores(shown[made:num_scored])
        words += timer.add_audio(peaks[start:stop], last=stop == len(attended))
        assert timer.num_pending == len(text) - len(words)
        start, made = stop, max(made, num_scored)
    assert all(word.end is None and not word.estimated for word in words)
    return [(word.text, word.start) for word in words]


def test_word_begins_when_its_first_unit_is_attended() -> None:
    assert follow(TOKENS, ATTENDED, []) == STARTS


@given(st.sets(st.integers(1, len(ATTENDED) - 1)))
def test_chunks_do_not_change_words_if_attention_is_unambiguous(ends: set[int]) -> None:
    assert follow(TOKENS, ATTENDED, sorted(ends)) == STARTS
    assert follow(TOKENS, ATTENDED, sorted(ends), lookahead=3) == STARTS


def test_no_word_begins_in_silence() -> None:
    audible = [False, False, True, True, False, True] + [True] * 6
    found = follow(TOKENS, ATTENDED, [2, 6], audible)
    assert found == [("One,", 0.16), ("two", 0.4), ("three.", 0.48)]


def test_word_without_sound_begins_when_the_next_one_does() -> None:
    audible = [True] * 4 + [False, False] + [True] * 6
    assert follow(TOKENS, ATTENDED, [5], audible)[1] == ("two", 0.48)


def test_opening_quotation_mark_belongs_to_the_next_word() -> None:
    found = follow(['"', "Well", '",', " so"], [0, 0, 1, 1, 2, 3, 3], [])
    assert found == [('"Well",', 0.16), ("so", 0.4)]


def test_lookahead_corrects_a_single_misleading_frame() -> None:
    attended = [0, 0, 2, 0, 0, 0, 2, 2, 2]
    tokens = ["a", ",", " b"]
    assert follow(tokens, attended, [1, 2, 3]) == [("a,", 0.0), ("b", 0.16)]
    assert follow(tokens, attended, [1, 2, 3], lookahead=2) == [("a,", 0.0), ("b", 0.48)]


@given(
    st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=20),
    st.sets(st.integers(1, 19)),
    st.lists(st.booleans(), min_size=20, max_size=20),
    st.integers(0, 3),
)
def test_words_are_returned_once_in_order_and_with_their_audio(
    attended: list[int], ends: set[int], audible: list[bool], lookahead: int
) -> None:
    chunk_ends = sorted(cut for cut in ends if cut < len(attended))
    timer = AlignedWordTimer(transcript(*TOKENS), 0, 1e-4)
    scores = attending(attended, len(TOKENS))
    peaks = interval_peaks(loud_frames(audible[: len(attended)]))
    returned: list[Word] = []
    made = start = 0
    for stop in [*chunk_ends, len(attended)]:
        num_scored = min(stop + lookahead, len(attended))
        if num_scored > made:
            timer.add_scores(scores[made:num_scored])
        new = timer.add_audio(peaks[start:stop], last=stop == len(attended))
        first, last = (
            start * SAMPLES_PER_FRAME / SAMPLE_RATE,
            stop * SAMPLES_PER_FRAME / SAMPLE_RATE,
        )
        assert all(first - 1e-3 <= word.start <= last + 1e-3 for word in new)
        returned, start, made = returned + new, stop, max(made, num_scored)
    assert [word.text for word in returned] == ["One,", "two", "three."]
    assert [word.start for word in returned] == sorted(word.start for word in returned)


def test_word_does_not_begin_before_its_key_exists() -> None:
    timer = AlignedWordTimer(transcript("a", " b", " c"), 0, 1e-4)
    scores = attending([0, 0, 1, 1], 3)
    scores[:, :, 1:] = np.nan  # the second token's key exists from the fourth frame on
    scores[3, :, 1] = 6.0
    timer.add_scores(scores)
    found = timer.add_audio(interval_peaks(loud_frames([True] * 4)), last=False)
    assert [(word.text, word.start) for word in found] == [("a", 0.0), ("b", 0.24)]


def test_text_may_have_more_tokens_than_the_slot_has_positions() -> None:
    timer = AlignedWordTimer(transcript("a", " b", " c"), 0, 1e-4)
    timer.add_scores(attending([0, 1, 1], 2))
    assert len(timer.add_audio(interval_peaks(loud_frames([True] * 3)), last=False)) == 2


def test_word_is_returned_when_its_text_is_complete() -> None:
    text = transcript("One", ",", " two")
    text._num_complete = 0
    timer = AlignedWordTimer(text, 0, 1e-4)
    timer.add_scores(attending([0, 0, 2, 2], 3))
    assert timer.add_audio(interval_peaks(loud_frames([True] * 4)), last=False) == []
    assert timer.num_pending == 2
    text._num_complete = 2
    found = timer.add_audio(interval_peaks(loud_frames([])), last=False)
    assert [(word.text, word.start) for word in found] == [("One,", 0.0), ("two", 0.16)]


@pytest.mark.parametrize("tokens", [("a", " b"), ("a", " b", ".")])
def test_frames_since_end_count_from_the_last_audible_unit(tokens: tuple[str, ...]) -> None:
    timer, count = AlignedWordTimer(transcript(*tokens), 0, 1e-4), len(tokens)
    timer.add_scores(attending([0, 0], count))
    assert timer.frames_since_end(50) == 0
    timer.add_scores(attending([1, 1], count, first=False))
    timer.add_scores(attending([1] * 10, count, first=False))
    assert [timer.frames_since_end(frame) for frame in (3, 4, 14)] == [0, 0, 10]


def test_word_ends_at_the_last_sound_before_the_next_word() -> None:
    pcm = loud_frames([True, True, False, True, False, False]).ravel()
    words = [Word("a", 0.0, None, False), Word("b", 0.24, None, False)]
    assert [word.end for word in with_ends(words, pcm, SAMPLE_RATE)] == pytest.approx([0.16, 0.32])
    quiet = with_ends(
        [Word("a", 0.0, None, True)], np.zeros(2 * SAMPLES_PER_FRAME, np.int16), SAMPLE_RATE
    )
    assert [(word.end, word.estimated) for word in quiet] == [(0.16, True)]
