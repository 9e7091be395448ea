"""Greedy codes of the precise build, whose activations are nearly float32, against plain torch.

Plain torch in float32 gets the kernel's codes as its history, so every frame is compared. Where the
kernel chooses another code, torch's logits show how near a tie that was.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from bench.step import random_model
from megakernel_common.checkpoint import map_leaves
from megakernel_tts import Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.backends.reference import Reference
from megakernel_tts.kernels.decode import DecodeVariant, load_decode_kernels
from megakernel_tts.loader import LoadedModel, load_checkpoint
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.random_checkpoint import Size, write_checkpoint
from megakernel_tts.model.weights import Model
from tests.backends.test_teacher_forcing import kernel_logits, torch_logits
from tests.comparison import SIZES, Comparison, MakeComparison, next_frame
from tests.emulator import EmulatedModule

PRECISE = DecodeVariant(precise=True)
_GREEDY = Sampling.greedy(seed=0, repetition_penalty=1.0)  # the largest logit decides
_MIN_GAIN = 50  # the least factor by which the errors are smaller than those of bfloat16


@dataclass(frozen=True)
class Mismatch:
    """A code that plain torch would not have chosen.

    Attributes:
        frame: Its frame.
        group: Its codebook.
        code: The kernel's choice.
        expected: Plain torch's.
        margin: By how much plain torch prefers its own, in deviations of its logits.
    """

    frame: int
    group: int
    code: int
    expected: int
    margin: float


@dataclass(frozen=True)
class SpokenFrames:
    """The kernel's frames, and their comparison.

    Attributes:
        codes: [frames, groups].
        exact: Plain torch's logits for the talker, [frames, vocab].
        error: The largest of the talker's logits and of the last codebook's, as by `worst`.
        mismatches: The first one of each frame that has any.
    """

    codes: Tensor
    exact: Tensor
    error: float
    mismatches: list[Mismatch]


def worst(logits: Tensor, exact: Tensor) -> float:
    """The largest error of logits [.., ids], in deviations of the exact ones."""
    return float(((logits - exact) / exact.std(-1, keepdim=True)).abs().max())


@torch.inference_mode()
def speak(
    kernel: Megakernel, model: Model, config: ModelConfig, pad: Tensor, prompt: Tensor, frames: int
) -> SpokenFrames:
    """Generates greedy codes, and compares each with plain torch's choice after the same history.

    Args:
        kernel: Of the precise build.
        model: Its weights in float32.
        config: Their numbers.
        pad: [hidden] in float32.
        prompt: [positions, hidden].
        frames: Number of frames.
    """
    logits: list[Tensor] = []  # of a frame, codebook by codebook

    def trace(phase: str, tensor: Tensor) -> None:
        if phase != "hidden":
            logits.append(tensor[0])

    positions = len(prompt) + frames
    exact = Reference(model, config, pad, num_slots=1, max_positions=positions, trace=trace)
    for backend, x in ((kernel, prompt), (exact, prompt.float())):
        backend.prefill([PrefillRequest(0, x, _GREEDY)])
        backend.feed(0, x[:0], True)
    generated: list[list[int]] = []
    talkers: list[Tensor] = []
    error = 0.0
    mismatches: list[Mismatch] = []
    for frame in range(frames):
        codes, first, last = next_frame(kernel)
        logits.clear()
        expected = exact._make_frame([0])[0][0].tolist()
        group = next((g for g, code in enumerate(codes) if code != expected[g]), None)
        if group is not None:
            row, code, best = logits[group], codes[group], expected[group]
            margin = float((row[best] - row[code]) / row.std())
            mismatches.append(Mismatch(frame, group, code, best, margin))
        else:  # the last logits follow the same codes
            error = max(error, worst(last, logits[-1]))
        error = max(error, worst(first, logits[0]))
        exact._state[0].codes = torch.tensor(codes)  # replaces its own choice
        generated.append(codes)
        talkers.append(logits[0])
    kernel.release(0)
    return SpokenFrames(torch.tensor(generated), torch.stack(talkers), error, mismatches)


def check(speech: SpokenFrames) -> None:
    """Prints the first mismatch; every mismatch must be a near tie.

    The errors of two logits add up, and errors that were not measured may be twice as large as
    the measured ones. So a margin is at most four times the largest error.
    """
    first = speech.mismatches[0] if speech.mismatches else "none"
    print(f"{len(speech.codes)} frames, {len(speech.mismatches)} with a mismatch; logits within")
    print(f"{speech.error:.1e} of their deviation; the first: {first}")
    assert all(m.margin <= 4 * speech.error for m in speech.mismatches), speech.mismatches


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the emulator")
def test_emulated_codes_differ_at_near_ties_only(
    load: Callable[..., LoadedModel], comparison: MakeComparison
) -> None:
    loaded = load("custom_voice", "1b7", shallow=True)  # with an input projection
    kernels = ("generate_single", "prefill_medium")
    b = Comparison(loaded, EmulatedModule(loaded.config, PRECISE, kernels=kernels), 2)
    plain = comparison("1b7", blocks=2, shallow=True).kernel
    speech = speak(b.kernel, b.exact.model, b.config, b.pad.float(), b.prompt[:8], 2)
    check(speech)
    rounded = worst(kernel_logits(plain, b.prompt[:8], speech.codes[:-1]), speech.exact)
    print(f"the ordinary build's within {rounded:.1e}")
    assert _MIN_GAIN * speech.error < rounded


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "frames"), [("0b6", 500), ("1b7", 500), ("0.6B", 100), ("1.7B", 100)]
)
def test_gpu_codes_differ_at_near_ties_only(size: str, frames: int) -> None:
    command = [sys.executable, "-m", "tests.backends.test_greedy_codes", size, str(frames)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])


def _tiny(size: Size) -> tuple[Model, ModelConfig, Tensor, Tensor]:
    """bfloat16 weights on the GPU, their config, the text vector of padding and a prompt."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), "custom_voice", size, codes=256)
        loaded = load_checkpoint(Path(folder), torch.device("cpu"), torch.float32, 1)
        with closing(loaded.engine):
            b = Comparison(loaded, None)
    return b.half.model, b.config, b.pad, b.prompt


def _large(size: str) -> tuple[Model, ModelConfig, Tensor, Tensor]:
    """The same for a released size."""
    model, config = random_model(size)
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = config.talker.stack.hidden_size
    noise = 0.05 * torch.randn(11, hidden, device="cuda", generator=generator).bfloat16()
    return model, config, noise[10], noise[:10].cpu()


@torch.inference_mode()
def main(size: str, frames: int) -> None:
    """Generates on the GPU; prints the errors of torch's bfloat16 for comparison."""
    half, config, pad, prompt = _tiny(cast(Size, size)) if size in SIZES else _large(size)
    precise = load_decode_kernels(config, pad.device, PRECISE)
    kernel = Megakernel(half, config, pad, num_slots=1, max_positions=1024, kernels=precise)
    exact = map_leaves(half, lambda t: t.float())
    speech = speak(kernel, exact, config, pad.float(), prompt, frames)
    check(speech)
    rounded = worst(torch_logits(half, config, pad, prompt, speech.codes[:-1]), speech.exact)
    print(f"torch's in bfloat16 within {rounded:.1e}")
    assert _MIN_GAIN * speech.error < rounded


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
