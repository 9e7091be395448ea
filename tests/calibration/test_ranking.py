import numpy as np

from megakernel_tts.calibration.ranking import (
    CapturedSpeech,
    choose,
    choose_lookahead,
    error,
    lateness,
    monotonicity,
    rank,
)
from tests.align.planted import SAMPLE_RATE, SAMPLES_PER_FRAME, attending, loud_frames
from tests.align.texts import transcript

TOKENS = ["One", ",", " two", " three", " four", " five", "."]
TRUE = [0] * 5 + [1] * 2 + [2] * 4 + [3] * 6 + [4] * 3 + [5] * 5 + [6] * 2
STARTS = [TRUE.index(token) * SAMPLES_PER_FRAME / SAMPLE_RATE for token in (0, 2, 3, 4, 5)]
GOOD, NOISY, STUCK, WANDERING, LATE = ((0, head) for head in range(5))
HEADS = [STUCK, LATE, WANDERING, NOISY, GOOD]


def overheard(seed: int, *, told: bool) -> CapturedSpeech:
    rng = np.random.default_rng(seed)
    n = len(TOKENS)
    noisy = np.where(rng.random(len(TRUE)) < 0.25, rng.integers(0, n, len(TRUE)), TRUE)
    late = [0] * 6 + TRUE[:-6]
    wandering = rng.integers(0, n, len(TRUE))
    ways = [TRUE, noisy.tolist(), [0] * len(TRUE), wandering.tolist(), late]
    scores = np.concatenate([attending(way, n) for way in ways], axis=1)[:, None]
    samples = loud_frames([True] * len(TRUE))
    return CapturedSpeech(
        scores, samples, SAMPLE_RATE, lambda: transcript(*TOKENS), STARTS if told else None
    )


def layouts(*, told: bool) -> list[list[CapturedSpeech]]:
    return [[overheard(seed, told=told) for seed in seeds] for seeds in ((0, 1), (2, 3))]


def test_a_head_that_follows_the_text_is_monotone_and_the_others_are_less() -> None:
    speech = overheard(0, told=False)
    found = [monotonicity(speech, head) for head in (GOOD, NOISY, WANDERING)]
    assert found == sorted(found, reverse=True)
    assert abs(found[0] - np.log(len(TOKENS))) < 0.1, "all of the attention is on the path"
    assert monotonicity(speech, STUCK) < found[0] / 2


def test_without_a_truth_monotone_heads_are_ranked_first_and_those_that_agree_are_taken() -> None:
    both = layouts(told=False)
    ranked = rank(both, HEADS)
    assert ranked[0].head == GOOD and all(r.error is None for r in ranked)
    assert GOOD in choose(both, ranked)
    assert not {STUCK, WANDERING, LATE} & set(choose(both, ranked))


def test_with_a_truth_heads_are_ranked_by_their_errors() -> None:
    """One that is late is as monotone as any."""
    both = layouts(told=True)
    ranked = rank(both, HEADS)
    assert ranked[0].head == GOOD and ranked[0].error is not None and ranked[0].error < 1e-3
    late = next(r for r in ranked if r.head == LATE)
    assert late.error is not None and 0.2 < late.error < 0.6
    assert choose(both, ranked) == [GOOD], "nothing is gained by another"


def test_heads_that_are_each_unsure_are_taken_together() -> None:
    """Two noisy heads, noisy at different frames."""
    speeches = [overheard(seed, told=True) for seed in range(8)]
    rng = np.random.default_rng(9)
    pairs: list[CapturedSpeech] = []
    for speech in speeches:
        n = len(TOKENS)
        ways = [
            np.where(rng.random(len(TRUE)) < 0.45, rng.integers(0, n, len(TRUE)), TRUE).tolist()
            for _ in range(3)
        ]
        scores = np.concatenate([attending(way, n) for way in ways], axis=1)[:, None]
        pairs.append(CapturedSpeech(scores, speech.samples, SAMPLE_RATE, speech.transcript, STARTS))
    ranked = rank([pairs], [(0, 0), (0, 1), (0, 2)])
    chosen = choose([pairs], ranked)
    assert len(chosen) > 1
    assert ranked[0].error is not None and error(pairs, chosen) < ranked[0].error


def test_the_look_ahead_costs_less_the_longer_it_is() -> None:
    speeches = [overheard(seed, told=False) for seed in range(6)]
    late = lateness(speeches, [NOISY])
    assert late[0] > late[-1] >= 0
    assert lateness(speeches, [GOOD]) == [0.0] * 5


def test_the_least_look_ahead_that_costs_next_to_nothing_is_chosen() -> None:
    assert choose_lookahead([0.0, 0.0]) == 0
    assert choose_lookahead([0.05, 0.02, 0.004, 0.0]) == 2
    assert choose_lookahead([0.05, 0.04, 0.03]) == 2
