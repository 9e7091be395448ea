"""How prompts share the batches of a prefill."""

from collections import defaultdict

import torch
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts.backends.prefill_batching import (
    PromptRange,
    chunk_end,
    fill_batches,
    num_tiled_positions,
    pack_batches,
    pack_wide_batches,
)
from megakernel_tts.kernels.structs import PrefillBatch, WidePrefillBatch
from tests.emulator import MAX_PREFILL_COLUMNS as TILE_SIZE
from tests.emulator import MAX_STREAMS as FIRST_SIZE

# Lengths of prompts, and how many tiles of each were run before.
prompts = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 4)), min_size=1, max_size=8)


def tile_begin(tile: int) -> int:
    """The first position of a tile."""
    return FIRST_SIZE + TILE_SIZE * (tile - 1) if tile else 0


def prompt_ends(batch: PrefillBatch | WidePrefillBatch) -> set[int]:
    """The columns that end a prompt."""
    if isinstance(batch, PrefillBatch):
        return {c for c in range(32) if batch.prompt_end_mask >> c & 1}
    return {c for c, column in enumerate(batch.columns) if column.ends_prompt}


@given(prompts, st.sampled_from([TILE_SIZE, 32, 64]))
def test_every_tile_is_packed_whole_and_in_order(
    lengths: list[tuple[int, int]], max_columns: int
) -> None:
    chunks = [
        PromptRange(
            slot, 1000.0 * slot + torch.arange(length)[:, None], tile_begin(num_run), length
        )
        for slot, (length, num_run) in enumerate(lengths)
        if tile_begin(num_run) < length
    ]
    if not chunks:
        return
    wide = max_columns > TILE_SIZE
    filled = fill_batches(chunks, FIRST_SIZE, TILE_SIZE, max_columns, wide=wide)
    batches = pack_wide_batches(filled) if wide else pack_batches(filled)
    tiles = [tile for batch in filled for tile in batch.tiles]
    vectors = torch.cat([tile.prompt[tile.begin : tile.end] for tile in tiles])
    row, packed = 0, defaultdict[int, list[int]](list)
    for batch in batches:
        num_columns, ends = batch.num_columns, prompt_ends(batch)
        assert 1 <= num_columns <= max_columns
        assert batch.first_row == row and max(ends, default=0) < num_columns
        columns = [(c.slot, c.position, c.first_column) for c in batch.columns[:num_columns]]
        for c, (slot, position, first_column) in enumerate(columns):
            assert vectors[row + c].tolist() == [1000.0 * slot + position]
            assert (c in ends) == (position == lengths[slot][0] - 1)
            begin = num_tiled_positions(position, FIRST_SIZE, TILE_SIZE)
            assert position - begin == c - first_column
            # The columns of a slot in a batch are consecutive positions, side by side.
            own = [i for i, column in enumerate(columns) if column[0] == slot]
            assert [i - c for i in own] == [columns[i][1] - position for i in own]
            last = num_tiled_positions(columns[own[-1]][1], FIRST_SIZE, TILE_SIZE)
            if isinstance(batch, WidePrefillBatch):
                assert batch.columns[c].precedes_tile == (begin < last)
            else:
                assert begin == last, "a narrow batch has two tiles of a prompt"
            packed[slot].append(position)
        row += num_columns
    assert row == len(vectors)
    assert packed == {s.slot: list(range(s.begin, s.end)) for s in chunks}


def test_short_chunks_share_a_batch() -> None:
    """Eight prompts of ten positions, eight of which were run before: one batch, not eight."""
    prompt = torch.zeros(10, 1)
    num_batches = [
        len(fill_batches(chunks, FIRST_SIZE, TILE_SIZE, max_columns, wide=max_columns > TILE_SIZE))
        for begin in (0, 8)
        for chunks in [[PromptRange(slot, prompt, begin, 10) for slot in range(8)]]
        for max_columns in (16, 64)
    ]
    assert (FIRST_SIZE, TILE_SIZE) == (8, 16)
    assert num_batches == [5, 2, 1, 1]


def test_tiles_of_a_prompt_share_wide_batches_only() -> None:
    """A prompt of 35 positions has tiles of 8, 16 and 11; one of 70 fills a batch but for 8."""
    sizes = [
        [
            batch.num_columns
            for batch in fill_batches(
                [PromptRange(0, torch.zeros(length, 1), 0, length)], 8, 16, max_columns, wide=wide
            )
        ]
        for length in (35, 70)
        for max_columns, wide in ((16, False), (64, True))
    ]
    assert sizes == [[8, 16, 11], [35], [8, 16, 16, 16, 14], [56, 14]]


@given(st.integers(0, 100))
def test_no_further_whole_tile_fits(num_positions: int) -> None:
    num_tiled = num_tiled_positions(num_positions, FIRST_SIZE, TILE_SIZE)
    assert num_positions - num_tiled < (TILE_SIZE if num_positions >= FIRST_SIZE else FIRST_SIZE)
    assert num_tiled in {tile_begin(tile) for tile in range(8)}


@given(st.integers(0, 5), st.integers(1, 100), st.integers(0, 120))
def test_a_chunk_ends_at_a_tile_and_within_the_budget(tile: int, count: int, budget: int) -> None:
    begin = tile_begin(tile)
    end = chunk_end(begin, begin + count, budget, FIRST_SIZE, TILE_SIZE)
    tile_ends = {tile_begin(i) for i in range(20)} | {begin + count}
    assert begin < end <= begin + count and end in tile_ends
    assert end - begin <= budget or end == min(tile_begin(tile + 1), begin + count)
    if end < begin + count:
        following = min(other for other in tile_ends if other > end)
        assert following - begin > budget, "another tile would fit"
