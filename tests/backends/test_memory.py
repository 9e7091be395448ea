"""Packed weights replace the originals: what a loaded model takes of the GPU's memory."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megakernel_tts import TTS, Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.model.checkpoint import leaves, map_leaves
from megakernel_tts.model.random_released import write_released_checkpoint
from tests.comparison import MakeComparison


def test_packed_weights_replace_the_originals_and_embeddings_are_shared(
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
    held = {part.data_ptr() for part in kernel._buffers._references}
    assert {t.data_ptr() for t in (embeddings.codec, *embeddings.group_tables)} <= held


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "most"), [("0.6B", 5e9), ("1.7B", 8e9)])
def test_a_released_size_with_eight_slots_of_2048_positions(
    tmp_path: Path, size: str, most: float
) -> None:
    """Not even while it loads does it take more."""
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
    spoken = (torch.cuda.max_memory_allocated() - before) / 1e9
    print(f"{size}: {loaded:.2f} GB loaded, {peak:.2f} while loading, {spoken:.2f} while speaking")
    assert len(frames) == 8
    assert spoken < most / 1e9
