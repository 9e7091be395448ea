import numpy as np

from megakernel_tts.calibration.ranking import (
    CapturedSpeech,
    choose_heads,
    choose_lookahead,
    lookahead_errors,
    mean_error,
    monotonicity,
    rank,
)
from tests.align.synthetic_attention import SAMPLE_RATE, SAMPLES_PER_FRAME, attending, loud_frames
from tests.align.texts import transcript

TOKENS = ["One", ",", " two", " three", " four", " five", "."]
SPOKEN = [0] * 5 + [1] * 2 + [2] * 4 + [3] * 6 + [4] * 3 + [5] * 5 + [6] * 2
STARTS = [SPOKEN.index(token) * SAMPLES_PER_FRAME / SAMPLE_RATE for token in (0, 2, 3, 4, 5)]
GOOD, NOISY, CONSTANT, RANDOM, LATE = ((0, head) for head in range(5))
HEADS = [CONSTANT, LATE, RANDOM, NOISY, GOOD]


def captured_speech(seed: int, *, has_truth: bool) -> CapturedSpeech:
    rng = np.random.default_rng(seed)
    n = len(TOKENS)
    noisy = np.where(rng.random(len(SPOKEN)) < 0.25, rng.integers(0, n, len(SPOKEN)), SPOKEN)
    late = [0] * 6 + SPOKEN[:-6]
    random_path = rng.integers(0, n, len(SPOKEN))
    paths = [SPOKEN, noisy.tolist(), [0] * len(SPOKEN), random_path.tolist(), late]
    scores = np.concatenate([attending(path, n) for path in paths], axis=1)[:, None]
    samples = loud_frames([True] * len(SPOKEN))
    return CapturedSpeech(
        scores, samples, lambda: transcript(*TOKENS), STARTS if has_truth else None
    )


def layouts(*, has_truth: bool) -> list[list[CapturedSpeech]]:
    return [
        [captured_speech(seed, has_truth=has_truth) for seed in seeds] for seeds in ((0, 1), (2, 3))
    ]


def test_head_that_follows_the_text_has_the_highest_monotonicity() -> None:
    speech = captured_speech(0, has_truth=False)
    found = [monotonicity(speech, head) for head in (GOOD, NOISY, RANDOM)]
    assert found == sorted(found, reverse=True)
    assert abs(found[0] - np.log(len(TOKENS))) < 0.1, "all attention is on the path"
    assert monotonicity(speech, CONSTANT) < found[0] / 2


def test_heads_without_ground_truth_are_ranked_by_monotonicity_and_chosen_by_agreement() -> None:
    both = layouts(has_truth=False)
    ranked = rank(both, HEADS)
    assert ranked[0].head == GOOD and all(r.error_s is None for r in ranked)
    assert GOOD in choose_heads(both, ranked)
    assert not {CONSTANT, RANDOM, LATE} & set(choose_heads(both, ranked))


def test_heads_with_ground_truth_are_ranked_by_error() -> None:
    """A head with a constant delay is as monotone as the best one, but has a larger error."""
    both = layouts(has_truth=True)
    ranked = rank(both, HEADS)
    assert ranked[0].head == GOOD and ranked[0].error_s is not None and ranked[0].error_s < 1e-3
    late = next(r for r in ranked if r.head == LATE)
    assert late.error_s is not None and 0.2 < late.error_s < 0.6
    assert choose_heads(both, ranked) == [GOOD], "another head does not reduce the error"


def test_noisy_heads_are_combined_if_the_error_falls() -> None:
    """The heads are noisy at different frames."""
    speeches = [captured_speech(seed, has_truth=True) for seed in range(8)]
    rng = np.random.default_rng(9)
    pairs: list[CapturedSpeech] = []
    for speech in speeches:
        n = len(TOKENS)
        paths = [
            np.where(
                rng.random(len(SPOKEN)) < 0.45, rng.integers(0, n, len(SPOKEN)), SPOKEN
            ).tolist()
            for _ in range(3)
        ]
        scores = np.concatenate([attending(path, n) for path in paths], axis=1)[:, None]
        pairs.append(CapturedSpeech(scores, speech.samples, speech.transcript, STARTS))
    ranked = rank([pairs], [(0, 0), (0, 1), (0, 2)])
    chosen = choose_heads([pairs], ranked)
    assert len(chosen) > 1
    assert ranked[0].error_s is not None and mean_error(pairs, chosen) < ranked[0].error_s


def test_longer_lookahead_has_a_smaller_error() -> None:
    speeches = [captured_speech(seed, has_truth=False) for seed in range(6)]
    late = lookahead_errors(speeches, [NOISY])
    assert late[0] > late[-1] >= 0
    assert lookahead_errors(speeches, [GOOD]) == [0.0] * 5


def test_shortest_lookahead_with_a_negligible_error_is_chosen() -> None:
    assert choose_lookahead([0.0, 0.0]) == 0
    assert choose_lookahead([0.05, 0.02, 0.004, 0.0]) == 2
    assert choose_lookahead([0.05, 0.04, 0.03]) == 2
