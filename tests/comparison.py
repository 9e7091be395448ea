"""A kernel beside plain torch, for the tests of both."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megakernel_tts import Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.backends.reference import Reference
from megakernel_tts.loader import Loaded
from megakernel_tts.model.checkpoint import map_leaves
from megakernel_tts.model.config import ModelConfig
from tests.emulator import EmulatedOps

MODELS = {"0b6": "ModelTiny", "1b7": "ModelTinyWide"}
SAMPLINGS = [
    Sampling(seed=1),
    Sampling.greedy(seed=2),
    Sampling(seed=2**40 + 3, top_p=0.8, temperature=1.2, repetition_penalty=1.5),
]


class Comparison:
    """A kernel beside the reference in float32 and in bfloat16, on the same rounded weights."""

    def __init__(self, loaded: Loaded, ops: EmulatedOps | None) -> None:
        """Without emulated operators, all of it is on the GPU."""
        backend = loaded.engine.backend
        assert isinstance(backend, Reference)
        self.config: ModelConfig = loaded.config
        self.ops = ops
        device = "cuda" if ops is None else "cpu"
        half = map_leaves(backend.model, lambda w: w.to(device, torch.bfloat16))
        exact = map_leaves(half, lambda w: w.float())
        prompt_builder = loaded.engine.prompt_builder
        pad = self.pad = prompt_builder.pad[0].to(device, torch.bfloat16)
        self.kernel = Megakernel(half, self.config, pad, num_slots=4, max_positions=64, ops=ops)
        self.half = Reference(half, self.config, pad, num_slots=1, max_positions=64)
        self.exact = Reference(exact, self.config, pad.float(), num_slots=1, max_positions=64)
        self.norm = exact.talker.stack.norm
        with torch.inference_mode():
            prefix = prompt_builder.prefix("ryan", "english", None)
            self.text = torch.cat([prompt_builder.embed_text([5, 9, 200]), prompt_builder.eos]).to(
                pad.dtype
            )
            prompt = prompt_builder.build(prefix, [7], "streaming", ended=True)
            assert prompt is not None
            self.prompt = prompt.prefill.to(pad.dtype)

    def capturing(self, heads: Sequence[tuple[int, int]]) -> Megakernel:
        """Another kernel, which tells the scores of these heads."""
        return Megakernel(
            self.half.model,
            self.config,
            self.pad,
            num_slots=4,
            max_positions=64,
            captured_heads=heads,
            ops=self.ops,
        )

    def begin(self, slot: int, stream: int) -> None:
        """Streams have prompts of different lengths."""
        self.kernel.prefill(
            [PrefillRequest(slot, self.prompt[stream:].contiguous(), SAMPLINGS[stream])]
        )
        self.kernel.feed(slot, self.text, True)


MakeComparison = Callable[..., Comparison]


def next_frame(kernel: Megakernel) -> tuple[list[int], Tensor, Tensor]:
    """The next codes of slot 0, and the logits that the first and the last were drawn from."""
    kernel._launch([0], 1)
    kernel._wait(1)
    [[(_, *codes)]] = kernel._collect(1, 1)
    state, talker = kernel._state[0], kernel._config.talker
    state.codes = [int(code) for code in codes]
    state.num_frames += 1
    places = zip(
        kernel._ops.logits_at(kernel._model), (talker.vocab_size, talker.num_codes), strict=True
    )
    first, last = (kernel._memory[7][at : at + count] & ~3 for at, count in places)
    return state.codes, first.view(torch.float32), last.view(torch.float32)
