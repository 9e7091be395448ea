import itertools
import random

import numpy as np
import pytest

from megakernel_tts.guard import Guard, ordinary_frames

TEXTS = [
    "Hello.",
    "Yes, I can help you with that. What is your order number?",
    "Your code is 4 8 1 5 1 6 2 3 4 2.",
    "今天天气真好，我们去公园散步吧。",
    "これはテストです。",
    "Der Zug nach Berlin fährt um 14:35 Uhr von Gleis 7 ab.",
    "!?",
]
FRAME = 1920


def run(text: str, codes: list[int], loud: list[bool], *, used_up_at: int = 0) -> int | None:
    """The frame at which the guard ends the speech."""
    guard, expected = Guard(), ordinary_frames(text)
    rng = np.random.RandomState(0)
    for i, (code, sounds) in enumerate(zip(codes, loud, strict=True)):
        level = 3000 if sounds else 20
        pcm = rng.randint(-level, level, FRAME).astype(np.int16)
        if guard.runaway(code, pcm, expected, used_up=i >= used_up_at):
            return i
    return None


def noise(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2048), k=count)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pace", [0.6, 1.0, 2.0, 3.5], ids=lambda p: f"{p} x ordinary length")
def test_healthy_speech_is_never_cut(text: str, pace: float) -> None:
    """Up to 3.5 times slower than ordinary, with pauses of 3 s between phrases and at the end."""
    frames = int(ordinary_frames(text) * pace) + 48
    rng = random.Random(1)
    loud: list[bool] = []
    while len(loud) < frames - 43:
        loud += [True] * rng.randint(5, 30) + [False] * rng.randint(1, 38)
    loud = loud[: frames - 43] + [True] * 5 + [False] * 38
    assert run(text, noise(frames), loud) is None


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


def test_nothing_is_cut_while_text_is_left() -> None:
    """A live text may pause for any time; loops and silence within it are no runaway."""
    assert run("Hi.", [5] * 2000, [False] * 2000, used_up_at=10_000) is None


def test_digits_and_symbols_take_longer_than_letters() -> None:
    assert ordinary_frames("1234") > ordinary_frames("abcd") > ordinary_frames("    ")
    assert ordinary_frames("你好") > ordinary_frames("ab")
    assert ordinary_frames("😀") > ordinary_frames("a")
