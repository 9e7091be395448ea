"""The megakernel: its phases on emulated instructions everywhere, the kernel itself on a GPU."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megakernel_tts import Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.kernels.decode import ORDINARY
from megakernel_tts.loader import Loaded, load_checkpoint
from megakernel_tts.model import random_checkpoint
from megakernel_tts.model.layers import rms_norm
from megakernel_tts.model.random_released import write_released_checkpoint
from tests.comparison import SAMPLINGS, SIZES, Comparison, MakeComparison
from tests.emulator import EmulatedModule
from tests.rig import one_frame

sizes = pytest.mark.parametrize("size", SIZES)
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the emulator")


def _frames(b: Comparison, slots: list[int], count: int) -> list[list[list[int] | None]]:
    """[slots][count] frames, one a launch."""
    made = [one_frame(b.kernel, slots) for _ in range(count)]
    return [[_codes(frames[i]) for frames in made] for i in range(len(slots))]


def _codes(frame: Tensor | None) -> list[int] | None:
    return None if frame is None else frame.tolist()


@sizes
def test_a_prompt_is_as_exact_as_bfloat16_in_torch(comparison: MakeComparison, size: str) -> None:
    b = comparison(size)
    _check_a_prompt(b, b.prompt)


@sizes
def test_a_long_prompt_is_as_exact_as_bfloat16_in_torch(
    comparison: MakeComparison, size: str
) -> None:
    """Of a pass of each size."""
    b = comparison(size)
    _check_a_prompt(b, b.prompt.repeat(3, 1)[:25])


def _check_a_prompt(b: Comparison, prompt: Tensor) -> None:
    for backend, of_type in ((b.kernel, prompt), (b.half, prompt), (b.exact, prompt.float())):
        backend.prefill([PrefillRequest(0, of_type, SAMPLINGS[0])])
    ours = rms_norm(b.kernel._buffers.prompt_hidden[0][None], b.norm, 1e-6)[0]
    exact = b.exact._state[0].hidden
    torchs = b.half._state[0].hidden.float()
    assert (ours - exact).abs().max() <= 1.2 * (torchs - exact).abs().max()
    assert (ours - exact).norm() <= 1.2 * (torchs - exact).norm()


@sizes
def test_streams_are_the_same_in_any_company(comparison: MakeComparison, size: str) -> None:
    """Alone or together, in any slot, on grids of any number of blocks, suspended in between."""
    alone: list[list[list[int] | None]] = []
    for stream in range(3):
        b = comparison(size, blocks=1 + stream)
        b.begin(3 - stream, stream)
        alone += _frames(b, [3 - stream], 3)
    b = comparison(size)
    for stream in range(3):
        b.begin(stream, stream)
    first = _frames(b, [0, 1, 2], 1)
    away = [b.kernel.swap_out(slot) for slot in range(3)]
    for slot, suspended in zip((2, 3, 1), away, strict=True):
        b.kernel.swap_in(slot, suspended)
    rest = _frames(b, [2, 3, 1], 2)
    assert [one + more for one, more in zip(first, rest, strict=True)] == alone


def test_layers_as_wide_as_the_released_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their activations come in parts of twelve steps; there are registers to spare."""
    small = random_checkpoint._stack

    def wide(hidden: int, layers: int) -> dict[str, Any]:
        return small(hidden, layers) | {"intermediate_size": 6144 if hidden == 192 else 3072}

    monkeypatch.setattr(random_checkpoint, "_stack", wide)
    random_checkpoint.write_checkpoint(tmp_path / "model", "custom_voice", "1b7", codes=256)
    loaded = load_checkpoint(tmp_path / "model", torch.device("cpu"), torch.float32, 4)
    module = EmulatedModule(loaded.config, ORDINARY, "-DMEGAKERNEL_MOVES_REGISTERS")
    with closing(loaded.engine):
        b = Comparison(loaded, module)
        _check_a_prompt(b, b.prompt.repeat(2, 1)[:19])
        alone = []
        for stream in range(2):
            b.begin(stream, stream)
            alone += _frames(b, [stream], 1)
            b.kernel.release(stream)
        for stream in range(2):
            b.begin(stream, stream)
        assert _frames(b, [0, 1], 1) == alone


def test_the_draws_are_the_references(comparison: MakeComparison) -> None:
    """With weights that make every logit plain, both draw the same code 0, whatever the rule."""
    b = comparison("1b7")
    agreed = 0
    for seed in range(6):
        rule = Sampling(seed=seed, top_k=(0, 5, 50)[seed % 3], top_p=(1.0, 0.7)[seed % 2])
        b.kernel.prefill([PrefillRequest(0, b.prompt, rule, seed)])
        b.exact.prefill([PrefillRequest(0, b.prompt.float(), rule, seed)])
        ours, theirs = one_frame(b.kernel, [0])[0], one_frame(b.exact, [0])[0]
        assert ours is not None and theirs is not None
        agreed += int(ours[0] == theirs[0])
        b.kernel.release(0)
    assert agreed >= 5  # logits are rounded to bfloat16: a near tie may fall the other way


@pytest.mark.parametrize("divisor", [0.9, 0.3, 1.05, 1 / 3, 1.0, 7e-3, 1 - 2**-24, 2 - 2**-23])
def test_scores_are_divided_as_torch_divides(comparison: MakeComparison, divisor: float) -> None:
    """Without the division's own branch: to the last bit, from 1e-32 on."""
    module = comparison("0b6").module
    assert module is not None
    noise = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 1 << 23, (1 << 18,), generator=noise, dtype=torch.int32)
    exponents = torch.randint(127 - 106, 127 + 100, bits.shape, generator=noise, dtype=torch.int32)
    numbers = (bits | exponents << 23).view(torch.float32)
    special = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    numbers = torch.cat([numbers, -numbers, special])
    expected = numbers / torch.tensor(divisor)
    assert torch.equal(module.divided(numbers, divisor).nan_to_num(), expected.nan_to_num())


def test_the_best_of_one_is_the_likeliest(comparison: MakeComparison) -> None:
    """Noise makes others win most of the time; who is not among the k largest is passed over."""
    b = comparison("0b6")
    spoken = []
    for rule in (
        Sampling(seed=3, top_k=1, temperature=1.7, predictor_top_k=1, predictor_temperature=1.7),
        Sampling.greedy(seed=4),
    ):
        b.kernel.prefill([PrefillRequest(0, b.prompt, rule)])
        b.kernel.feed(0, b.text, True)
        spoken.append(_frames(b, [0], 2)[0])
        b.kernel.release(0)
    assert spoken[0] == spoken[1]


def test_text_that_has_not_arrived_and_prompts_that_do_not_fit(
    comparison: MakeComparison,
) -> None:
    b = comparison("0b6")
    b.kernel.prefill([PrefillRequest(0, b.prompt, SAMPLINGS[0])])
    one_frame(b.kernel, [0])
    with pytest.raises(RuntimeError, match="before the text of frame 0"):
        one_frame(b.kernel, [0])
    with pytest.raises(ValueError, match="64 does not fit 64"):
        b.kernel.prefill(
            [PrefillRequest(1, torch.zeros(64, b.prompt.shape[1]).bfloat16(), SAMPLINGS[0])]
        )


def test_not_finite_logits_are_an_error(comparison: MakeComparison) -> None:
    b = comparison("0b6")
    b.kernel.prefill([PrefillRequest(0, torch.full_like(b.prompt, torch.nan), SAMPLINGS[0])])
    with pytest.raises(FloatingPointError, match="not finite"):
        one_frame(b.kernel, [0])


def test_a_broken_neighbour_changes_nothing(comparison: MakeComparison) -> None:
    """A step that raises leaves the streams as they were: what was drawn in it is not repeated."""
    b = comparison("1b7")
    rule = Sampling(seed=1, repetition_penalty=50.0)
    b.kernel.prefill([PrefillRequest(0, b.prompt, rule)])
    b.kernel.feed(0, b.text, True)
    alone = _frames(b, [0], 3)[0]
    b.kernel.release(0)
    b.kernel.prefill([PrefillRequest(0, b.prompt, rule)])
    b.kernel.feed(0, b.text, True)
    b.kernel.prefill([PrefillRequest(1, torch.full_like(b.prompt, torch.nan), rule)])
    with pytest.raises(FloatingPointError):
        one_frame(b.kernel, [0, 1])
    assert _frames(b, [0], 3)[0] == alone


def test_another_rope_for_the_predictor_is_refused(comparison: MakeComparison) -> None:
    b = comparison("0b6")
    stack = replace(b.config.predictor.stack, rope_theta=1e4)
    config = replace(b.config, predictor=replace(b.config.predictor, stack=stack))
    with pytest.raises(ValueError, match="one rope_theta"):
        Megakernel(b.half.model, config, b.pad, num_slots=1, max_positions=64)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_dim": 64}, "take heads of 128 channels"),
        ({"num_kv_heads": 4}, "take two query heads for each key-value head"),
        ({"hidden_size": 100}, "take a hidden size that is a multiple of 32"),
        ({"intermediate_size": 100}, "take an intermediate size that is a multiple of 32"),
    ],
)
def test_shapes_that_cannot_be_compiled_are_refused(
    comparison: MakeComparison, changes: dict[str, int], sentence: str
) -> None:
    b = comparison("0b6")
    stack = replace(b.config.talker.stack, **changes)
    config = replace(b.config, talker=replace(b.config.talker, stack=stack))
    with pytest.raises(ValueError, match=sentence):
        Megakernel(b.half.model, config, b.pad, num_slots=1, max_positions=64)


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
    comparison: MakeComparison, on_gpu: Callable[[str], Loaded], size: str
) -> None:
    """Sums of another order round to other halves, so that bits may differ; errors may not."""
    b = comparison(size)
    kernel = on_gpu(size).engine.backend
    assert isinstance(kernel, Megakernel)
    for reference, prompt in ((b.half, b.prompt), (b.exact, b.prompt.float())):
        reference.prefill([PrefillRequest(0, prompt, SAMPLINGS[0])])
    kernel.prefill([PrefillRequest(0, b.prompt, SAMPLINGS[0])])
    ours = rms_norm(kernel._buffers.prompt_hidden[0][None].cpu(), b.norm, 1e-6)[0]
    exact = b.exact._state[0].hidden
    torchs = b.half._state[0].hidden.float()
    assert (ours - exact).norm() <= 1.2 * (torchs - exact).norm()
    kernel.release(0)


@pytest.mark.gpu
@sizes
def test_streams_on_the_gpu_are_the_same_in_any_company(
    comparison: MakeComparison, on_gpu: Callable[[str], Loaded], size: str
) -> None:
    b = comparison(size)
    kernel = on_gpu(size).engine.backend

    def begin(slot: int, stream: int) -> None:
        prompt = b.prompt[stream:]
        kernel.prefill([PrefillRequest(slot, prompt, SAMPLINGS[stream])])
        kernel.feed(slot, b.text, True)

    alone: list[list[list[int] | None]] = []
    for stream in range(3):
        begin(3 - stream, stream)
        alone.append([_codes(one_frame(kernel, [3 - stream])[0]) for _ in range(3)])
        kernel.release(3 - stream)
    for stream in range(3):
        begin(stream, stream)
    together = [one_frame(kernel, [0, 1, 2]) for _ in range(3)]
    assert [[_codes(frame[i]) for frame in together] for i in range(3)] == alone
    for slot in range(3):
        kernel.release(slot)


@pytest.mark.gpu
def test_a_frame_is_the_same_a_hundred_times(on_gpu: Callable[[str], Loaded]) -> None:
    kernel = on_gpu("1b7").engine.backend
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randn(9, 192, generator=generator).bfloat16()
    seen: set[tuple[int, ...]] = set()
    for _ in range(100):
        kernel.prefill([PrefillRequest(0, prompt, SAMPLINGS[0])])
        frame = one_frame(kernel, [0])[0]
        assert frame is not None
        seen.add(tuple(frame.tolist()))
        kernel.release(0)
    assert len(seen) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "hidden"), [("0.6B", 1024), ("1.7B", 2048)])
def test_eight_streams_of_a_released_size_are_what_they_are_alone_a_hundred_times(
    tmp_path: Path, size: str, hidden: int
) -> None:
    """Their ring of weights is short, so that a slot is soon written again."""
    cuda = torch.device("cuda")
    write_released_checkpoint(tmp_path, size, cuda)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randn(5 + i, hidden, generator=generator).bfloat16() for i in range(8)]
    with closing(load_checkpoint(tmp_path, cuda, torch.bfloat16, 8).engine) as engine:
        kernel = engine.backend
        assert kernel.name == "megakernel"

        def speak(slots: Sequence[int]) -> list[list[list[int]]]:
            kernel.prefill(
                [PrefillRequest(slot, prompts[slot], Sampling(seed=slot)) for slot in slots]
            )
            for slot in slots:
                kernel.feed(slot, prompts[slot], True)
            made = kernel.step(slots, 32)
            for slot in slots:
                kernel.release(slot)
            return [frames.codes.tolist() for frames in made]

        alone = [codes for slot in range(8) for codes in speak([slot])]
        assert max(map(len, alone)) > 16
        assert [speak(range(8)) == alone for _ in range(100)] == 100 * [True]
