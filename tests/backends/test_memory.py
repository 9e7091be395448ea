"""Packed weights replace the originals; the GPU memory of a loaded model."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megakernel_common.checkpoint import leaves, map_leaves
from megakernel_tts import TTS, Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.model.random_released import write_released_checkpoint
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
