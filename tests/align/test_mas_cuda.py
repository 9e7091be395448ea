"""The alignment kernels against the CPU implementation: emulated, and on a GPU."""

import random
import shutil
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from megakernel_common.kernels import build, nvrtc
from megakernel_tts.align import mas, maximum_path
from megakernel_tts.align.search import Out
from megakernel_tts.kernels.align import load_align_kernels
from tests.align.lattices import Batch, plain_batch_durations, random_batch
from tests.emulator.align import EmulatedAlign
from tests.emulator.guarded import guarded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATH_DTYPES = [torch.bool, torch.bfloat16, torch.float32, torch.int64]
MASK_DTYPES = [torch.bool, torch.int16, torch.int32, torch.int64, *DTYPES, torch.float64]


@pytest.fixture(scope="module")
def emulated() -> EmulatedAlign:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    return EmulatedAlign()


def with_dtype(batch: Batch, dtype: torch.dtype) -> tuple[Batch, Batch]:
    """A batch with scores of a dtype, and the same scores as float32."""
    scores = batch.scores.to(dtype)
    return (
        Batch(scores, batch.text, batch.frames),
        Batch(scores.float(), batch.text, batch.frames),
    )


def with_non_finite(shape: tuple[int, ...], seed: int) -> Tensor:
    """Scores with few infinities and NaNs; with many if the seed is a multiple of 4."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-torch.inf, torch.nan, torch.inf, 0.0, 1.0, -1.0])
    kinds = torch.randint(0, 6 if seed % 4 == 0 else 300, shape, generator=generator)
    return torch.where(
        kinds < 6, values[kinds.clamp(max=5)], torch.randn(shape, generator=generator)
    )


def full_lengths(scores: Tensor) -> tuple[Tensor, Tensor]:
    items, tokens, frames = scores.shape
    return torch.full((items,), tokens), torch.full((items,), frames)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("aligned", [False, True])
def test_emulated_durations_match_the_cpu(
    emulated: EmulatedAlign, dtype: torch.dtype, aligned: bool
) -> None:
    """For any partition of the work, and with a delayed block."""
    rng = random.Random(f"{dtype} {aligned}")
    # Small, large, along the diagonal, and with tokens longer than the window of the traceback.
    shapes = [(10, 40), (150, 400), (300, 600), (260, 0), (5, 4000), (70, 3000)]
    for seed in range(24):
        max_tokens, max_frames = shapes[seed % 6]
        batch, as_float32 = with_dtype(random_batch(seed, max_tokens, max_frames, 3), dtype)
        items, tokens, frames = batch.scores.shape
        storage = torch.empty(
            items, tokens, (frames + 3) // 4 * 4 if aligned else (frames + 1) // 2 * 2
        )
        strided = storage.to(dtype)[:, :, :frames].copy_(batch.scores)
        found = emulated.durations(
            strided,
            batch.text if seed % 2 else batch.text.int(),
            batch.frames,
            aligned=aligned,
            strips_per_block=rng.randint(1, 2),
            num_score_stages=rng.randint(1, 4),
            late=rng.choice([0, 50]),
        )
        assert torch.equal(found, plain_batch_durations(as_float32)), seed


def test_emulated_items_without_a_path_get_zero_durations(emulated: EmulatedAlign) -> None:
    scores = torch.randn(6, 70, 90)
    text = torch.tensor([70, 70, 0, 5, 71, -1])
    frames = torch.tensor([90, 69, 5, 0, 90, 90])
    found = emulated.durations(scores, text, frames, strips_per_block=1)
    assert (found[0] > 0).all() and found[0].sum() == 90
    assert not found[1:].any()
    assert not emulated.durations(scores, text + 2**32, frames).any()
    assert torch.equal(emulated.durations(scores, text.int(), frames), found)
    assert torch.equal(emulated.durations(scores), mas(scores))


def test_emulated_non_finite_scores_match_the_cpu(emulated: EmulatedAlign) -> None:
    for seed in range(20):
        scores = with_non_finite((2, 130, 300), seed)
        assert torch.equal(emulated.durations(scores, aligned=True), mas(scores))


def test_emulated_traceback_stays_on_the_diagonal_if_all_scores_are_minus_infinity(
    emulated: EmulatedAlign,
) -> None:
    """No row starts before the first column, for any previous content of shared memory."""
    scores = torch.full((3, 70, 540), -torch.inf)
    text, frames = torch.tensor([4, 4, 70]), torch.tensor([533, 4, 540])
    found = emulated.durations(scores, text, frames)
    assert torch.equal(found, mas(scores, text, frames))
    assert found[:2, :4].tolist() == [[1, 1, 1, 530], [1, 1, 1, 1]]


def test_emulated_tiles_with_and_without_nan_match_the_cpu(emulated: EmulatedAlign) -> None:
    """Finite and non-finite tiles alternate, in items of one and of two blocks."""
    for seed in range(16):
        rng = torch.Generator().manual_seed(seed)
        scores = torch.randn(2, 130 if seed % 2 else 100, 600, generator=rng)
        cells = torch.randint(0, scores.numel(), (6,), generator=rng)
        kinds = torch.tensor([torch.nan, torch.inf, -torch.inf])
        scores.view(-1)[cells] = kinds[torch.randint(0, 3, (6,), generator=rng)]
        assert torch.equal(emulated.durations(scores, aligned=True), mas(scores))


def test_emulated_tokens_of_any_duration_are_found(emulated: EmulatedAlign) -> None:
    """The start of a token lies in the current pair of words or far before it."""
    mixed, similar = [1, 1, 2, 9, 15, 16, 17, 31, 32, 33, 65, 300], [*range(12, 25)]
    num_shared = 0  # items with directions in shared memory
    for seed in range(24):
        rng = random.Random(seed)
        rows = rng.randint(60, 200) if seed < 12 else rng.randint(4, 30)
        durations = torch.tensor(
            [[rng.choice(similar if seed % 3 else mixed) for _ in range(rows)]]
        )
        path = torch.repeat_interleave(torch.arange(rows), durations[0])
        scores = torch.randn(1, rows, len(path)) + 9 * (torch.arange(rows)[:, None] == path)
        num_shared += rows <= 64 and len(path) <= 960
        assert torch.equal(mas(scores), durations.int())
        assert torch.equal(
            emulated.durations(scores, strips_per_block=rng.randint(1, 2)), durations.int()
        )
    assert num_shared >= 8


def test_emulated_scores_beyond_the_lengths_do_not_matter(emulated: EmulatedAlign) -> None:
    for seed in range(8):
        batch = random_batch(seed, 150, 400)
        scores = batch.scores.contiguous()
        inside = (torch.arange(scores.shape[1]) < batch.text[:, None])[:, :, None]
        inside = inside & (torch.arange(scores.shape[2]) < batch.frames[:, None])[:, None]
        outside = with_non_finite(tuple(scores.shape), 4 * seed)
        found = emulated.durations(torch.where(inside, scores, outside), batch.text, batch.frames)
        assert torch.equal(found, plain_batch_durations(batch))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("aligned", [False, True])
def test_emulated_reads_stay_inside_the_scores(
    emulated: EmulatedAlign, dtype: torch.dtype, aligned: bool
) -> None:
    shapes = [
        (1, 1, 1),
        (2, 3, 1),
        (1, 70, 1),
        (1, 1, 90),
        (2, 90, 130),
        (1, 64, 64),
        (1, 130, 256),
    ]
    for shape, at_end, stages in product(shapes, (False, True), (1, 4)):
        items, tokens, frames = shape
        multiple = 4 if aligned else 4 // dtype.itemsize
        row_stride = -(-frames // multiple) * multiple
        storage = guarded(items * tokens * row_stride, dtype, at_end)
        scores = storage.view(items, tokens, row_stride)[:, :, :frames].copy_(torch.randn(shape))
        found = emulated.durations(scores, aligned=aligned, num_score_stages=stages)
        assert torch.equal(found, plain_batch_durations(Batch(scores, *full_lengths(scores))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_emulated_searches_of_strided_views_match_the_cpu(
    emulated: EmulatedAlign, dtype: torch.dtype
) -> None:
    """Views that begin at any element, with gaps between rows and items; with lengths or a mask."""
    whole = torch.randn(3, 40, 103).to(dtype)
    views = [whole[1:, 3:, offset : offset + 80] for offset in range(5)]
    views += [whole[:, ::2, :100], whole[:, :30, 1:102:2], whole[:1].expand(3, -1, -1)]
    views += [whole[:, :1], whole[:, :1].expand(-1, 30, -1), whole.transpose(0, 1)[:4]]
    for view in views:
        assert torch.equal(emulated.search(view, None, None, None), mas(view))
        items, tokens, frames = view.shape
        text, ends = torch.randint(1, tokens + 1, (items,)), torch.full((items,), frames)
        mask = (torch.arange(tokens) < text[:, None])[:, :, None].expand(view.shape)
        expected = mas(view, text, ends)
        assert torch.equal(emulated.search(view, text, ends, None), expected)
        assert torch.equal(emulated.search(view, None, None, mask), expected)


@pytest.mark.parametrize("dtype", PATH_DTYPES, ids=str)
def test_emulated_paths_match_the_cpu(emulated: EmulatedAlign, dtype: torch.dtype) -> None:
    for seed in range(8):
        batch = random_batch(seed, 40, 90)
        durations = mas(batch.scores, batch.text, batch.frames)
        frames = batch.scores.shape[2]
        path = mas(batch.scores, batch.text, batch.frames, out="path")
        assert torch.equal(emulated.path(durations, frames, dtype), path.to(dtype))


def masks(dtype: torch.dtype) -> Iterator[Tensor]:
    """Masks [B, T, S] of both layouts and expanded; true is any nonzero number."""
    for seed in range(8):
        batch = random_batch(seed, 40, 400)
        _, tokens, frames = batch.scores.shape
        text = (torch.arange(tokens) < batch.text[:, None])[:, :, None]
        mask = text & (torch.arange(frames) < batch.frames[:, None])[:, None]
        if dtype != torch.bool:
            values = torch.tensor([1, -1, 2**14, -(2**7)]).repeat(frames)[:frames]
            mask = torch.where(mask, values.to(dtype), torch.tensor(-0.0).to(dtype))
        yield mask
        yield mask.transpose(1, 2).contiguous().transpose(1, 2)
        yield mask[:1].expand(3, -1, -1)


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_emulated_mask_lengths_match_the_cpu(emulated: EmulatedAlign, dtype: torch.dtype) -> None:
    for mask in masks(dtype):
        counts = (mask[:, :, 0].count_nonzero(1), mask[:, 0].count_nonzero(1))
        assert emulated.count_lengths(mask).tolist() == [count.tolist() for count in counts]


def on_gpu(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.scores.cuda(), batch.text.cuda(), batch.frames.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_items_match_the_cpu(dtype: torch.dtype) -> None:
    count = 0
    for seed in range(500):
        batch, _ = with_dtype(random_batch(seed, 200, 500), dtype)
        scores, text, frames = on_gpu(batch)
        rows = scores if seed % 4 else scores.contiguous()
        found = mas(rows, text, frames).cpu()
        assert torch.equal(found, mas(batch.scores, batch.text, batch.frames)), seed
        count += len(found)
    assert count >= 2000


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(32, 1024, 4096), (2, 2048, 8192), (1, 4096, 4100), (3, 1, 9999)]
)
@pytest.mark.parametrize("ties", [False, True])
def test_large_items_match_the_cpu(shape: tuple[int, int, int], ties: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randn(shape, device="cuda", generator=generator)
    if ties:
        scores = scores.round()
    few = slice(None, 3)  # items: the CPU is slow
    found = mas(scores)
    assert torch.equal(found[few].cpu(), mas(scores[few].cpu()))
    assert (found.sum(1) == shape[2]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", PATH_DTYPES, ids=str)
def test_paths_match_the_cpu(dtype: torch.dtype) -> None:
    for seed in range(30):
        batch = random_batch(seed, 200, 500)
        mask = mas(batch.scores, batch.text, batch.frames, out="path").any(1, keepdim=True)
        mask = mask & (torch.arange(batch.scores.shape[1]) < batch.text[:, None])[:, :, None]
        found = maximum_path(batch.scores.cuda(), mask.cuda(), dtype)
        assert found.dtype == dtype
        assert torch.equal(found.cpu(), maximum_path(batch.scores, mask, dtype)), seed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_masks_match_the_cpu(dtype: torch.dtype) -> None:
    for mask in masks(dtype):
        scores = torch.randn(mask.shape)
        assert torch.equal(mas(scores.cuda(), mask=mask.cuda()).cpu(), mas(scores, mask=mask))


@pytest.mark.gpu
def test_empty_batches_give_empty_results() -> None:
    assert mas(torch.zeros(0, 9, 5, device="cuda")).shape == (0, 9)
    assert mas(torch.zeros(2, 0, 0, device="cuda"), out="path").shape == (2, 0, 0)
    none = torch.zeros(2, 3, 0, device="cuda")
    assert mas(none, mask=none).tolist() == [[0] * 3] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["durations", "index", "path"])
def test_layouts_and_outputs_match_the_cpu(out: Out) -> None:
    batch = random_batch(7, 100, 300)
    scores, text, frames = on_gpu(batch)
    found = mas(scores.transpose(1, 2), text, frames, layout="BST", out=out)
    cpu = mas(batch.scores.transpose(1, 2), batch.text, batch.frames, layout="BST", out=out)
    assert torch.equal(found.cpu(), cpu)


@pytest.mark.gpu
def test_items_without_a_path_get_an_index_of_minus_one() -> None:
    scores = torch.randn(6, 70, 90, device="cuda")
    before = scores.clone()
    text = torch.tensor([70, 70, 0, 5, 71, -1])
    frames = torch.tensor([90, 69, 5, 0, 90, 90])
    found = mas(scores, text.cuda(), frames.cuda(), out="index")
    assert (found[0] >= 0).all() and (found[1:] == -1).all()
    with pytest.raises(ValueError, match="Item 1 has 70 tokens and 69 frames"):
        mas(scores, text, frames)  # lengths on the host are checked
    assert torch.equal(scores, before)


@pytest.mark.gpu
def test_non_finite_scores_match_the_cpu() -> None:
    for seed in range(20):
        scores = with_non_finite((4, 200, 700), seed)
        assert torch.equal(mas(scores.cuda()).cpu(), mas(scores))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_calls_do_not_synchronise() -> None:
    scores, text, frames = on_gpu(random_batch(1, 100, 300))
    mask = torch.ones_like(scores)
    mas(scores, text, frames, out="index")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            scores.sum().item()  # the mode detects it
        mas(scores, text, frames, out="index")
        maximum_path(scores, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [60, 700])
def test_a_cuda_graph_follows_new_scores_and_lengths(tokens: int) -> None:
    scores = torch.zeros(8, tokens, 3 * tokens, device="cuda")
    text = torch.full((8,), tokens, device="cuda")
    frames = torch.full((8,), 3 * tokens, device="cuda")
    mas(scores, text, frames, out="path")  # builds the kernels
    mask = torch.ones(8, tokens, 3 * tokens, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        path = mas(scores, text, frames, out="path")
        index = mas(scores, text, frames, out="index")
        drop_in = maximum_path(scores, mask, torch.bool)
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        scores.copy_(torch.randn(scores.shape, generator=rng))
        text.copy_(torch.randint(1, tokens + 1, (8,), generator=rng))
        frames.copy_(torch.randint(tokens, 3 * tokens + 1, (8,), generator=rng))
        mask.zero_()[:, :, 0] = torch.arange(tokens, device="cuda") < text[:, None]
        mask[:, 0] = torch.arange(3 * tokens, device="cuda") < frames[:, None]
        graph.replay()
        assert torch.equal(drop_in, path)
        assert torch.equal(path, mas(scores, text, frames, out="path"))
        assert torch.equal(index, mas(scores, text, frames, out="index"))
        assert torch.equal(index.cpu(), mas(scores.cpu(), text.cpu(), frames.cpu(), out="index"))


@pytest.mark.gpu
def test_compiled_calls_match_eager_calls() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(scores: Tensor, text: Tensor, frames: Tensor) -> Tensor:
        return mas(scores * 2, text, frames, out="path")

    batch = random_batch(1, 100, 300)
    scores, text, frames = on_gpu(batch)
    expected = mas(scores * 2, text, frames, out="path")
    assert torch.equal(compiled(scores, text, frames), expected)
    assert torch.equal(compiled(scores, batch.text, batch.frames), expected)  # lengths on the host
    search = torch.ops.megakernel_tts.mas.default
    torch.library.opcheck(search, (scores, text, frames))
    torch.library.opcheck(search, (scores, None, None, torch.ones_like(scores)))
    path = torch.ops.megakernel_tts.mas_path.default
    torch.library.opcheck(path, (scores, text, frames, None, torch.bool))
    torch.library.opcheck(path, (scores, None, None, torch.ones_like(scores), torch.float32))


@pytest.mark.gpu
def test_concurrent_streams_do_not_change_durations() -> None:
    """Both calls have more blocks than fit, so they share the multiprocessors."""
    batches = [torch.randn(24, 900, 2000, device="cuda").round() for _ in range(2)]
    expected = [mas(scores) for scores in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    found: list[tuple[int, Tensor]] = []
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((i, mas(batches[i])))
    torch.cuda.synchronize()
    assert all(torch.equal(durations, expected[i]) for i, durations in found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views_match_the_cpu(dtype: torch.dtype) -> None:
    """Views that begin at any element, with gaps between rows and items."""
    whole = torch.randn(4, 150, 403, device="cuda").to(dtype)
    views: list[Tensor] = [whole[1:, 3:, offset : offset + 301] for offset in range(5)]
    views += [whole[:, ::2, :300], whole[:, :100, 1:302:2], whole[0:1].expand(3, -1, -1)]
    views += [whole[:, :1], whole[:, :1].expand(-1, 90, -1), whole[:, :, :1][:, :1]]
    views += [whole[0].unfold(1, 200, 1)[:, :100], whole.transpose(0, 1)[:4]]
    for view in views:
        assert torch.equal(mas(view).cpu(), mas(view.cpu()))


@pytest.mark.gpu
def test_both_launch_paths_give_the_same_results() -> None:
    for reason in (build.obstacle(), nvrtc.obstacle()):
        if reason:
            pytest.skip(reason)
    batch = random_batch(3, 200, 500)
    scores, text, frames = on_gpu(batch)
    expected = mas(scores, text, frames)
    for path in ("extension", "nvrtc"):
        kernels = load_align_kernels(torch.device("cuda", 0), path)
        durations = kernels.search(scores, text, frames, None)
        assert torch.equal(durations, expected)
        made = kernels.path(durations, scores.shape[2], torch.bool)
        assert torch.equal(made, mas(scores, text, frames, out="path"))
