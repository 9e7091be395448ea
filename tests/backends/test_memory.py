"""Packed weights replace the originals; the KV cache must fit; the GPU memory of a loaded model."""

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megakernel_common.checkpoint import leaves, map_leaves
from megakernel_tts import TTS, Sampling
from megakernel_tts.backends import megakernel
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.memory import DecodeMemory, choose_num_pages, decode_memory
from megakernel_tts.kernels.decode import DecodeKernels
from megakernel_tts.model.config import read_model_config
from megakernel_tts.model.random_released import (
    SIZES,
    write_released_checkpoint,
    write_released_config,
)
from tests.comparison import MakeComparison


def test_packing_frees_the_original_weights_and_shares_the_embeddings(
    comparison: MakeComparison,
) -> None:
    b = comparison("1b7")
    model = map_leaves(b.half.model, Tensor.clone)
    networks = (model.talker, model.predictor)
    matrices = [weakref.ref(t) for t in leaves(networks) if t.dim() == 2]
    embeddings = model.embeddings
    kernel = Megakernel(
        model, b.config, b.pad, num_slots=1, max_positions=64, kernels=b.kernel._kernels
    )
    del model, networks
    assert len(matrices) > 30 and not any(matrix() is not None for matrix in matrices)
    addresses = {part.data_ptr() for part in kernel._buffers._references}
    assert {t.data_ptr() for t in (embeddings.codec, *embeddings.group_tables)} <= addresses


def test_the_formula_counts_what_the_backend_allocates(comparison: MakeComparison) -> None:
    b = comparison("1b7")
    kernel = Megakernel(
        b.half.model,
        b.config,
        b.pad,
        num_slots=3,
        max_positions=300,
        cache_positions=500,
        captured_heads=[(0, 1)],
        kernels=b._kernels,
    )
    buffers, embeddings = kernel._buffers, b.half.model.embeddings
    shared = {table.data_ptr() for table in (embeddings.codec, *embeddings.group_tables)}
    shared |= {host.ctypes.data for host in (buffers.frames, buffers.num_published)}
    tensors = {
        tensor.data_ptr(): tensor.nbytes
        for tensor in (*buffers._references, buffers.workspace, buffers.seen_codes)
        if tensor.data_ptr() not in shared
    }
    expected = decode_memory(b.config, b._kernels, 3, 300, 1).total(4)
    assert sum(tensors.values()) == pytest.approx(expected, rel=1e-3)


# --- the number of pages ---

_GB = 10**9
_MEMORY = DecodeMemory(weights=3 * _GB, slots=_GB // 2, launches=_GB // 10, page=14 << 20)


def _num_pages(free: float | None, cache_positions: int | None = None, num_slots: int = 64) -> int:
    return choose_num_pages(
        _MEMORY,
        num_slots=num_slots,
        max_positions=2048,
        page_size=128,
        cache_positions=cache_positions,
        free_bytes=None if free is None else int(free * _GB),
    )


def test_the_cache_holds_all_that_slots_can_use_if_memory_allows() -> None:
    assert _num_pages(None) == _num_pages(80) == 64 * 16
    assert _num_pages(80, num_slots=1) == 16


def test_the_cache_takes_the_memory_that_is_left(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        num_pages = _num_pages(10)
    assert "holds 51,072 positions instead of 131,072 for 64 slots of 2,048" in caplog.text
    assert num_pages * 128 == 51_072
    used = _MEMORY.total(num_pages)
    assert 9.4 * _GB < used < 9.5 * _GB, "half a GiB is left to work"


def test_the_cache_has_the_positions_that_were_asked_for() -> None:
    assert _num_pages(80, 64 * 500) == 250
    assert _num_pages(80, 1 << 40) == 64 * 16, "more could not be used"
    assert _num_pages(80, 2048) == 16


def test_a_cache_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"needs 6\.8 GiB of GPU memory for 64 slots: weights 2\.8, 32,000 positions of keys "
        r"and values 3\.4 \(112 KiB each\), .* 7\.0 GiB are free\. Use fewer slots or cache_posit",
    ):
        _num_pages(7.5, 64 * 500)
    assert _num_pages(8.1, 64 * 500) == 250
    with pytest.raises(ValueError, match=r"64 slots: .* 8,192 positions"):
        _num_pages(4.5)  # less than a page for each slot
    with pytest.raises(ValueError, match=r"1 slots: .* 2,048 positions"):
        _num_pages(4.2, num_slots=1)  # less than one stream may need
    with pytest.raises(ValueError, match=r"cache_positions is 2,047; one stream may have 2,048"):
        _num_pages(80, 2047)


def test_a_kernel_checks_the_free_memory(
    comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = comparison("0b6")

    def load(free_bytes: int) -> int:
        monkeypatch.setattr(megakernel, "free_memory", lambda _: free_bytes)
        kernel = Megakernel(
            b.half.model, b.config, b.pad, num_slots=4, max_positions=256, kernels=b._kernels
        )
        return len(kernel._buffers.keys)

    assert load(1 << 40) == 8
    memory = decode_memory(b.config, b._kernels, 4, 256, 0)
    least = memory.total(4) + (512 << 20)
    assert load(least + 2 * memory.page) == 6
    with pytest.raises(ValueError, match="Use fewer slots or cache_positions"):
        load(least - 1)


def test_64_streams_of_the_large_model_at_500_positions_take_less_than_12_gb(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    codec = 2.8e9  # weights, and buffers for calls of 256 frames of 64 slots
    _, hidden, intermediate = SIZES["1.7B"]
    source = checkpoint("custom_voice", "1b7") / "config.json"
    config = read_model_config(
        write_released_config(source, tmp_path / "config.json", hidden, intermediate)
    )
    info = SimpleNamespace(page_size=128, kv_width=128)
    kernels = SimpleNamespace(info=info, max_streams=64, num_workspace_values=8 << 20)
    memory = decode_memory(config, cast(DecodeKernels, cast(Any, kernels)), 64, 2048, 4)
    assert memory.page == 128 * 112 * 1024
    embeddings = 2 * hidden * (3072 + 15 * 2048 + 2 * 2048)  # of codes, and the text's projections
    total = memory.total(64 * 4) + embeddings + codec
    print(f"{total / 1e9:.2f} GB")
    assert 9e9 < total < 12e9


@pytest.mark.gpu
def test_64_slots_of_the_large_model_are_loaded_in_12_gb(tmp_path: Path) -> None:
    write_released_checkpoint(tmp_path, "1.7B", torch.device("cuda"))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with TTS.load(tmp_path, device="cuda", slots=64, cache_positions=64 * 512) as tts:
        frames = tts.say("Hello.", sampling=Sampling(seed=0, max_frames=8)).codes
    used = torch.cuda.max_memory_allocated() - before
    print(f"{used / 1e9:.2f} GB")
    assert len(frames) == 8
    assert used < 12e9


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "max_bytes"), [("0.6B", 5e9), ("1.7B", 8e9)])
def test_memory_of_a_released_size_is_bounded(tmp_path: Path, size: str, max_bytes: float) -> None:
    """Eight slots of 2,048 positions. The peak while loading counts as well."""
    write_released_checkpoint(tmp_path, size, torch.device("cuda"))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with TTS.load(tmp_path, device="cuda", slots=8) as tts:
        backend = tts._loaded.engine.backend
        assert (backend.name, backend.num_slots, backend.max_positions) == ("megakernel", 8, 2048)
        loaded, peak = (
            (read() - before) / 1e9
            for read in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated)
        )
        frames = tts.say("Hello.", sampling=Sampling(seed=0, max_frames=8)).codes
    used = (torch.cuda.max_memory_allocated() - before) / 1e9
    print(f"{size}: {loaded:.2f} GB loaded, {peak:.2f} while loading, {used:.2f} while speaking")
    assert len(frames) == 8
    assert used < max_bytes / 1e9
