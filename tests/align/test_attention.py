import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts.align.attention import unit_log_attention


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9))
def test_columns_equal_the_plain_formula(seed: int, frames: int, heads: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, 5, (frames, heads, tokens)).astype(np.float32)
    num_keys = np.sort(rng.integers(0, tokens + 1, frames))
    for frame, count in enumerate(num_keys):
        scores[frame, :, count:] = np.nan
    unit_starts = [0, *sorted(set(rng.integers(1, tokens + 1, 3).tolist()) - {tokens})]
    columns = unit_log_attention(scores, np.array(unit_starts), 1e-3)
    for frame, count in enumerate(num_keys):
        for unit, (a, b) in enumerate(zip(unit_starts, [*unit_starts[1:], tokens], strict=True)):
            if a >= count:
                assert columns[frame, unit] == (0.0 if unit == 0 else -np.inf)
                continue
            logs = []
            for head in range(heads):
                weights = np.exp(scores[frame, head, :count].astype(np.float64))
                logs.append(np.log(max(weights[a:b].sum() / weights.sum(), 1e-3)))
            assert abs(columns[frame, unit] - np.mean(logs)) < 1e-4


def test_batching_does_not_change_columns() -> None:
    scores = np.random.default_rng(0).normal(0, 3, (6, 2, 10)).astype(np.float32)
    unit_starts = np.array([0, 2, 3, 7])
    single = [unit_log_attention(scores[i : i + 1], unit_starts, 1e-4) for i in range(6)]
    assert np.array_equal(unit_log_attention(scores, unit_starts, 1e-4), np.concatenate(single))
    assert np.isfinite(scores).all(), "the input is not modified"


def test_huge_scores_do_not_overflow() -> None:
    scores = np.array([[[3e4, -3e4, 0]]], np.float32)
    columns = unit_log_attention(scores, np.arange(3), 1e-4)
    assert np.allclose(columns, [[0, np.log(1e-4), np.log(1e-4)]])
