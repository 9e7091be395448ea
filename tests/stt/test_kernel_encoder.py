"""The encoder with kernels and state slots against the one in torch: emulated, and on a GPU."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.checkpoint import map_leaves
from megakernel_common.layers import exact_convolutions, split_heads
from megakernel_stt.kernels.conformer import ConformerKernels, conformer_obstacle, load_conformer
from megakernel_stt.kernels.conformer_structs import MAX_FEW_ROWS
from megakernel_stt.kernels.encoder import KernelEncoder
from megakernel_stt.kernels.subsampling import KernelLogMel
from megakernel_stt.model.config import EncoderConfig, StreamingConfig
from megakernel_stt.model.random_checkpoint import RELEASED_SIZE, Size, random_model
from megakernel_stt.model.weights import EncoderWeights, Linear
from megakernel_stt.network.encoder import (
    ENDLESS,
    EncoderState,
    StreamingEncoder,
    project_bins,
)
from megakernel_stt.network.features import LogMel, samples_of
from megakernel_stt.network.layers import (
    apply,
    attention,
    depthwise_output,
    layer_norm,
    position_keys,
)
from tests.emulator.conformer import emulated_conformer
from tests.stt.conftest import CPU, LoadModel

Target = Literal["emulator", "cuda"]
TARGETS = ["emulator", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_SLOTS, START, UNUSED = 12, 0, 1
ROWS = 5  # of a launch, the last one without a stream


def device_of(target: Target) -> torch.device:
    return CPU if target == "emulator" else torch.device("cuda")


def kernels(weights: EncoderWeights, config: EncoderConfig, target: Target) -> ConformerKernels:
    """The kernels for weights that are where they run."""
    make = emulated_conformer if target == "emulator" else load_conformer
    return make(weights, config)


def copied(weights: EncoderWeights, target: Target, dtype: torch.dtype) -> EncoderWeights:
    return map_leaves(weights, lambda tensor: tensor.to(device_of(target), dtype, copy=True))


def empty_slots(encoder: StreamingEncoder) -> EncoderState:
    """Slots with arbitrary numbers, but for `START` and the frames so far."""
    start = encoder.start()
    slots = EncoderState.join([start] * NUM_SLOTS)
    for name in ("stage1", "stage2", "stage3", "keys", "values", "gated"):
        getattr(slots, name)[1:] = 7
    return slots


def read(slots: EncoderState, indices: list[int]) -> EncoderState:
    parts = slots.split()
    return EncoderState.join([parts[i] for i in indices])


def assert_close(ours: Tensor, expected: Tensor, bound: float) -> None:
    difference = (ours.float() - expected.float()).abs().max().item()
    assert difference <= bound * max(expected.float().abs().max().item(), 1.0), difference


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("lookahead", "bias"), [(0, False), (1, True), (3, False), (6, True), (13, False)]
)
def test_streams_at_different_phases_are_encoded_as_in_torch(
    bias: bool, lookahead: int, target: Target, load: LoadModel
) -> None:
    """Frames and states; streams begin, end within a chunk, or have no frame in it."""
    model = load("streaming", bias=bias)
    weights, config = model.weights.encoder, model.config.encoder
    torchs = StreamingEncoder(copied(weights, target, torch.float32), config, lookahead)
    made = kernels(copied(weights, target, torch.float32), config, target)
    ours = KernelEncoder(made, lookahead)
    slots = empty_slots(ours)
    states = [torchs.start() for _ in range(ROWS - 1)]
    where = [START] * (ROWS - 1)
    generator = torch.Generator().manual_seed(lookahead)
    device = device_of(target)
    num_chunks = 3 if lookahead > 3 else 6
    for chunk in range(num_chunks):
        chosen = [i for i in range(ROWS - 1) if chunk % (i + 1) == 0]  # streams at their own phases
        last = chunk == num_chunks - 1
        mels = torch.randn(ROWS, ours.num_mels, config.num_mels, generator=generator).to(device)
        lengths = [ENDLESS] * ROWS
        if last:
            so_far = [int(states[i].num_frames) * 8 for i in chosen]
            ends = [1 + i * ours.num_mels // ROWS for i in range(len(chosen))]
            lengths[: len(chosen)] = [a + b for a, b in zip(so_far, ends, strict=True)]
        lengths[len(chosen) :] = [0] * (ROWS - len(chosen))
        mels[len(chosen) :] = 0
        sources = [*(where[i] for i in chosen), *[START] * (ROWS - len(chosen))]
        free = [slot for slot in range(2, NUM_SLOTS) if slot not in where]
        targets = [*free[: len(chosen)], *[UNUSED] * (ROWS - len(chosen))]
        before = read(slots, sources)
        with torch.inference_mode(), exact_convolutions(device):
            found = ours.encode_slots(
                mels,
                torch.tensor(lengths, device=device),
                torch.tensor(sources, device=device),
                torch.tensor(targets, device=device),
                slots,
            )
            expected, after = torchs.encode(
                mels[: len(chosen)],
                torch.tensor(lengths[: len(chosen)], device=device),
                EncoderState.join([states[i] for i in chosen]),
            )
        for name in vars(before):
            kept = getattr(read(slots, sources), name)
            assert torch.equal(kept, getattr(before, name)), f"the source's {name} changed"
        moved = read(slots, targets[: len(chosen)])
        for row, i in enumerate(chosen):
            num_frames = ours.chunk_size
            if last:
                num_frames = max(0, -(-(lengths[row] + 7) // 8) - int(states[i].num_frames))
                num_frames = min(num_frames, ours.chunk_size)
            assert_close(found[row, :num_frames], expected[row, :num_frames], 1e-5)
        if not last:
            for name in vars(after):
                assert_close(getattr(moved, name), getattr(after, name), 1e-5)
        for row, (i, state) in enumerate(zip(chosen, after.split(), strict=True)):
            states[i], where[i] = state, targets[row]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_and_norms_round_as_torch(
    dtype: torch.dtype, target: Target, load: LoadModel
) -> None:
    model = load("streaming")
    made = kernels(copied(model.weights.encoder, target, dtype), model.config.encoder, target)
    block = made.weights.blocks[0]
    generator = torch.Generator().manual_seed(0)
    shape = 3, 2, model.config.encoder.hidden_size
    x, y = (torch.randn(shape, generator=generator).to(device_of(target), dtype) for _ in range(2))
    expected_x = layer_norm(block.norm, x + 0.5 * y)
    expected_h = layer_norm(block.attention.norm, expected_x)
    ours, h = x.clone(), torch.empty_like(x)
    made.add_norm(ours, y, h, scale=0.5, norm_out=block.norm, norm_next=block.attention.norm)
    step = 1e-6 if dtype == torch.float32 else 2**-8
    for found, expected in ((ours, expected_x), (h, expected_h)):
        assert ((found - expected).abs() <= step * expected.abs() + 1e-6).all()
        if dtype == torch.bfloat16:  # nearly all bits are equal
            assert (found != expected).float().mean() < 0.02
    unchanged = x.clone()
    made.add_norm(unchanged, None, h, norm_next=block.attention.norm)
    assert torch.equal(unchanged, x)


def assert_rounded_alike(ours: Tensor, expected: Tensor) -> None:
    """float32: within 1e-5. bfloat16: nearly all bits are equal, the others differ by a step."""
    assert ours.dtype == expected.dtype
    if ours.dtype == torch.float32:
        return assert_close(ours, expected, 1e-5)
    assert (ours != expected).float().mean() < 0.05
    assert_close(ours, expected, 2**-8)


# Rows of a launch: a stream at its start, one in its first chunks, an older one, an older one that
# ends at the second frame of the chunk, and no stream.
SOURCE_SLOTS, TARGET_SLOTS = [START, 4, 5, 5, START], [6, 7, 8, 9, UNUSED]
BEFORE, NUM_MELS = [0, 4, 96, 96, 0], [ENDLESS, ENDLESS, ENDLESS, 769, 0]
NUM_FRAMES = [ENDLESS, ENDLESS, ENDLESS, 97, 0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_mels", [8, 112])
@pytest.mark.parametrize("num_bins", [80, 128])
def test_features_are_those_of_torch(
    num_bins: int, num_mels: int, dtype: torch.dtype, target: Target, load: LoadModel
) -> None:
    """Of samples that end within a mel frame; those behind the end do not matter."""
    model, device = load("streaming"), device_of(target)
    made = kernels(copied(model.weights.encoder, target, dtype), model.config.encoder, target)
    size, generator = samples_of(num_mels), np.random.default_rng(num_mels)
    level = generator.uniform(0.01, 0.5, (4, 1))
    samples = torch.from_numpy((generator.standard_normal((4, size)) * level).astype(np.float32))
    samples[1] = 0
    counts = torch.tensor([size, size, size - 1000, 0])
    expected = LogMel(num_bins, CPU)(samples, counts).to(dtype)
    for row, count in zip(samples, counts.tolist(), strict=True):
        row[count:] = torch.inf
    found = KernelLogMel(made.launcher, num_bins)(samples.to(device), counts.to(device)).cpu()
    if dtype == torch.bfloat16:
        return assert_rounded_alike(found, expected)
    # Two transforms in float32 differ by their roundings, most where a band is almost silent.
    difference = (found - expected).abs()
    assert difference.square().mean().sqrt() <= 1e-5 and difference.max() <= 1e-3


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lookahead", "bias"), [(0, False), (3, True), (13, False)])
def test_subsampling_is_that_of_torch(
    lookahead: int, bias: bool, dtype: torch.dtype, target: Target, load: LoadModel
) -> None:
    """Of mel frames that do not matter outside of a recording; last inputs move to their slots."""
    model, device = load("streaming", bias=bias), device_of(target)
    config, names = model.config.encoder, ("stage1", "stage2", "stage3")
    made = kernels(copied(model.weights.encoder, target, dtype), config, target)
    encoder = KernelEncoder(made, lookahead)
    slots, generator = empty_slots(encoder), torch.Generator().manual_seed(lookahead)
    for stage in (slots.stage1, slots.stage2, slots.stage3):
        stage[2:] = torch.randn(stage[2:].shape, generator=generator).abs().to(stage)
    for source, num_frames in zip(SOURCE_SLOTS, BEFORE, strict=True):
        slots.num_frames[source] = num_frames
    before = read(slots, SOURCE_SLOTS)
    shape = ROWS, encoder.num_mels, config.num_mels
    mels = torch.randn(shape, generator=generator).to(device, dtype)
    named = torch.tensor(
        [SOURCE_SLOTS, TARGET_SLOTS, NUM_MELS], device=device
    )  # lives during the launch
    launcher, chunk_size = made.launcher, lookahead + 1
    streams = launcher.streams(named[0], named[1], named[2], slots.num_frames, chunk_size)
    with exact_convolutions(device):
        bins = made.subsampling.run(mels, streams, slots)
        found = project_bins(made.weights, config, bins)
        stages = before.stage1, before.stage2, before.stage3
        expected, lasts, _ = encoder._subsample(mels, named[2], stages, before.num_frames)
    bound = 1e-5 if dtype == torch.float32 else 2**-6
    assert_close(found[:-1], expected[:-1], bound)
    moved = read(slots, TARGET_SLOTS[:-1])
    for name, last in zip(names, lasts, strict=True):
        assert_close(getattr(moved, name), last[:-1], bound)
        assert torch.equal(getattr(read(slots, SOURCE_SLOTS), name), getattr(before, name))
    assert torch.equal(moved.num_frames, before.num_frames[:-1] + chunk_size)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lookahead", [0, 1, 3, 6, 13])
def test_attention_is_that_of_torch(
    lookahead: int, dtype: torch.dtype, target: Target, load: LoadModel
) -> None:
    """Of ragged rows; keys and values move to the target slots unchanged."""
    model, device = load("streaming"), device_of(target)
    config, chunk_size, index = model.config.encoder, lookahead + 1, 1
    made = kernels(copied(model.weights.encoder, target, dtype), config, target)
    slots = empty_slots(KernelEncoder(made, lookahead))
    generator = torch.Generator().manual_seed(lookahead)
    for cache in (slots.keys, slots.values):
        cache[2:] = torch.randn(cache[2:].shape, generator=generator).to(cache)
    for source, num_frames in zip(SOURCE_SLOTS, BEFORE, strict=True):
        slots.num_frames[source] = num_frames
    before, other_layer = read(slots, SOURCE_SLOTS), read(slots, TARGET_SLOTS).keys[:, 1 - index]
    shape = ROWS, chunk_size, 3 * config.hidden_size
    qkv = torch.randn(shape, generator=generator).to(device, dtype)
    weights, num_cached = made.weights.blocks[index].attention, slots.keys.shape[3]
    positions = position_keys(weights, num_cached + lookahead, -lookahead).contiguous()
    named = torch.tensor(
        [SOURCE_SLOTS, TARGET_SLOTS, NUM_MELS], device=device
    )  # lives during the launch
    streams = made.launcher.streams(named[0], named[1], named[2], slots.num_frames, chunk_size)
    found = made.attend(index, streams, qkv, positions, slots)

    query, key, value = (split_heads(part, config.head_dim) for part in qkv.chunk(3, -1))
    keys = torch.cat([before.keys[:, index], key], 2)
    values = torch.cat([before.values[:, index], value], 2)
    first = before.num_frames[:, None]
    index_of_key = first + torch.arange(-num_cached, chunk_size, device=device)
    ends = torch.tensor(NUM_FRAMES, device=device)[:, None]
    visible = (index_of_key >= 0) & ((index_of_key < first) | (index_of_key < ends))
    unprojected = replace(weights, output=Linear(torch.eye(config.hidden_size).to(qkv), None))
    expected = attention(unprojected, query, keys, values, positions, visible)
    assert_rounded_alike(found[:-1], expected[:-1])
    moved = read(slots, TARGET_SLOTS[:-1])
    assert torch.equal(moved.keys[:, index], keys[:-1, :, chunk_size:])
    assert torch.equal(moved.values[:, index], values[:-1, :, chunk_size:])
    assert torch.equal(read(slots, SOURCE_SLOTS).keys, before.keys)
    assert torch.equal(read(slots, SOURCE_SLOTS).values, before.values)
    assert torch.equal(read(slots, TARGET_SLOTS).keys[:, 1 - index], other_layer)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lookahead", "bias"), [(0, False), (3, True), (13, False)])
def test_convolution_module_is_that_of_torch(
    lookahead: int, bias: bool, dtype: torch.dtype, target: Target, load: LoadModel
) -> None:
    """Of frames before a recording's end; the last inputs move to the target slots."""
    model, device = load("streaming", bias=bias), device_of(target)
    config, chunk_size, index = model.config.encoder, lookahead + 1, 1
    made = kernels(copied(model.weights.encoder, target, dtype), config, target)
    slots = empty_slots(KernelEncoder(made, lookahead))
    generator = torch.Generator().manual_seed(lookahead)
    slots.gated[2:] = torch.randn(slots.gated[2:].shape, generator=generator).to(slots.gated)
    before = read(slots, SOURCE_SLOTS)
    shape = ROWS, chunk_size, 2 * config.hidden_size
    inputs = torch.randn(shape, generator=generator).to(device, dtype)
    named = torch.tensor(
        [SOURCE_SLOTS, TARGET_SLOTS, NUM_MELS], device=device
    )  # lives during the launch
    streams = made.launcher.streams(named[0], named[1], named[2], slots.num_frames, chunk_size)
    found = made.convolve(index, streams, inputs, slots)

    weights = made.weights.blocks[index].convolution
    gated = torch.cat([before.gated[:, index], F.glu(inputs, -1).transpose(1, 2)], 2)
    unprojected = replace(
        weights, pointwise_out=Linear(torch.eye(config.hidden_size).to(inputs), None)
    )
    assert_rounded_alike(found, depthwise_output(unprojected, gated))
    moved = read(slots, TARGET_SLOTS[:-1]).gated[:, index]
    assert_rounded_alike(moved, gated[:-1, :, chunk_size:])
    assert torch.equal(read(slots, SOURCE_SLOTS).gated, before.gated)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, MAX_FEW_ROWS])
def test_layers_of_few_rows_are_those_of_torch(
    num_rows: int, dtype: torch.dtype, target: Target, load: LoadModel
) -> None:
    """Warps have one output or three, and the last one fewer; with and without what is optional."""
    model, device = load("streaming"), device_of(target)
    config = replace(model.config.encoder, intermediate_size=2072)
    made = kernels(copied(model.weights.encoder, target, dtype), config, target)
    generator = torch.Generator().manual_seed(num_rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    size, inner = config.hidden_size, config.intermediate_size
    layers = {
        name: Linear(random(outs, ins) / ins**0.5, random(outs) if name in ("up", "add") else None)
        for name, (outs, ins) in {
            "up": (inner, size),
            "down": (size, inner),
            "qkv": (3 * size, size),
            "gate": (2 * size, size),
            "add": (size, size),
        }.items()
    }
    block, shape = made.weights.blocks[0], (num_rows, 1)
    x, wide = random(*shape, size), random(*shape, inner)
    for name in ("qkv", "gate"):
        found = random(*shape, len(layers[name].weight))
        made.project(name, layers[name], x, found, norm=block.attention.norm)
        assert_rounded_alike(found, apply(layers[name], layer_norm(block.attention.norm, x)))
    begun, found = torch.empty_like(x), torch.empty_like(wide)
    norm = block.feed_forward1.norm
    made.project("up", layers["up"], x, found, norm=norm, norm_out=block.norm, normed_out=begun)
    assert_rounded_alike(begun, layer_norm(block.norm, x))
    assert_rounded_alike(found, F.silu(apply(layers["up"], layer_norm(norm, begun))))
    expected = begun + 0.5 * apply(layers["down"], wide)
    made.project("down", layers["down"], wide, found := begun.clone(), residual=begun, scale=0.5)
    assert_rounded_alike(found, expected)
    expected = x + apply(layers["add"], begun)
    made.project("add", layers["add"], begun, x, residual=x)  # in place
    assert_rounded_alike(x, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_do_not_depend_on_each_other(dtype: torch.dtype, load: LoadModel) -> None:
    """The bits of one row, solo and as the last of several."""
    model = load("streaming")
    made = emulated_conformer(
        copied(model.weights.encoder, "emulator", dtype), model.config.encoder
    )
    layer, norm = made.qkv[0], made.weights.blocks[0].attention.norm
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(MAX_FEW_ROWS, 1, model.config.encoder.hidden_size, generator=generator).to(
        dtype
    )
    together, solo = (rows.new_empty(n, 1, len(layer.weight)) for n in (MAX_FEW_ROWS, 1))
    made.project("qkv", layer, rows, together, norm=norm)
    made.project("qkv", layer, rows[-1:].clone(), solo, norm=norm)
    assert torch.equal(together[-1:], solo)


def _relative_distance(found: Tensor, expected: Tensor) -> float:
    return (found.float() - expected).norm().item() / expected.norm().item()


@pytest.mark.parametrize("target", TARGETS)
def test_bfloat16_frames_are_those_of_torch_within_its_precision(target: Target) -> None:
    """As far from float32 as torch in bfloat16, within a tenth: they round in different places."""
    size = Size() if target == "emulator" else replace(RELEASED_SIZE, num_layers=4)
    device = device_of(target)
    model = random_model("streaming", size, device, torch.float32)
    config, exact = model.config.encoder, model.weights.encoder
    generator = torch.Generator().manual_seed(0)
    encoders = (
        StreamingEncoder(exact, config, 3),
        StreamingEncoder(copied(exact, target, torch.bfloat16), config, 3),
    )
    ours = KernelEncoder(kernels(copied(exact, target, torch.bfloat16), config, target), 3)
    slots, states = empty_slots(ours), [encoder.start() for encoder in encoders]
    source, lengths = torch.tensor([START], device=device), torch.tensor([ENDLESS], device=device)
    from_kernels, from_torch = list[float](), list[float]()
    for chunk in range(4):
        mels = torch.randn(1, ours.num_mels, config.num_mels, generator=generator).to(device)
        destination = torch.tensor([2 + chunk], device=device)
        with torch.inference_mode():
            found = ours.encode_slots(mels.bfloat16(), lengths, source, destination, slots)
            frames = list[Tensor]()
            for i, encoder in enumerate(encoders):
                inputs = mels if i == 0 else mels.bfloat16()
                made, states[i] = encoder.encode(inputs, lengths, states[i])
                frames.append(made.float())
        source = destination
        from_kernels.append(_relative_distance(found, frames[0]))
        from_torch.append(_relative_distance(frames[1], frames[0]))
    assert max(from_kernels) <= 1.1 * max(from_torch) < 0.1


def test_weights_are_not_stored_twice(load: LoadModel) -> None:
    model = load("streaming")
    weights = copied(model.weights.encoder, "emulator", torch.float32)
    before = [block.attention.key.weight.clone() for block in weights.blocks]
    made = emulated_conformer(weights, model.config.encoder)
    for block, joined, weight in zip(weights.blocks, made.qkv, before, strict=True):
        storage = joined.weight.untyped_storage().data_ptr()
        for part in (block.attention.query, block.attention.key, block.attention.value):
            assert part.weight.untyped_storage().data_ptr() == storage
        assert torch.equal(block.attention.key.weight, weight)


def test_encoders_that_do_not_fit_are_named(load: LoadModel) -> None:
    config = load("streaming").config.encoder
    assert conformer_obstacle(config) is None
    cases: list[tuple[EncoderConfig, str]] = [
        (replace(config, streaming=None), "offline"),
        (replace(config, hidden_size=4096), "has 4096"),
        (replace(config, num_heads=config.hidden_size // 4), "multiples of 8"),
        (replace(config, subsampling_channels=12), "has 12."),
        (replace(config, intermediate_size=132), "have 132."),
        (replace(config, intermediate_size=8192), "have 8192."),
        (replace(config, conv_kernel_size=1), "have 1."),
        (replace(config, conv_kernel_size=33), "have 33."),
        (replace(config, streaming=StreamingConfig(400, (200,))), "201 frames"),
    ]
    for changed, sentence in cases:
        assert sentence in (conformer_obstacle(changed) or ""), sentence
