"""The alignment's kernels: on emulated instructions everywhere, themselves on a GPU."""

import random
import shutil
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from megakernel_tts.align import mas, maximum_path
from megakernel_tts.align.search import Out
from tests.align.lattices import Batch, expected, random_batch
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


def rounded(batch: Batch, dtype: torch.dtype) -> tuple[Batch, Batch]:
    """Scores of a type, and the same as float32."""
    scores = batch.scores.to(dtype)
    return (
        Batch(scores, batch.text, batch.frames),
        Batch(scores.float(), batch.text, batch.frames),
    )


def with_no_numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Few infinities and NaN, so that there is a way around them; in every fourth, many."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-torch.inf, torch.nan, torch.inf, 0.0, 1.0, -1.0])
    kinds = torch.randint(0, 6 if seed % 4 == 0 else 300, shape, generator=generator)
    return torch.where(
        kinds < 6, values[kinds.clamp(max=5)], torch.randn(shape, generator=generator)
    )


def whole_lengths(scores: Tensor) -> tuple[Tensor, Tensor]:
    items, tokens, frames = scores.shape
    return torch.full((items,), tokens), torch.full((items,), frames)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("aligned", [False, True])
def test_emulated_durations_are_the_cpus(
    emulated: EmulatedAlign, dtype: torch.dtype, aligned: bool
) -> None:
    """However the work is cut into warps, blocks and stages, and whoever is late."""
    rng = random.Random(0)
    # Small, large, along the diagonal, and spread over more than what is traced at a time.
    shapes = [(10, 40), (150, 400), (300, 600), (260, 0), (5, 4000), (70, 3000)]
    for seed in range(60):
        most_tokens, most_frames = rng.choice(shapes)
        batch, same = rounded(random_batch(seed, most_tokens, most_frames, 3), dtype)
        items, tokens, frames = batch.scores.shape
        room = torch.empty(
            items, tokens, (frames + 3) // 4 * 4 if aligned else (frames + 1) // 2 * 2
        )
        room = room.to(dtype)[:, :, :frames].copy_(batch.scores)
        found = emulated.durations(
            room,
            batch.text if seed % 2 else batch.text.int(),
            batch.frames,
            aligned=aligned,
            warps=rng.randint(1, 2),
            stages=rng.randint(1, 4),
            late=rng.choice([0, 50]),
        )
        assert torch.equal(found, expected(same)), seed


def test_emulated_items_without_a_path_get_zeros(emulated: EmulatedAlign) -> None:
    scores = torch.randn(6, 70, 90)
    text = torch.tensor([70, 70, 0, 5, 71, -1])
    frames = torch.tensor([90, 69, 5, 0, 90, 90])
    found = emulated.durations(scores, text, frames, warps=1)
    assert (found[0] > 0).all() and found[0].sum() == 90
    assert not found[1:].any()
    assert not emulated.durations(scores, text + 2**32, frames).any()
    assert torch.equal(emulated.durations(scores, text.int(), frames), found)
    assert torch.equal(emulated.durations(scores), mas(scores))


def test_emulated_scores_that_are_no_numbers(emulated: EmulatedAlign) -> None:
    for seed in range(20):
        scores = with_no_numbers((2, 130, 300), seed)
        assert torch.equal(emulated.durations(scores, aligned=True), mas(scores))


def test_emulated_first_columns_where_nothing_leads_away_from_the_diagonal(
    emulated: EmulatedAlign,
) -> None:
    """No row begins before the first column, whatever lay in memory before."""
    scores = torch.full((3, 70, 540), -torch.inf)
    text, frames = torch.tensor([4, 4, 70]), torch.tensor([533, 4, 540])
    found = emulated.durations(scores, text, frames)
    assert torch.equal(found, mas(scores, text, frames))
    assert found[:2, :4].tolist() == [[1, 1, 1, 530], [1, 1, 1, 1]]


def test_emulated_few_tiles_with_what_is_no_number(emulated: EmulatedAlign) -> None:
    """Tiles of finite scores and others take turns, in items of one block and of two."""
    for seed in range(16):
        rng = torch.Generator().manual_seed(seed)
        scores = torch.randn(2, 130 if seed % 2 else 100, 600, generator=rng)
        cells = torch.randint(0, scores.numel(), (6,), generator=rng)
        kinds = torch.tensor([torch.nan, torch.inf, -torch.inf])
        scores.view(-1)[cells] = kinds[torch.randint(0, 3, (6,), generator=rng)]
        assert torch.equal(emulated.durations(scores, aligned=True), mas(scores))


def test_emulated_tokens_of_one_frame_and_of_hundreds(emulated: EmulatedAlign) -> None:
    """Where a token begins lies within what the way back looks at first, or far before."""
    few, even = [1, 1, 2, 9, 15, 16, 17, 31, 32, 33, 65, 300], [*range(12, 25)]
    alone = 0
    for seed in range(24):
        rng = random.Random(seed)
        rows = rng.randint(60, 200) if seed < 12 else rng.randint(4, 30)
        planted = torch.tensor([[rng.choice(even if seed % 3 else few) for _ in range(rows)]])
        path = torch.repeat_interleave(torch.arange(rows), planted[0])
        scores = torch.randn(1, rows, len(path)) + 9 * (torch.arange(rows)[:, None] == path)
        alone += rows <= 64 and len(path) <= 960  # in a kernel of its own
        assert torch.equal(mas(scores), planted.int())
        assert torch.equal(emulated.durations(scores, warps=rng.randint(1, 2)), planted.int())
    assert alone >= 8


def test_emulated_what_lies_beyond_an_items_lengths(emulated: EmulatedAlign) -> None:
    for seed in range(8):
        batch = random_batch(seed, 150, 400)
        scores = batch.scores.contiguous()
        inside = (torch.arange(scores.shape[1]) < batch.text[:, None])[:, :, None]
        inside = inside & (torch.arange(scores.shape[2]) < batch.frames[:, None])[:, None]
        outside = with_no_numbers(tuple(scores.shape), 4 * seed)
        found = emulated.durations(torch.where(inside, scores, outside), batch.text, batch.frames)
        assert torch.equal(found, expected(batch))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("aligned", [False, True])
def test_emulated_nothing_outside_the_scores_is_read(
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
        apart = -(-frames // multiple) * multiple
        room = guarded(items * tokens * apart, dtype, at_end)
        scores = room.view(items, tokens, apart)[:, :, :frames].copy_(torch.randn(shape))
        found = emulated.durations(scores, aligned=aligned, stages=stages)
        assert torch.equal(found, expected(Batch(scores, *whole_lengths(scores))))


@pytest.mark.parametrize("dtype", PATH_DTYPES, ids=str)
def test_emulated_paths(emulated: EmulatedAlign, dtype: torch.dtype) -> None:
    for seed in range(8):
        batch = random_batch(seed, 40, 90)
        durations = mas(batch.scores, batch.text, batch.frames)
        frames = batch.scores.shape[2]
        path = mas(batch.scores, batch.text, batch.frames, out="path")
        assert torch.equal(emulated.path(durations, frames, dtype), path.to(dtype))


def masks(dtype: torch.dtype) -> Iterator[Tensor]:
    """[B, T, S] of both layouts and repeated; numbers of any size and sign stand for true."""
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
def test_emulated_lengths_of_a_mask(emulated: EmulatedAlign, dtype: torch.dtype) -> None:
    for mask in masks(dtype):
        counts = (mask[:, :, 0].count_nonzero(1), mask[:, 0].count_nonzero(1))
        assert emulated.lengths(mask).tolist() == [count.tolist() for count in counts]


# --- on a GPU ---


def on_gpu(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.scores.cuda(), batch.text.cuda(), batch.frames.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_thousand_ragged_items_are_the_cpus(dtype: torch.dtype) -> None:
    count = 0
    for seed in range(500):
        batch, _ = rounded(random_batch(seed, 200, 500), dtype)
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
def test_large_items_are_the_cpus(shape: tuple[int, int, int], ties: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randn(shape, device="cuda", generator=generator)
    if ties:
        scores = scores.round()
    few = slice(None, 3)  # of the items: the CPU is slow
    found = mas(scores)
    assert torch.equal(found[few].cpu(), mas(scores[few].cpu()))
    assert (found.sum(1) == shape[2]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", PATH_DTYPES, ids=str)
def test_paths_are_the_cpus(dtype: torch.dtype) -> None:
    for seed in range(30):
        batch = random_batch(seed, 200, 500)
        mask = mas(batch.scores, batch.text, batch.frames, out="path").any(1, keepdim=True)
        mask = mask & (torch.arange(batch.scores.shape[1]) < batch.text[:, None])[:, :, None]
        found = maximum_path(batch.scores.cuda(), mask.cuda(), dtype)
        assert found.dtype == dtype
        assert torch.equal(found.cpu(), maximum_path(batch.scores, mask, dtype)), seed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_masks_are_the_cpus(dtype: torch.dtype) -> None:
    for mask in masks(dtype):
        scores = torch.randn(mask.shape)
        assert torch.equal(mas(scores.cuda(), mask=mask.cuda()).cpu(), mas(scores, mask=mask))


@pytest.mark.gpu
def test_no_items_no_tokens_no_frames() -> None:
    assert mas(torch.zeros(0, 9, 5, device="cuda")).shape == (0, 9)
    assert mas(torch.zeros(2, 0, 0, device="cuda"), out="path").shape == (2, 0, 0)
    none = torch.zeros(2, 3, 0, device="cuda")
    assert mas(none, mask=none).tolist() == [[0] * 3] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["durations", "index", "path"])
def test_layouts_and_forms_are_the_cpus(out: Out) -> None:
    batch = random_batch(7, 100, 300)
    scores, text, frames = on_gpu(batch)
    found = mas(scores.transpose(1, 2), text, frames, layout="BST", out=out)
    cpu = mas(batch.scores.transpose(1, 2), batch.text, batch.frames, layout="BST", out=out)
    assert torch.equal(found.cpu(), cpu)


@pytest.mark.gpu
def test_items_without_a_path() -> None:
    scores = torch.randn(6, 70, 90, device="cuda")
    before = scores.clone()
    text = torch.tensor([70, 70, 0, 5, 71, -1])
    frames = torch.tensor([90, 69, 5, 0, 90, 90])
    found = mas(scores, text.cuda(), frames.cuda(), out="index")
    assert (found[0] >= 0).all() and (found[1:] == -1).all()
    with pytest.raises(ValueError, match="Item 1 has 70 tokens and 69 frames"):
        mas(scores, text, frames)  # lengths that the host can read
    assert torch.equal(scores, before)


@pytest.mark.gpu
def test_scores_that_are_no_numbers() -> None:
    for seed in range(20):
        scores = with_no_numbers((4, 200, 700), seed)
        assert torch.equal(mas(scores.cuda()).cpu(), mas(scores))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu() -> None:
    scores, text, frames = on_gpu(random_batch(1, 100, 300))
    mask = torch.ones_like(scores)
    mas(scores, text, frames, out="index")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            scores.sum().item()  # the mode would tell
        mas(scores, text, frames, out="index")
        maximum_path(scores, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [60, 700])
def test_a_graph_gives_the_same_for_other_scores_and_lengths(tokens: int) -> None:
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
def test_a_compiled_call() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(scores: Tensor, text: Tensor, frames: Tensor) -> Tensor:
        return mas(scores * 2, text, frames, out="path")

    batch = random_batch(1, 100, 300)
    scores, text, frames = on_gpu(batch)
    expected = mas(scores * 2, text, frames, out="path")
    assert torch.equal(compiled(scores, text, frames), expected)
    assert torch.equal(compiled(scores, batch.text, batch.frames), expected)  # lengths of the host
    search = torch.ops.megakernel_tts.mas.default
    torch.library.opcheck(search, (scores, text, frames))
    torch.library.opcheck(search, (scores, None, None, torch.ones_like(scores)))
    path = torch.ops.megakernel_tts.mas_path.default
    torch.library.opcheck(path, (mas(scores), scores.shape[2], torch.float32))


@pytest.mark.gpu
def test_two_streams_at_once_and_again_and_again() -> None:
    """More blocks than fit, so that those of both calls share the multiprocessors."""
    both = [torch.randn(24, 900, 2000, device="cuda").round() for _ in range(2)]
    alone = [mas(scores) for scores in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    found: list[tuple[int, Tensor]] = []
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((i, mas(both[i])))
    torch.cuda.synchronize()
    assert all(torch.equal(durations, alone[i]) for i, durations in found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_anywhere_in_memory(dtype: torch.dtype) -> None:
    """Views that begin on any element, with gaps between rows and items."""
    whole = torch.randn(4, 150, 403, device="cuda").to(dtype)
    views: list[Tensor] = [whole[1:, 3:, offset : offset + 301] for offset in range(5)]
    views += [whole[:, ::2, :300], whole[:, :100, 1:302:2], whole[0:1].expand(3, -1, -1)]
    views += [whole[:, :1], whole[:, :1].expand(-1, 90, -1), whole[:, :, :1][:, :1]]
    views += [whole[0].unfold(1, 200, 1)[:, :100], whole.transpose(0, 1)[:4]]
    for view in views:
        assert torch.equal(mas(view).cpu(), mas(view.cpu()))
