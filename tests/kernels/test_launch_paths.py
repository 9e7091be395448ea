"""Both paths from sources to launches on a GPU: nvcc and torch operators, NVRTC and the driver."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megakernel_common.kernels import build, nvrtc
from megakernel_common.kernels.loader import LaunchPath
from megakernel_tts.backends.decode_buffers import PHASES
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.kernels.decode import DecodeVariant, load_decode_kernels
from megakernel_tts.loader import LoadedModel
from tests.comparison import SAMPLINGS, Comparison

pytestmark = pytest.mark.gpu
PATHS: tuple[LaunchPath, ...] = ("extension", "nvrtc")
NUM_FRAMES = 16


@pytest.fixture(autouse=True)
def _both_paths() -> None:
    for reason in (build.obstacle(), nvrtc.obstacle()):
        if reason:
            pytest.skip(reason)


def generate(b: Comparison, kernel: Megakernel) -> list[Tensor]:
    """Hidden states of prompts of several lengths, codes of one stream, codes of three."""
    b.kernel = kernel
    b.begin(3, 0)
    (solo,) = kernel.step([3], NUM_FRAMES)
    kernel.release(3)
    for slot in range(3):
        b.begin(slot, slot)
    hidden = kernel._buffers.prompt_hidden.cpu()
    return [hidden, solo.codes, *(frames.codes for frames in kernel.step([0, 1, 2], NUM_FRAMES))]


@pytest.mark.parametrize("size", ["0b6", "1b7", "demo"])
def test_both_paths_generate_the_same_codes(load: Callable[..., LoadedModel], size: str) -> None:
    loaded = load("custom_voice", size)
    results: list[list[Tensor]] = []
    for path in PATHS:
        b = Comparison(loaded, None, path=path)
        results.append(generate(b, b.kernel))
    assert len(results[0][1]) > 1 and len(SAMPLINGS) == 3
    for by_extension, by_nvrtc in zip(*results, strict=True):
        assert torch.equal(by_extension, by_nvrtc)


@pytest.mark.parametrize("path", PATHS)
def test_the_profiling_build_generates_the_same_codes_and_counts_cycles(
    load: Callable[..., LoadedModel], path: LaunchPath
) -> None:
    b = Comparison(load("custom_voice", "0b6"), None, path=path)
    expected = generate(b, b.kernel)
    assert not b.kernel._buffers.phase_times.any()
    kernels = load_decode_kernels(b.config, b.pad.device, DecodeVariant(profile=True), path)
    model, config, pad = b.half.model, b.config, b.pad
    profiled = Megakernel(model, config, pad, num_slots=4, max_positions=64, kernels=kernels)
    for found, plain in zip(generate(b, profiled), expected, strict=True):
        assert torch.equal(found, plain)
    counted = profiled._buffers.phase_times.sum((0, 2)) > 0
    missing = {phase for phase, was_counted in zip(PHASES, counted, strict=True) if not was_counted}
    assert missing == {"attention_combine", "input_projection"}  # one span, equal widths


def test_the_precise_build_is_the_same_on_both_paths(load: Callable[..., LoadedModel]) -> None:
    b = Comparison(load("custom_voice", "0b6"), None)
    results: list[list[Tensor]] = []
    for path in PATHS:
        kernels = load_decode_kernels(b.config, b.pad.device, DecodeVariant(precise=True), path)
        model, config, pad = b.half.model, b.config, b.pad
        precise = Megakernel(model, config, pad, num_slots=4, max_positions=64, kernels=kernels)
        results.append(generate(b, precise))
    for by_extension, by_nvrtc in zip(*results, strict=True):
        assert torch.equal(by_extension, by_nvrtc)


def test_launches_follow_the_current_stream(load: Callable[..., LoadedModel]) -> None:
    """A launch on another stream waits for what that stream was given before, in both paths."""
    for path in PATHS:
        b = Comparison(load("custom_voice", "0b6"), None, path=path)
        expected = generate(b, b.kernel)
        for slot in range(3):
            b.kernel.release(slot)
        with torch.cuda.stream(torch.cuda.Stream()):
            found = generate(b, b.kernel)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


SCRIPT = """
import torch
from megakernel_tts import TTS, Sampling
from megakernel_common.kernels.loader import support

found = support(torch.device("cuda", 0))
assert found.path == "nvrtc", found
with TTS.load("demo", device="cuda") as tts:
    assert tts._loaded.engine.backend.name == "megakernel"
    speech = tts.say("Hello.", sampling=Sampling(seed=0, max_frames=8))
    print(len(speech.codes), "frames")
"""


def test_a_machine_without_compilers_synthesises(tmp_path: Path) -> None:
    """In a fresh process with an empty PATH and an empty cache."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CUDA_HOME", "CUDA_PATH", "CXX", "TORCH_EXTENSIONS_DIR")
    }
    environment |= {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("frames\n")
    assert list((tmp_path / "cache" / "megakernel-tts" / "kernels").glob("*.cubin"))
