"""How prompts share the passes of a launch."""

from collections import defaultdict

import torch
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts.backends.prefill_batching import PrefillSegment, pack_passes, whole_tiles
from tests.emulator import MAX_PREFILL_COLUMNS as WIDE
from tests.emulator import MAX_STREAMS as COLUMNS

# Lengths of prompts, and how many blocks of each were run before.
prompts = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 4)), min_size=1, max_size=8)


def _begin(block: int) -> int:
    return COLUMNS + WIDE * (block - 1) if block else 0


@given(prompts)
def test_blocks_stay_whole_and_in_order_and_nothing_is_lost(given: list[tuple[int, int]]) -> None:
    parts = [
        PrefillSegment(slot, 1000.0 * slot + torch.arange(length)[:, None], _begin(blocks), length)
        for slot, (length, blocks) in enumerate(given)
        if _begin(blocks) < length
    ]
    if not parts:
        return
    rows, passes = pack_passes(parts, COLUMNS, WIDE)
    row, seen = 0, defaultdict[int, list[int]](list)
    for batch in passes:
        columns, ends = batch.num_columns, batch.prompt_end_mask
        assert 1 <= columns <= WIDE and batch.first_row == row and ends < 1 << columns
        places = [(c.slot, c.position, c.first_column) for c in batch.columns[:columns]]
        for c, (slot, position, first) in enumerate(places):
            assert rows[row + c].tolist() == [1000.0 * slot + position]
            assert (ends >> c & 1) == (position == given[slot][0] - 1)
            # The columns of its slot in this pass are those of its block so far, side by side.
            ours = [i for i, place in enumerate(places) if place[0] == slot]
            begins = {whole_tiles(places[i][1], COLUMNS, WIDE) for i in ours}
            assert first == ours[0] and begins == {position - (c - first)}
            seen[slot].append(position)
        row += columns
    assert row == len(rows)
    assert seen == {part.slot: list(range(part.begin, part.end)) for part in parts}


def test_what_is_left_of_short_prompts_shares_passes() -> None:
    """Eight prompts of ten positions, of which eight were run before: one pass, not eight."""
    prompt = torch.zeros(10, 1)
    _, cold = pack_passes([PrefillSegment(slot, prompt, 0, 10) for slot in range(8)], COLUMNS, WIDE)
    _, warm = pack_passes([PrefillSegment(slot, prompt, 8, 10) for slot in range(8)], COLUMNS, WIDE)
    assert (len(cold), len(warm)) == (5, 1)


@given(st.integers(0, 100))
def test_whole_blocks_are_as_many_as_fit(positions: int) -> None:
    assert positions - whole_tiles(positions, COLUMNS, WIDE) < (
        WIDE if positions >= COLUMNS else COLUMNS
    )
    assert whole_tiles(positions, COLUMNS, WIDE) in {_begin(block) for block in range(8)}
