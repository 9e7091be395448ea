"""The talker's logits frame by frame, with given codes as its input.

With sampled codes, kernel and plain torch would diverge after the first near tie.
"""

import pytest
import torch
from torch import Tensor

from bench.step import random_model
from megakernel_common.checkpoint import map_leaves
from megakernel_tts import Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.backends.reference import Reference
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.weights import Model
from tests.comparison import MakeComparison, next_frame

_GREEDY = Sampling.greedy(seed=0)


def kernel_logits(kernel: Megakernel, prompt: Tensor, codes: Tensor) -> Tensor:
    """Logits [frames + 1, vocab] after a prompt and after each of the frames [n, groups]."""
    kernel.prefill([PrefillRequest(0, prompt, _GREEDY)])
    kernel.feed(0, prompt[:0], True)
    state, logits = kernel._state[0], list[Tensor]()
    for frame in [state.codes, *codes.tolist()]:
        state.codes = frame  # replaces what it sampled
        logits.append(next_frame(kernel)[1])
    kernel.release(0)
    return torch.stack(logits)


def torch_logits(
    model: Model, config: ModelConfig, pad: Tensor, prompt: Tensor, codes: Tensor
) -> Tensor:
    """The same from plain torch in the type of the weights, all positions at once."""
    length = len(prompt) + len(codes)
    reference = Reference(model, config, pad, num_slots=1, max_positions=length)
    x = torch.cat([prompt.to(pad), model.embeddings.embed_frames(codes.to(pad.device)) + pad])
    hidden = reference._run_talker([0], x[None], [0])[0, len(prompt) - 1 :]
    return (hidden @ model.talker.head.T).float()


@torch.inference_mode()
def compare(
    kernel: Megakernel, half: Model, config: ModelConfig, pad: Tensor, prompt: Tensor, frames: int
) -> None:
    """At every frame, the kernel's error is at most twice that of bfloat16 in torch."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(
        config.talker.num_codes, (frames, config.talker.num_groups), generator=generator
    )
    exact_model = map_leaves(half, lambda t: t.float())
    exact = torch_logits(exact_model, config, pad.float(), prompt, codes)
    plain = (torch_logits(half, config, pad, prompt, codes) - exact).norm(dim=-1)
    ours = (kernel_logits(kernel, prompt, codes) - exact).norm(dim=-1)
    worst = (ours / plain).max()
    print(f"{frames} frames: errors {ours.mean():.4f} against {plain.mean():.4f} of torch's, at")
    print(f"worst {worst:.2f} times; logits {exact.norm(dim=-1).mean():.1f}")
    assert (0 < plain).all() and (plain < 0.2 * exact.norm(dim=-1)).all()
    assert worst <= 2


@pytest.mark.parametrize("size", ["0b6", "1b7"])
def test_logit_errors_stay_below_twice_those_of_bfloat16(
    comparison: MakeComparison, size: str
) -> None:
    b = comparison(size, blocks=2)
    compare(b.kernel, b.half.model, b.config, b.pad, b.prompt, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["0.6B", "1.7B"])
def test_logit_errors_of_500_frames_stay_below_twice_those_of_bfloat16(size: str) -> None:
    half, config = random_model(size)
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = config.talker.stack.hidden_size
    noise = 0.05 * torch.randn(11, hidden, device="cuda", generator=generator).bfloat16()
    prompt, pad = noise[:10].cpu(), noise[10]
    kernel = Megakernel(half, config, pad, num_slots=1, max_positions=1024)
    compare(kernel, half, config, pad, prompt, 500)
