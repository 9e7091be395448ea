"""The search on the CPU against all paths, a plain search and the Cython package."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megakernel_tts.align import mas, maximum_path
from megakernel_tts.align.search import Out, ScoreLayout
from tests.align.lattices import (
    Batch,
    every_path,
    plain_batch_durations,
    plain_durations,
    random_batch,
    tokens_of,
)


@pytest.mark.parametrize("ties", [False, True])
def test_result_is_the_best_of_all_paths(ties: bool) -> None:
    """Sums of small integers are exact, so ties are exact as well."""
    rng = np.random.default_rng(0)
    for tokens in range(1, 6):
        for frames in range(tokens, 10):
            scores = rng.integers(-1 if ties else -999, 2 if ties else 1000, (tokens, frames))
            found = mas(torch.from_numpy(scores[None]).float())[0].tolist()
            totals = {
                tuple(d): scores[tokens_of(d), np.arange(frames)].sum()
                for d in every_path(tokens, frames)
            }
            best = max(totals.values())
            # Of equal paths: the one at the later token in the last frame that differs.
            tied = [d for d, total in totals.items() if total == best]
            assert tuple(found) == max(tied, key=lambda d: d[::-1])


def test_ragged_items_match_a_plain_search() -> None:
    count = 0
    for seed in range(200):
        batch = random_batch(seed, 24, 70)
        found = mas(batch.scores, batch.text, batch.frames)
        assert torch.equal(found, plain_batch_durations(batch)), seed
        count += len(found)
    assert count >= 800


@pytest.mark.skipif(find_spec("monotonic_alignment_search") is None, reason="a test extra")
def test_ragged_items_match_the_cython_package() -> None:
    from monotonic_alignment_search import (  # pyright: ignore[reportMissingImports]  # an extra
        maximum_path as cython_path,
    )

    count = 0
    for seed in range(200):
        batch = random_batch(seed, 40, 120)
        mask = _mask(batch)
        from_cython = cython_path(batch.scores.clone(), mask)
        assert torch.equal(maximum_path(batch.scores, mask), from_cython), seed
        count += len(mask)
    assert count >= 800


def _mask(batch: Batch) -> Tensor:
    _, tokens, frames = batch.scores.shape
    text = torch.arange(tokens) < batch.text[:, None]
    return (text[:, :, None] & (torch.arange(frames) < batch.frames[:, None])[:, None]).float()


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_paths_are_monotonic_complete_and_optimal(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 12))
    frames = data.draw(st.integers(tokens, 30))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scores = rng.integers(-50, 51, (tokens, frames))
    found = mas(torch.from_numpy(scores[None]).float())[0]
    assert (found >= 1).all() and found.sum() == frames
    path = tokens_of(found.tolist())
    best = scores[path, np.arange(frames)].sum()
    cuts = data.draw(st.sets(st.integers(1, frames - 1), min_size=tokens - 1, max_size=tokens - 1)
                     if tokens > 1 else st.just(set[int]()))  # fmt: skip
    other = np.searchsorted(sorted(cuts), np.arange(frames), side="right")
    assert scores[other, np.arange(frames)].sum() <= best


def test_outputs_are_consistent() -> None:
    batch = random_batch(3, 20, 60)
    lengths = (batch.text, batch.frames)
    durations = mas(batch.scores, *lengths)
    index = mas(batch.scores, *lengths, out="index")
    path = mas(batch.scores, *lengths, out="path")
    assert (durations.dtype, index.dtype, path.dtype) == (torch.int32, torch.int32, torch.bool)
    assert torch.equal(path.sum(2), durations)
    for item, end in enumerate(batch.frames.tolist()):
        assert index[item, :end].tolist() == tokens_of(durations[item].tolist()).tolist()
        assert (index[item, end:] == -1).all() and not path[item, :, end:].any()
        assert path[item, index[item, :end].long(), torch.arange(end)].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_for_half_precision_scores(dtype: torch.dtype) -> None:
    batch = random_batch(6, 30, 300)  # around -200: sums exceed half precision
    scores = batch.scores.to(dtype)
    as_float32 = Batch(scores.float(), batch.text, batch.frames)
    assert torch.equal(mas(scores, batch.text, batch.frames), plain_batch_durations(as_float32))


@pytest.mark.parametrize("out", ["durations", "index", "path"])
def test_layouts_are_transposed(out: Out) -> None:
    batch = random_batch(5, 20, 40)
    other = batch.scores.transpose(1, 2)
    for scores in (other, other.contiguous()):
        found = mas(scores, batch.text, batch.frames, layout="BST", out=out)
        same = mas(batch.scores, batch.text, batch.frames, out=out)
        assert torch.equal(found, same.transpose(1, 2) if out == "path" else same)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
@pytest.mark.parametrize("layout", ["BTS", "BST"])
def test_a_mask_is_equivalent_to_lengths(dtype: torch.dtype, layout: ScoreLayout) -> None:
    batch = random_batch(9, 20, 40)
    mask, scores = _mask(batch).to(dtype), batch.scores
    if layout == "BST":
        mask, scores = mask.transpose(1, 2), scores.transpose(1, 2)
    found = mas(scores, mask=mask, layout=layout)
    assert torch.equal(found, mas(batch.scores, batch.text, batch.frames))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.bfloat16])
def test_maximum_path_has_the_requested_dtype(dtype: torch.dtype) -> None:
    batch = random_batch(11, 20, 40)
    found = maximum_path(batch.scores, _mask(batch), dtype=dtype)
    assert found.dtype == dtype
    path = mas(batch.scores, batch.text, batch.frames, out="path")
    assert torch.equal(found, path.to(dtype))
    if dtype == torch.float32:
        assert maximum_path(batch.scores, _mask(batch)).dtype == dtype


def test_scores_are_not_modified_and_may_require_gradients() -> None:
    scores = torch.randn(2, 5, 9, requires_grad=True)
    before = scores.detach().clone()
    maximum_path(scores, torch.ones(2, 5, 9))
    found = mas(scores, out="path")
    assert torch.equal(scores.detach(), before) and not found.requires_grad


def test_nan_counts_as_minus_infinity() -> None:
    """Also sums of infinities of both signs. If all scores are minus infinity, all paths tie."""
    rng = np.random.default_rng(1)
    values = np.array([0, 1, -1, -np.inf, np.nan], np.float32)
    for _ in range(60):
        scores = rng.choice(values, (6, 14), p=[0.3, 0.2, 0.2, 0.2, 0.1])
        found = mas(torch.from_numpy(scores[None]))[0].tolist()
        lowered = np.where(np.isnan(scores), -np.inf, scores).astype(np.float32)
        assert found == mas(torch.from_numpy(lowered[None]))[0].tolist()
        assert found == plain_durations(scores)
        path = lowered[tokens_of(found), np.arange(14)]
        totals = (lowered[tokens_of(d), np.arange(14)].sum() for d in every_path(6, 14))
        assert path.sum() == max(totals)
    mixed = torch.tensor([[[torch.inf, -torch.inf, 0, 0], [0, 0, -torch.inf, torch.inf]]])
    assert mas(mixed)[0].tolist() == plain_durations(mixed[0].numpy())
    all_minus_infinity = torch.full((1, 3, 7), -torch.inf)
    assert mas(all_minus_infinity).tolist() == mas(torch.zeros(1, 3, 7)).tolist() == [[1, 1, 5]]


@pytest.mark.parametrize(
    ("text", "frames", "message"),
    [
        ([5, 5], [9, 4], "Item 1 has 5 tokens and 4 frames: each token needs a frame"),
        ([0, 5], [9, 9], "Item 0 has 0 tokens and 9 frames"),
        ([5, 5], [5, 0], "Item 1 has 5 tokens and 0 frames"),
        ([5, 6], [9, 9], "Item 1 has 6 tokens and 9 frames: there are scores for 5 and 9"),
        ([5, -1], [9, 9], "Item 1 has -1 tokens"),
    ],
)
def test_items_without_a_path_are_refused(text: list[int], frames: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mas(torch.zeros(2, 5, 9), torch.tensor(text), torch.tensor(frames))


def test_more_tokens_than_frames_are_refused_without_lengths() -> None:
    with pytest.raises(ValueError, match="Every item has 9 tokens and 5 frames"):
        mas(torch.zeros(2, 9, 5))


def test_empty_batches_give_empty_results() -> None:
    assert mas(torch.zeros(0, 9, 5)).shape == (0, 9)
    assert mas(torch.zeros(2, 0, 0), out="path").shape == (2, 0, 0)
    none = torch.tensor([0, 2])
    found = mas(torch.zeros(2, 3, 4), none, none, out="index")
    assert found.tolist() == [[-1] * 4, [0, 1, -1, -1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scores": torch.zeros(3, 4)}, r"\[B, T, S\], found torch.float32 \[3, 4\]"),
        ({"scores": torch.zeros(1, 2, 3).double()}, "found torch.float64"),
        ({"layout": "TSB"}, "layout must be 'BTS' or 'BST', found 'TSB'"),
        ({"out": "durations_"}, "out must be 'durations', 'path' or 'index'"),
        ({"mask": torch.ones(2, 5, 8)}, r"mask must be \[2, 5, 9\]"),
        ({"mask": torch.ones(2, 5, 9, device="meta")}, "mask must be .* on cpu .* on meta"),
        ({"mask": torch.ones(2, 5, 9) * 1j}, "not complex, found torch.complex64"),
        ({"mask": torch.ones(2, 5, 9), "text_lengths": torch.ones(2).int()}, "not both"),
        ({"text_lengths": torch.ones(3).int()}, r"text_lengths must be int32 or int64 \[2\]"),
        ({"frame_lengths": torch.ones(2)}, "frame_lengths must be int32 or int64"),
        ({"text_lengths": torch.ones(2, device="meta").int()}, "text_lengths must be on cpu"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mas(**{"scores": torch.zeros(2, 5, 9)} | arguments)  # pyright: ignore[reportArgumentType]


def test_operators_pass_opcheck() -> None:
    batch = random_batch(13, 10, 20)
    search = torch.ops.megakernel_tts.mas.default
    path = torch.ops.megakernel_tts.mas_path.default
    torch.library.opcheck(search, (batch.scores, batch.text, batch.frames))
    torch.library.opcheck(search, (batch.scores, None, None))
    torch.library.opcheck(search, (batch.scores, None, None, _mask(batch)))
    torch.library.opcheck(path, (batch.scores, batch.text, batch.frames, None, torch.bool))
    torch.library.opcheck(path, (batch.scores, None, None, _mask(batch), torch.float32))


@pytest.mark.parametrize("out", ["durations", "index", "path"])
def test_compiled_calls_have_one_graph_for_all_shapes(out: Out) -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(scores: Tensor, text: Tensor, frames: Tensor) -> Tensor:
        return mas(scores * 2, text, frames, out=out)

    for seed in (1, 5):
        batch = random_batch(seed, 20, 40)
        found = compiled(batch.scores, batch.text, batch.frames)
        assert torch.equal(found, mas(batch.scores * 2, batch.text, batch.frames, out=out))
