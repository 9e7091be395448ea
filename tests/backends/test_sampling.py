import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel_tts import Sampling
from megakernel_tts.backends.sampling import (
    SamplingMetadata,
    apply_repetition_penalty,
    gumbel_noise,
    philox,
    sample,
)

CPU = torch.device("cpu")


def talker_params(num_rows: int, **fields: float | int) -> SamplingMetadata:
    return SamplingMetadata.for_talker([Sampling(**fields)] * num_rows, CPU)  # type: ignore[arg-type]


# Known answers of Philox4x32-10, as published with the Random123 library.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert tuple(int(w) for w in words) == expected


def test_noise_depends_only_on_seed_frame_codebook_and_id() -> None:
    noise = gumbel_noise([3, 7, 3], [0, 5, 6], 16, 300, CPU)
    assert noise.shape == (3, 16, 300)
    assert torch.equal(noise[1:2], gumbel_noise([7], [5], 16, 300, CPU))
    assert torch.equal(noise[2, :4, :100], gumbel_noise([3], [6], 4, 100, CPU)[0])
    assert not torch.equal(noise[0], noise[2])
    high = gumbel_noise([1 << 40], [0], 1, 8, CPU)
    assert not torch.equal(high, gumbel_noise([0], [0], 1, 8, CPU))


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise(list(range(64)), [0] * 64, 16, 1024, CPU).flatten().double()
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.01)


def test_samples_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    num_rows = 40_000
    params = talker_params(num_rows, temperature=0.7, top_k=0)
    noise = gumbel_noise(list(range(num_rows)), [0] * num_rows, 1, 5, CPU)[:, 0]
    ids = sample(logits.expand(num_rows, -1), params, noise)
    shares = torch.bincount(ids, minlength=5).double() / num_rows
    expected = (logits / 0.7).softmax(-1).double()
    # Four standard deviations of a binomial share.
    assert ((shares - expected).abs() <= 4 * (expected * (1 - expected) / num_rows).sqrt()).all()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), k=st.integers(1, 20), p=st.floats(0.05, 1.0))
def test_samples_are_within_top_k_and_top_p(seed: int, k: int, p: float) -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(seed)) * 3
    scaled = logits[0] / 0.9
    kept_k = scaled >= scaled.topk(k).values[-1]
    probability = scaled.masked_fill(~kept_k, -torch.inf).softmax(-1)
    ordered, order = probability.sort(descending=True)
    enough = int((ordered.cumsum(0) - ordered < p).sum())
    allowed = set(order[:enough].tolist())
    for frame in range(10):
        noise = gumbel_noise([seed], [frame], 1, 20, CPU)[:, 0]
        assert int(sample(logits, talker_params(1, top_k=k, top_p=p), noise)) in allowed


def test_ids_that_tie_with_the_last_of_the_top_k_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    params = talker_params(1, top_k=2, temperature=2.0)
    noises = [gumbel_noise([seed], [0], 1, 5, CPU)[:, 0] for seed in range(200)]
    assert {int(sample(logits, params, noise)) for noise in noises} == {0, 1, 2, 3}


def test_batching_greedy_and_sampled_rows_does_not_change_ids() -> None:
    samplings = [
        Sampling.greedy(),
        Sampling(temperature=0.9),
        Sampling(temperature=1.5, top_k=3, top_p=0.5),
    ]
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    noise = gumbel_noise([1, 2, 3], [4, 4, 4], 1, 50, CPU)[:, 0]
    batched = sample(logits, SamplingMetadata.for_talker(samplings, CPU), noise)
    single = [
        sample(logits[i : i + 1], SamplingMetadata.for_talker([sampling], CPU), noise[i : i + 1])
        for i, sampling in enumerate(samplings)
    ]
    assert torch.equal(batched, torch.cat(single))
    assert batched[0] == logits[0].argmax()


def test_repetition_penalty_scales_seen_ids_once() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    out = apply_repetition_penalty(logits, seen, torch.tensor([[2.0]]))
    assert out.tolist() == [[1.0, -4.0, 2.0, -2.0]]
    encouraged = apply_repetition_penalty(logits, seen, torch.tensor([[0.5]]))
    assert encouraged.tolist() == [[4.0, -1.0, 2.0, -2.0]]


@settings(max_examples=300, deadline=None)
@given(
    penalty=st.floats(0, sys.float_info.max, exclude_min=True) | st.integers(1, 10**300),
    rows=st.lists(st.tuples(st.integers(-40, 40), st.booleans()), min_size=1, max_size=8),
)
def test_penalty_of_any_size_selects_the_same_id_as_exact_arithmetic(
    penalty: float, rows: list[tuple[int, bool]]
) -> None:
    """Also a penalty that is zero or infinite in float32."""
    p = Fraction(penalty)
    exact = [x if not seen else x * p if x < 0 else x / p for x, seen in rows]
    logits = torch.tensor([[float(x) for x, _ in rows]])
    seen = torch.tensor([[seen for _, seen in rows]])
    sampling = Sampling(repetition_penalty=penalty).in_float32()
    out = apply_repetition_penalty(
        logits, seen, torch.tensor([sampling.repetition_penalty])[:, None]
    )
    best, chosen = max(exact), exact[int(out.argmax())]
    assert best - chosen <= abs(best) * Fraction(1, 10**6)
    assert (out / 1e-6).isfinite().all()  # at the lowest temperature that is not greedy


@settings(max_examples=100, deadline=None)
@given(temperature=st.floats(0, 1e-6, exclude_max=True), seed=st.integers(0, 1 << 32))
def test_temperature_that_would_overflow_is_greedy(temperature: float, seed: int) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * 10
    noise = gumbel_noise([seed], [0], 1, 50, CPU)[:, 0]
    sampling = Sampling(temperature=temperature, predictor_temperature=temperature, top_p=0.9)
    sampling = sampling.in_float32()
    for params in (
        SamplingMetadata.for_talker([sampling], CPU),
        SamplingMetadata.for_predictor([sampling], CPU),
    ):
        assert int(sample(logits, params, noise)) == int(logits.argmax())


@pytest.mark.parametrize("top_p", [1e-300, 1e-50, 1e-31, 1e-6])
def test_most_likely_id_is_kept_for_any_top_p(top_p: float) -> None:
    sampling = Sampling(top_p=top_p, predictor_top_p=top_p).in_float32()
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    noise = gumbel_noise([1, 2, 3, 4], [0] * 4, 1, 50, CPU)[:, 0]
    for params in (
        SamplingMetadata.for_talker([sampling] * 4, CPU),
        SamplingMetadata.for_predictor([sampling] * 4, CPU),
    ):
        assert torch.equal(sample(logits, params, noise), logits.argmax(dim=-1))
