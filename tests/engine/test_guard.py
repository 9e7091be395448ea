import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts import TTS
from megakernel_tts.engine.guard import Guard
from megakernel_tts.text.pace import ordinary_frames

# Texts, and the seconds that careful, slow speakers take for them:
# 0.7 s a letter spelled out, 0.8 s a digit, 2.5 syllables a second, a breath at every mark.
SLOW = {
    "Hello.": 1.5,
    "Yes, I can help you with that. What is your order number?": 9.0,
    "Your code is 4 8 1 5 1 6 2 3 4 2.": 11.0,
    "It is spelled A B C D E F G H I J K L M N O P Q R S T U V W X Y Z.": 21.0,
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ": 18.5,
    "a, b, c, d, e, f, g": 8.0,
    "j d o e at m a i l": 7.0,
    "IBAN DE89370400440532013000": 22.0,
    "1234567890123456": 13.0,
    "$1,234,567.89": 10.0,
    "今天天气真好，我们去公园散步吧。": 7.5,
    "これはテストです。": 4.5,
    "안녕하세요, 무엇을 도와드릴까요?": 6.5,
    "Der Zug nach Berlin fährt um 14:35 Uhr von Gleis 7 ab.": 9.0,
    "Donaudampfschifffahrtsgesellschaft": 4.5,
    "Сколько это стоит?": 3.0,
    "!?": 1.0,
}
TEXTS = list(SLOW)


def peak(pcm: np.ndarray) -> int:
    """The largest magnitude of 16-bit samples."""
    return int(np.abs(pcm.astype(np.int32)).max())


def find_end(
    codes: Sequence[int],
    peaks: Sequence[int],
    expected: float,
    *,
    used_up_at: int | None = 0,
    frames_since_end: Callable[[int], int] = lambda frame: 0,
    chunks: Iterable[int] = itertools.repeat(1),
) -> int | None:
    """The frame at which the guard ends the speech, which comes in chunks of so many frames."""
    guard, first = Guard(), 0
    for count in chunks:
        found = guard.find_end(
            np.array(codes[first : first + count], np.int64),
            np.array(peaks[first : first + count], np.uint16),
            expected,
            used_up_at=used_up_at,
            frames_since_end=frames_since_end,
        )
        if found is not None:
            return first + found - 1
        first += count
        if first >= len(codes):
            break
    return None


def run(text: str, codes: list[int], loud: list[bool], *, used_up_at: int = 0) -> int | None:
    """The frame at which the guard ends the speech."""
    peaks = [2990 if sounds else 19 for sounds in loud]
    return find_end(codes, peaks, ordinary_frames(text), used_up_at=used_up_at)


def noise(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2048), k=count)


@pytest.mark.parametrize(("text", "seconds"), SLOW.items(), ids=str)
@pytest.mark.parametrize("pause", [0.0, 1.0, 3.0], ids=lambda p: f"pauses of {p} s")
def test_slow_speech_is_not_cut(text: str, seconds: float, pause: float) -> None:
    """Pauses and voiced stretches alternate, then 3 s of room tone precede the end."""
    rng = random.Random(1)
    loud: list[bool] = []
    while sum(loud) < seconds * 12.5:
        loud += [False] * rng.randint(0, int(pause * 12.5)) + [True] * rng.randint(5, 30)
    loud += [False] * 37
    assert run(text, noise(len(loud)), loud) is None


@pytest.mark.parametrize("text", TEXTS)
def test_endless_speech_is_cut_far_beyond_its_length(text: str) -> None:
    cut = run(text, noise(5000), [True] * 5000)
    assert cut is not None
    assert 4 * ordinary_frames(text) <= cut <= 4 * ordinary_frames(text) + 60


def test_silence_after_the_text_is_cut_after_four_seconds() -> None:
    text = TEXTS[1]
    said = int(2.1 * ordinary_frames(text))
    cut = run(text, noise(900), [True] * said + [False] * (900 - said))
    assert cut == said + 49


@pytest.mark.parametrize("period", [1, 3, 12])
def test_loops_after_the_text_are_cut(period: int) -> None:
    text = TEXTS[1]
    said = int(2.1 * ordinary_frames(text))
    loop = list(itertools.islice(itertools.cycle(range(period)), 900 - said))
    cut = run(text, noise(said) + loop, [True] * 900)
    assert cut is not None
    assert cut <= said + period + 40


def test_speech_is_not_cut_before_the_text_is_used_up() -> None:
    """A live text may pause for any time, with loops and silence in it."""
    assert run("Hi.", [5] * 2000, [False] * 2000, used_up_at=10_000) is None


def test_a_long_silence_within_the_ordinary_length_is_not_cut() -> None:
    """With the whole text in the prompt, the talker may pause long before its end."""
    text = "A sentence of some words. " * 8
    said = int(ordinary_frames(text))
    loud = [True] * 30 + [False] * 80 + [True] * (said - 110)
    assert run(text, noise(30) + [7] * 80 + noise(said - 110), loud) is None


@given(st.text(max_size=30), st.text(max_size=30))
def test_ordinary_lengths_of_parts_add_up(one: str, other: str) -> None:
    parts = ordinary_frames(one) + ordinary_frames(other, one[-1:])
    assert parts == pytest.approx(ordinary_frames(one + other))


def test_silence_and_loops_count_from_the_end_of_the_text() -> None:
    text = TEXTS[1]
    said = int(2.1 * ordinary_frames(text))
    for codes, loud in ((noise(900), [False] * 900), ([7] * 900, [True] * 900)):
        cut = run(text, codes, loud, used_up_at=said)
        assert cut is not None
        assert said + 39 <= cut <= said + 50


def test_digits_and_symbols_take_longer_than_letters() -> None:
    assert ordinary_frames("1234") > ordinary_frames("abcd") > ordinary_frames("    ")
    assert ordinary_frames("ABCD") > ordinary_frames("a b c d") > ordinary_frames("abcd")
    assert ordinary_frames("你好") > ordinary_frames("ab")
    assert ordinary_frames("😀") > ordinary_frames("a")


SENTENCES = [
    "Your appointment is on Tuesday, the 14th of May, at 3:45 p.m.",
    "Thank you for calling. Please hold the line.",
]


def test_speech_of_the_demo_voice_is_not_cut() -> None:
    """Real speech as it is, and three times as slow: each frame repeated twice."""
    with TTS.load("demo", device="cpu", slots=1) as tts:
        for seed, text in enumerate(SENTENCES):
            speech = tts.say(text, sampling=replace(tts.sampling, seed=seed))
            assert speech.finish == "eos"
            frames = np.split(speech.pcm, len(speech.codes))
            codes = np.repeat(speech.codes[:, 0], 3).tolist()
            peaks = np.repeat([peak(pcm) for pcm in frames], 3).tolist()
            assert find_end(codes, peaks, ordinary_frames(text)) is None


@pytest.mark.parametrize(("idle", "cut"), [(True, True), (False, False)])
def test_overdue_speech_behind_its_last_word_is_cut(idle: bool, cut: bool) -> None:
    """It is loud and repeats nothing; only the attention is at the end of the text."""
    text = "Hello there, how are you today?"
    expected = ordinary_frames(text)
    most = int(3.5 * expected)
    found = find_end(
        noise(most),
        [3000] * most,
        expected,
        frames_since_end=lambda frame: frame if idle else 0,
    )
    assert found == (max(50, int(2 * expected)) if cut else None)


def test_speech_behind_its_last_word_is_not_cut_before_it_is_overdue() -> None:
    codes = noise(200)
    assert find_end(codes, [3000] * 200, 100.0, frames_since_end=lambda frame: 999) is None
    codes = noise(202)
    assert find_end(codes, [3000] * 202, 100.0, frames_since_end=lambda frame: 999) == 200


@pytest.mark.parametrize("period", [1, 12])
def test_a_loop_of_the_limit_is_found_in_the_frame_that_is_overdue(period: int) -> None:
    codes = [2048 + code for code in noise(30)] + [i % period for i in range(period + 40)]
    expected = (len(codes) - 1) / 2
    assert find_end(codes, [3000] * len(codes), expected) == len(codes) - 1


def expected_end(
    codes: list[int], peaks: list[int], expected: float, used_up_at: int | None, idle_from: int
) -> int | None:
    """The frame of the end by the rules, without state."""
    for frame in range(len(codes)):
        if used_up_at is None or frame < used_up_at or frame + 1 <= 2 * expected:
            continue
        said, loud = codes[used_up_at : frame + 1], [level >= 66 for level in peaks[: frame + 1]]
        is_quiet = len(said) >= 50 and not any(loud[-50:])
        loops = any(
            len(said) >= 40 + period and said[-40:] == said[-40 - period : -period]
            for period in range(1, 13)
        )
        counted = sum(1.0 if sounds else 0.5 for sounds in loud)
        if is_quiet or loops or frame - idle_from >= 50 or counted >= 60 + 4 * expected:
            return frame
    return None


@given(st.data())
def test_speech_ends_by_the_rules_with_chunks_of_any_size(data: st.DataObject) -> None:
    """Codes that repeat, and quiet stretches."""
    draw, stretch = data.draw, st.integers(1, 60)
    loops = draw(st.lists(st.tuples(st.integers(1, 13), stretch, st.booleans()), min_size=3))
    codes = [i % period for period, count, _ in loops for i in range(count)]
    peaks = [3000 if sounds else 20 for _, count, sounds in loops for _ in range(count)]
    used_up_at = draw(st.none() | st.integers(0, 80))
    expected = draw(st.floats(0, 60))
    chunks = draw(st.lists(st.integers(1, 9), min_size=len(codes), max_size=len(codes)))
    idle_from = draw(st.integers(0, 200))

    def end(chunks: Iterable[int]) -> int | None:
        return find_end(
            codes,
            peaks,
            expected,
            used_up_at=used_up_at,
            frames_since_end=lambda frame: max(0, frame - idle_from),
            chunks=chunks,
        )

    assert end(chunks) == expected_end(codes, peaks, expected, used_up_at, idle_from)
