"""The megakernel: its phases on emulated instructions everywhere, the kernel itself on a GPU."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megakernel_tts import Sampling
from megakernel_tts.checkpoint import map_leaves
from megakernel_tts.config import ModelConfig
from megakernel_tts.cuda import Megakernel
from megakernel_tts.layers import rms_norm
from megakernel_tts.loader import Loaded, load_checkpoint
from megakernel_tts.reference import Reference
from tests.emulator import EmulatedOps

MODELS = {"0b6": "ModelTiny", "1b7": "ModelTinyWide"}
SAMPLINGS = [
    Sampling(seed=1),
    Sampling.greedy(seed=2),
    Sampling(seed=2**40 + 3, top_p=0.8, temperature=1.2, repetition_penalty=1.5),
]
sizes = pytest.mark.parametrize("size", MODELS)
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the emulator")


class Bench:
    """A kernel beside the reference in float32 and in bfloat16, on the same rounded weights."""

    def __init__(self, loaded: Loaded, ops: EmulatedOps) -> None:
        backend = loaded.engine.backend
        assert isinstance(backend, Reference)
        self.config: ModelConfig = loaded.config
        self.ops = ops
        half = map_leaves(backend.model, lambda w: w.bfloat16())
        exact = map_leaves(half, lambda w: w.float())
        prompter = loaded.engine.prompter
        pad = prompter.pad[0].bfloat16()
        self.kernel = Megakernel(half, self.config, pad, slots=4, positions=64, ops=ops)
        self.half = Reference(half, self.config, pad, slots=1, positions=64)
        self.exact = Reference(exact, self.config, pad.float(), slots=1, positions=64)
        self.norm = exact.talker.stack.norm
        with torch.inference_mode():
            prefix = prompter.prefix("ryan", "english", None)
            self.text = torch.cat([prompter.text([5, 9, 200]), prompter.eos]).bfloat16()
            prompt = prompter.start(prefix, [7], "streaming", ended=True)
            assert prompt is not None
            self.prompt = prompt.prefill.bfloat16()

    def begin(self, slot: int, stream: int) -> None:
        """Streams have prompts of different lengths."""
        self.kernel.prefill(slot, self.prompt[stream:].contiguous(), SAMPLINGS[stream], 0)
        self.kernel.feed(slot, self.text, True)

    def frames(self, slots: list[int], count: int) -> list[list[list[int] | None]]:
        """[slots][count] frames."""
        made = [self.kernel.step(slots) for _ in range(count)]
        return [[_codes(frames[i]) for frames in made] for i in range(len(slots))]

    def launch(self, slots: list[int], count: int) -> tuple[Tensor, list[int]]:
        """Frames [slots, count, why over and 16 codes] of one launch, and how many each made."""
        kernel, streams = self.kernel, len(slots)
        mail = kernel._mailbox[0] = torch.zeros(streams * count, 17, dtype=torch.int32)
        kernel._put(slots, [kernel._state[slot] for slot in slots])
        kernel._ops.generate(kernel._model, *kernel._lists(), count)
        return mail.view(streams, count, 17), kernel._mailbox[1][:streams].tolist()


def _codes(frame: Tensor | None) -> list[int] | None:
    return None if frame is None else frame.tolist()


@pytest.fixture(scope="module")
def bench(
    load: Callable[..., Loaded], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Bench]:
    folder = tmp_path_factory.mktemp("emulator")

    def make(size: str, blocks: int = 3) -> Bench:
        return Bench(load("custom_voice", size), EmulatedOps(MODELS[size], folder, blocks))

    return make


@sizes
def test_a_prompt_is_as_exact_as_bfloat16_in_torch(bench: Callable[..., Bench], size: str) -> None:
    b = bench(size)
    b.begin(0, 0)
    for reference, prompt in ((b.half, b.prompt), (b.exact, b.prompt.float())):
        reference.prefill(0, prompt, SAMPLINGS[0], 0)
    ours = rms_norm(b.kernel._hidden[0][None], b.norm, 1e-6)[0]
    exact = b.exact._state[0].hidden
    torchs = b.half._state[0].hidden.float()
    assert (ours - exact).abs().max() <= 1.2 * (torchs - exact).abs().max()
    assert (ours - exact).norm() <= 1.2 * (torchs - exact).norm()


@sizes
def test_streams_are_the_same_in_any_company(bench: Callable[..., Bench], size: str) -> None:
    """Alone or together, in any slot, on grids of any number of blocks, suspended in between."""
    alone: list[list[list[int] | None]] = []
    for stream in range(3):
        b = bench(size, blocks=1 + stream)
        b.begin(3 - stream, stream)
        alone += b.frames([3 - stream], 3)
    b = bench(size)
    for stream in range(3):
        b.begin(stream, stream)
    first = b.frames([0, 1, 2], 1)
    away = [b.kernel.suspend(slot) for slot in range(3)]
    for slot, suspended in zip((2, 3, 1), away, strict=True):
        b.kernel.resume(slot, suspended)
    rest = b.frames([2, 3, 1], 2)
    assert [one + more for one, more in zip(first, rest, strict=True)] == alone


def test_many_frames_of_a_launch_are_those_of_as_many_launches(bench: Callable[..., Bench]) -> None:
    b = bench("0b6")
    count = 3
    for stream in range(2):
        b.begin(stream, stream)
    one_by_one = b.frames([0, 1], count)
    for stream in range(2):
        b.kernel.release(stream)
        b.begin(stream, stream)
    frames, published = b.launch([0, 1], count)
    assert published == [count, count]
    assert frames[..., 1:].tolist() == one_by_one


def test_the_stop_flag_ends_a_stream_within_a_frame(bench: Callable[..., Bench]) -> None:
    b = bench("0b6")
    for stream in range(2):
        b.begin(stream, stream)
    b.kernel._mailbox[2][0] = 1
    frames, published = b.launch([0, 1], 3)
    assert published == [1, 3]
    assert frames[0, 0, 0] == 3  # kStopped in csrc/params.cuh
    assert frames[1, :, 0].tolist() == [0, 0, 0]


def test_the_draws_are_the_references(bench: Callable[..., Bench]) -> None:
    """With weights that make every logit plain, both draw the same code 0, whatever the rule."""
    b = bench("1b7")
    agreed = 0
    for seed in range(6):
        rule = Sampling(seed=seed, top_k=(0, 5, 50)[seed % 3], top_p=(1.0, 0.7)[seed % 2])
        b.kernel.prefill(0, b.prompt, rule, seed)
        b.exact.prefill(0, b.prompt.float(), rule, seed)
        ours, theirs = b.kernel.step([0])[0], b.exact.step([0])[0]
        assert ours is not None and theirs is not None
        agreed += int(ours[0] == theirs[0])
        b.kernel.release(0)
    assert agreed >= 5  # logits are rounded to bfloat16: a near tie may fall the other way


def test_text_that_has_not_arrived_and_prompts_that_do_not_fit(bench: Callable[..., Bench]) -> None:
    b = bench("0b6")
    b.kernel.prefill(0, b.prompt, SAMPLINGS[0], 0)
    b.kernel.step([0])
    with pytest.raises(RuntimeError, match="before the text of frame 0"):
        b.kernel.step([0])
    with pytest.raises(ValueError, match="64 does not fit 64"):
        b.kernel.prefill(1, torch.zeros(64, b.prompt.shape[1]).bfloat16(), SAMPLINGS[0], 0)


def test_not_finite_logits_are_an_error(bench: Callable[..., Bench]) -> None:
    b = bench("0b6")
    b.kernel.prefill(0, torch.full_like(b.prompt, torch.nan), SAMPLINGS[0], 0)
    with pytest.raises(FloatingPointError, match="not finite"):
        b.kernel.step([0])


def test_a_broken_neighbour_changes_nothing(bench: Callable[..., Bench]) -> None:
    """A step that raises leaves the streams as they were: what was drawn in it is not repeated."""
    b = bench("1b7")
    rule = Sampling(seed=1, repetition_penalty=50.0)
    b.kernel.prefill(0, b.prompt, rule, 0)
    b.kernel.feed(0, b.text, True)
    alone = b.frames([0], 3)[0]
    b.kernel.release(0)
    b.kernel.prefill(0, b.prompt, rule, 0)
    b.kernel.feed(0, b.text, True)
    b.kernel.prefill(1, torch.full_like(b.prompt, torch.nan), rule, 0)
    with pytest.raises(FloatingPointError):
        b.kernel.step([0, 1])
    assert b.frames([0], 3)[0] == alone


def test_another_rope_for_the_predictor_is_refused(bench: Callable[..., Bench]) -> None:
    b = bench("0b6")
    stack = replace(b.config.predictor.stack, theta=1e4)
    config = replace(b.config, predictor=replace(b.config.predictor, stack=stack))
    with pytest.raises(ValueError, match="one rope_theta"):
        Megakernel(b.half.model, config, b.prompt[0], slots=1, positions=64, ops=b.ops)


def test_a_shape_that_is_not_compiled_is_refused(bench: Callable[..., Bench]) -> None:
    b = bench("0b6")
    with pytest.raises(ValueError, match="not compiled for the shapes"):
        Megakernel(b.half.model, bench("1b7").config, b.prompt[0], slots=1, positions=64, ops=b.ops)


@pytest.fixture(scope="module")
def on_gpu(checkpoint: Callable[..., Path]) -> Iterator[Callable[[str], Loaded]]:
    loaded: dict[str, Loaded] = {}

    def make(size: str) -> Loaded:
        if size not in loaded:
            folder = checkpoint("custom_voice", size)
            loaded[size] = load_checkpoint(folder, torch.device("cuda"), torch.bfloat16, 4)
        return loaded[size]

    yield make
    for one in loaded.values():
        one.engine.close()


@pytest.mark.gpu
@sizes
def test_the_gpu_is_as_exact_as_the_emulated_instructions(
    bench: Callable[..., Bench], on_gpu: Callable[[str], Loaded], size: str
) -> None:
    """Sums of another order round to other halves, so that bits may differ; errors may not."""
    b = bench(size)
    kernel = on_gpu(size).engine.backend
    assert isinstance(kernel, Megakernel)
    for reference, prompt in ((b.half, b.prompt), (b.exact, b.prompt.float())):
        reference.prefill(0, prompt, SAMPLINGS[0], 0)
    kernel.prefill(0, b.prompt.cuda(), SAMPLINGS[0], 0)
    ours = rms_norm(kernel._hidden[0][None].cpu(), b.norm, 1e-6)[0]
    exact = b.exact._state[0].hidden
    torchs = b.half._state[0].hidden.float()
    assert (ours - exact).norm() <= 1.2 * (torchs - exact).norm()
    kernel.release(0)


@pytest.mark.gpu
@sizes
def test_streams_on_the_gpu_are_the_same_in_any_company(
    bench: Callable[..., Bench], on_gpu: Callable[[str], Loaded], size: str
) -> None:
    b = bench(size)
    kernel = on_gpu(size).engine.backend

    def begin(slot: int, stream: int) -> None:
        prompt = b.prompt[stream:].contiguous().cuda()
        kernel.prefill(slot, prompt, SAMPLINGS[stream], 0)
        kernel.feed(slot, b.text.cuda(), True)

    alone: list[list[list[int] | None]] = []
    for stream in range(3):
        begin(3 - stream, stream)
        alone.append([_codes(kernel.step([3 - stream])[0]) for _ in range(3)])
        kernel.release(3 - stream)
    for stream in range(3):
        begin(stream, stream)
    together = [kernel.step([0, 1, 2]) for _ in range(3)]
    assert [[_codes(frame[i]) for frame in together] for i in range(3)] == alone
    for slot in range(3):
        kernel.release(slot)


@pytest.mark.gpu
def test_a_frame_is_the_same_a_hundred_times(on_gpu: Callable[[str], Loaded]) -> None:
    kernel = on_gpu("1b7").engine.backend
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randn(9, 192, generator=generator).bfloat16().cuda()
    seen: set[tuple[int, ...]] = set()
    for _ in range(100):
        kernel.prefill(0, prompt, SAMPLINGS[0], 0)
        frame = kernel.step([0])[0]
        assert frame is not None
        seen.add(tuple(frame.tolist()))
        kernel.release(0)
    assert len(seen) == 1
