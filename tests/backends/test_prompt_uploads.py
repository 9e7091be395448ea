"""Prompts where the kernels read them: copied, or in memory that is not written too early."""

import ctypes
import random
from collections.abc import Callable

import pytest
import torch

from megakernel_tts.backends.prefill_batching import Batch, PromptRange, fill_batches, pack_batches
from megakernel_tts.backends.prompt_uploads import PromptUploads, UploadedPrompts
from megakernel_tts.backends.protocol import PrefillRequest
from tests.comparison import SAMPLINGS, MakeComparison

HIDDEN, READ_COLUMNS = 8, 2
CPU = torch.device("cpu")


def _batches(rng: random.Random) -> list[Batch]:
    """Tiles of one or two prompts, which seldom have more columns than are read."""
    chunks: list[PromptRange] = []
    for slot in range(rng.choice([1, 1, 2])):
        num_positions, count = rng.randint(4, 20), rng.choice([1, 1, 1, 2, 4])
        prompt = torch.randn(num_positions, HIDDEN).bfloat16()
        chunks.append(PromptRange(slot, prompt, num_positions - count, num_positions))
    return fill_batches(chunks, 8, 16, 16)


def _check(uploaded: UploadedPrompts, batches: list[Batch]) -> None:
    """Checks what is at the addresses."""
    packed = pack_batches(batches)
    vectors = torch.cat([t.prompt[t.begin : t.end] for batch in batches for t in batch.tiles])
    num_bytes = vectors.numel() * vectors.itemsize
    assert ctypes.string_at(uploaded.vectors, num_bytes) == bytes(vectors.view(torch.uint8).numpy())
    assert ctypes.string_at(uploaded.batches, ctypes.sizeof(packed)) == bytes(packed)


def test_no_prompt_is_overwritten_before_the_device_has_read_it() -> None:
    """Prefills of few and of many columns, and waits for the device, in random order."""
    rng, uploads = random.Random(0), PromptUploads(CPU, HIDDEN, READ_COLUMNS)
    for _ in range(200):
        unread: list[tuple[UploadedPrompts, list[Batch]]] = []
        for _ in range(rng.randint(1, 12)):
            batches = _batches(rng)
            unread.append((uploads.upload(batches, pack_batches(batches)), batches))
        for uploaded, batches in unread:
            _check(uploaded, batches)
        uploads.reuse()


@pytest.mark.parametrize(("num_columns", "is_copied"), [(1, False), (2, False), (3, True)])
def test_only_more_columns_than_the_smallest_kernel_takes_are_copied(
    num_columns: int, is_copied: bool
) -> None:
    uploads, addresses = PromptUploads(CPU, HIDDEN, READ_COLUMNS), list[int]()
    prompt = torch.randn(num_columns, HIDDEN).bfloat16()
    batches = fill_batches([PromptRange(0, prompt, 0, num_columns)], 8, 16, 16)
    for _ in range(2):
        uploaded = uploads.upload(batches, pack_batches(batches))
        addresses.append(uploaded.vectors)
        uploads.reuse()
    blocks = [block.data_ptr() for block in uploads._blocks]
    assert [address in blocks for address in addresses] == [not is_copied] * 2
    assert is_copied or addresses[0] == addresses[1], "the first block is written again"


def test_prompts_may_be_written_again_once_the_frames_behind_them_were_awaited(
    comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, calls = comparison("0b6"), list[str]()

    def record(owner: object, name: str) -> None:
        method: Callable[..., object] = getattr(owner, name)

        def call(*arguments: object) -> object:
            result = method(*arguments)
            calls.append(name)
            return result

        monkeypatch.setattr(owner, name, call)

    record(b.kernel, "_wait")
    record(b.kernel._prompt_uploads, "upload")
    record(b.kernel._prompt_uploads, "reuse")
    for slot in range(2):
        b.kernel.prefill([PrefillRequest(slot, b.prompt, SAMPLINGS[0])])
    b.kernel.step([0, 1], 1)
    assert calls == ["upload", "upload", "_wait", "reuse"]


def test_a_column_that_is_read_has_the_bits_of_one_that_is_copied(
    any_comparison: MakeComparison,
) -> None:
    """The last column of nine, alone and with the others; six times, so that memory is used up."""
    b = any_comparison("0b6")
    prompt = torch.cat([b.prompt, b.prompt])[:9].contiguous()
    b.kernel.prefill([PrefillRequest(0, prompt, SAMPLINGS[0])])
    expected = b.kernel._buffers.prompt_hidden[0].clone()
    b.kernel.prefill([PrefillRequest(1, prompt, SAMPLINGS[0])], 8)
    for num_read in (1, 2, 3, 4, 4, 4):
        b.kernel._buffers.prompt_hidden.zero_()
        b.kernel.prefill([PrefillRequest(1, prompt, SAMPLINGS[0], begin=8)])
        assert torch.equal(b.kernel._buffers.prompt_hidden[1], expected)
        assert b.kernel._prompt_uploads._num_used == num_read
