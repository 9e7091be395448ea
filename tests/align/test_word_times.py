from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts.align.word_times import AlignedWordTimer, with_ends
from megakernel_tts.align.words import Word
from tests.align.planted import FRAME, RATE, looking, sound
from tests.align.texts import transcript

TOKENS = ["One", ",", " two", " thr", "ee", "."]
LOOKED = [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 5, 5]
STARTS = [("One,", 0.0), ("two", 0.32), ("three.", 0.48)]


def follow(
    tokens: Sequence[str],
    looked: Sequence[int],
    cuts: Sequence[int],
    audible: Sequence[bool] | None = None,
    lookahead: int = 0,
) -> list[tuple[str, float]]:
    """The words of a piece whose frames leave in chunks that end at `cuts`."""
    text = transcript(*tokens)
    times = AlignedWordTimer(text, RATE, 3, 1e-4)
    scores = looking(looked, len(tokens))
    shown = np.pad(scores, ((0, 0), (0, 0), (3, 2)), constant_values=9.0)  # other positions
    samples = sound(audible or [True] * len(looked))
    words: list[Word] = []
    made = start = 0
    for stop in [*cuts, len(looked)]:
        known = min(stop + lookahead, len(looked))
        if known > made:
            times.add_scores(shown[made:known])
        words += times.add_audio(samples[start:stop], last=stop == len(looked))
        assert times.num_pending == len(text) - len(words)
        start, made = stop, max(made, known)
    assert all(word.end is None and not word.estimated for word in words)
    return [(word.text, word.start) for word in words]


def test_words_begin_where_the_heads_look_at_their_first_sound() -> None:
    assert follow(TOKENS, LOOKED, []) == STARTS


@given(st.sets(st.integers(1, len(LOOKED) - 1)))
def test_chunks_change_nothing_if_the_heads_are_sure(cuts: set[int]) -> None:
    assert follow(TOKENS, LOOKED, sorted(cuts)) == STARTS
    assert follow(TOKENS, LOOKED, sorted(cuts), lookahead=3) == STARTS


def test_no_word_begins_in_silence() -> None:
    audible = [False, False, True, True, False, True] + [True] * 6
    found = follow(TOKENS, LOOKED, [2, 6], audible)
    assert found == [("One,", 0.16), ("two", 0.4), ("three.", 0.48)]


def test_a_word_that_was_never_heard_has_begun_when_the_next_one_does() -> None:
    audible = [True] * 4 + [False, False] + [True] * 6
    assert follow(TOKENS, LOOKED, [5], audible)[1] == ("two", 0.48)


def test_a_quotation_mark_belongs_to_the_word_after_it() -> None:
    found = follow(['"', "Well", '",', " so"], [0, 0, 1, 1, 2, 3, 3], [])
    assert found == [('"Well",', 0.16), ("so", 0.4)]


def test_a_longer_view_corrects_a_glance() -> None:
    """One frame looks astray; only what comes later tells."""
    looked = [0, 0, 2, 0, 0, 0, 2, 2, 2]
    tokens = ["a", ",", " b"]
    assert follow(tokens, looked, [1, 2, 3]) == [("a,", 0.0), ("b", 0.16)]
    assert follow(tokens, looked, [1, 2, 3], lookahead=2) == [("a,", 0.0), ("b", 0.48)]


@given(
    st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=20),
    st.sets(st.integers(1, 19)),
    st.lists(st.booleans(), min_size=20, max_size=20),
    st.integers(0, 3),
)
def test_every_word_comes_once_in_order_and_no_later_than_its_audio(
    looked: list[int], cuts: set[int], audible: list[bool], lookahead: int
) -> None:
    ends = sorted(cut for cut in cuts if cut < len(looked))
    times = AlignedWordTimer(transcript(*TOKENS), RATE, 0, 1e-4)
    scores, samples = looking(looked, len(TOKENS)), sound(audible[: len(looked)])
    told: list[Word] = []
    made = start = 0
    for stop in [*ends, len(looked)]:
        known = min(stop + lookahead, len(looked))
        if known > made:
            times.add_scores(scores[made:known])
        new = times.add_audio(samples[start:stop], last=stop == len(looked))
        first, last = start * FRAME / RATE, stop * FRAME / RATE
        assert all(first - 1e-3 <= word.start <= last + 1e-3 for word in new)
        told, start, made = told + new, stop, max(made, known)
    assert [word.text for word in told] == ["One,", "two", "three."]
    assert [word.start for word in told] == sorted(word.start for word in told)


def test_text_whose_keys_are_not_there_yet_is_not_spoken_yet() -> None:
    times = AlignedWordTimer(transcript("a", " b", " c"), RATE, 0, 1e-4)
    scores = looking([0, 0, 1, 1], 3)
    scores[:, :, 1:] = np.nan  # the second token's key comes with the fourth frame
    scores[3, :, 1] = 6.0
    times.add_scores(scores)
    found = times.add_audio(sound([True] * 4), last=False)
    assert [(word.text, word.start) for word in found] == [("a", 0.0), ("b", 0.24)]


def test_more_text_than_a_slot_has_positions_is_no_error() -> None:
    times = AlignedWordTimer(transcript("a", " b", " c"), RATE, 0, 1e-4)
    times.add_scores(looking([0, 1, 1], 2))
    assert len(times.add_audio(sound([True] * 3), last=False)) == 2


def test_a_word_waits_for_its_text_to_be_complete() -> None:
    text = transcript("One", ",", " two")
    text._num_complete = 0
    times = AlignedWordTimer(text, RATE, 0, 1e-4)
    times.add_scores(looking([0, 0, 2, 2], 3))
    assert times.add_audio(sound([True] * 4), last=False) == []
    assert times.num_pending == 2
    text._num_complete = 2
    found = times.add_audio(sound([]), last=False)
    assert [(word.text, word.start) for word in found] == [("One,", 0.0), ("two", 0.16)]


@pytest.mark.parametrize("tokens", [("a", " b"), ("a", " b", ".")])
def test_idle_counts_from_when_the_end_of_the_text_was_reached(tokens: tuple[str, ...]) -> None:
    """That is its last sound: nobody need look at a full stop."""
    times, count = AlignedWordTimer(transcript(*tokens), RATE, 0, 1e-4), len(tokens)
    times.add_scores(looking([0, 0], count))
    assert times.frames_since_end(50) == 0
    times.add_scores(looking([1, 1], count, first=False))
    times.add_scores(looking([1] * 10, count, first=False))
    assert [times.frames_since_end(frame) for frame in (3, 4, 14)] == [0, 0, 10]


def test_ends_are_where_the_last_sound_before_the_next_word_is() -> None:
    pcm = sound([True, True, False, True, False, False]).ravel()
    words = [Word("a", 0.0, None, False), Word("b", 0.24, None, False)]
    assert [word.end for word in with_ends(words, pcm, RATE)] == pytest.approx([0.16, 0.32])
    quiet = with_ends([Word("a", 0.0, None, True)], np.zeros(2 * FRAME, np.int16), RATE)
    assert [(word.end, word.estimated) for word in quiet] == [(0.16, True)]
