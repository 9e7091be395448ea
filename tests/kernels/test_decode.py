"""How prefill batches are divided into launches."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts.backends.prefill_batching import PromptRange, fill_batches, pack_batches
from megakernel_tts.kernels.decode import DecodeKernels
from megakernel_tts.kernels.structs import PrefillBatch

_SPAN_SIZE, _MAX_STREAMS, _MAX_COLUMNS, _NARROW_COLUMNS = 128, 8, 16, 2


@pytest.fixture(scope="module")
def kernels() -> DecodeKernels:
    module: Any = SimpleNamespace(
        read=lambda symbol, struct: struct(
            max_streams=_MAX_STREAMS, small_prefill_columns=_NARROW_COLUMNS, span_size=_SPAN_SIZE
        )
    )
    gpu: Any = SimpleNamespace(num_multiprocessors=1, l2_bytes=0)
    return DecodeKernels(module, gpu)


def spans_by_column(batch: PrefillBatch) -> dict[int, int]:
    """The spans of the positions before a column's tile, at least one, of each used column."""
    columns = batch.columns[: batch.num_columns]
    begins = [columns[column.first_column].position for column in columns]
    return {c: max(1, (begin + _SPAN_SIZE - 1) // _SPAN_SIZE) for c, begin in enumerate(begins)}


def decreases(batches: list[PrefillBatch]) -> bool:
    """Whether a column of the last batch has fewer spans than in a batch before it."""
    *earlier, last = map(spans_by_column, batches)
    return any(last[c] < spans.get(c, 0) for spans in earlier for c in last)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 320)), min_size=1, max_size=6))
def test_a_launch_ends_only_where_its_kernel_changes_or_spans_decrease(
    kernels: DecodeKernels, prompts: list[tuple[int, int]]
) -> None:
    ranges = [
        PromptRange(slot, torch.zeros(begin + length, 1), begin, begin + length)
        for slot, (tiles, length) in enumerate(prompts)
        for begin in [_MAX_STREAMS + (tiles - 1) * _MAX_COLUMNS if tiles else 0]
    ]
    packed = pack_batches(fill_batches(ranges, _MAX_STREAMS, _MAX_COLUMNS, _MAX_COLUMNS))
    launches: list[tuple[str, list[PrefillBatch]]] = []
    batches = iter(packed)
    num_positions = max(one.end for one in ranges)
    for kernel, num_batches in kernels._prefill_launches(packed, num_positions):
        launches.append((kernel, [next(batches) for _ in range(num_batches)]))
    assert next(batches, None) is None
    for kernel, launch in launches:
        assert {kernels._prefill_kernel(batch.num_columns) for batch in launch} == {kernel}
        assert not any(decreases(launch[: i + 1]) for i in range(len(launch)))
    for (kernel, launch), (next_kernel, next_launch) in pairwise(launches):
        assert kernel != next_kernel or decreases([*launch, next_launch[0]])
