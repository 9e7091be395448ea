"""The kernels' decoder against the one in torch: on the emulator, and on a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.recognition import calibrated
from megakernel_common.checkpoint import map_leaves
from megakernel_stt.kernels.transducer import (
    KernelTransducer,
    kernel_obstacle,
    load_transducer,
    pack_tiles,
)
from megakernel_stt.model.checkpoint import Model, load_model
from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.model.random_checkpoint import (
    RELEASED_SIZE,
    Kind,
    Size,
    random_model,
    write_checkpoint,
)
from megakernel_stt.model.weights import TransducerWeights
from megakernel_stt.network.layers import apply
from megakernel_stt.network.transducer import Emission, Transducer, TransducerState
from tests.emulator.transducer import EmulatedTransducerModule, emulated_transducer
from tests.stt.batches import decode, random_frames, triples
from tests.stt.conftest import CPU, LoadModel, MakeCheckpoint

Target = Literal["emulator", "cuda"]
TARGETS = ["emulator", pytest.param("cuda", marks=pytest.mark.gpu)]
BLANK_BIASES = (0.0, 2.0, 4.0, 100.0, -100.0)


def kernels(
    weights: TransducerWeights, config: TransducerConfig, target: Target = "emulator"
) -> KernelTransducer:
    """The kernels' decoder for weights of the CPU."""
    if target == "emulator":
        return emulated_transducer(weights, config)
    return load_transducer(map_leaves(weights, Tensor.cuda), config)


def decode_at(
    transducer: KernelTransducer, frames: list[Tensor], states: list[TransducerState] | None = None
) -> tuple[list[list[Emission]], list[TransducerState]]:
    """Decodes frames of the CPU where the decoder's weights are."""
    like = transducer.start().output
    return decode(transducer, [f.to(like) for f in frames], states)


def assert_same(ours: Sequence[list[Emission]], expected: Sequence[list[Emission]]) -> None:
    """Tokens are equal, and confidences nearly."""
    assert [triples(f) for f in ours] == [triples(f) for f in expected]
    for mine, theirs in zip(ours, expected, strict=True):
        values = [[e.confidence for e in found] for found in (mine, theirs)]
        assert np.allclose(*values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
@pytest.mark.parametrize("blank_bias", BLANK_BIASES)
def test_ragged_batches_are_decoded_as_by_torch(
    kind: Kind, blank_bias: float, target: Target, load: LoadModel
) -> None:
    model = load(kind, blank_bias=blank_bias)
    args = model.weights.transducer, model.config.transducer
    torchs, ours = Transducer(*args), kernels(*args, target)
    lengths = [0, 7, 1, 4]
    frames = [random_frames(n, seed) for seed, n in enumerate(lengths)]
    (expected, after), (found, states) = decode(torchs, frames), decode_at(ours, frames)
    assert_same(found, expected)
    for mine, theirs in zip(states, after, strict=True):
        for name in ("hidden", "cell", "output"):
            value = getattr(mine, name).cpu()
            assert torch.allclose(value, getattr(theirs, name), rtol=1e-4, atol=1e-5)
        assert mine.frame.cpu() == theirs.frame
        assert mine.num_frames.cpu() == theirs.num_frames
    assert blank_bias != 100.0 or not any(found)
    saturated = kind == "rnnt" and blank_bias == -100.0
    assert not saturated or [len(f) for f in found] == [10 * n for n in lengths]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("durations", [(0,), (0, 1), (3, 0, 2), (4, 1)])
@pytest.mark.parametrize("max_symbols", [1, 3])
def test_other_durations_are_decoded_as_by_torch(
    durations: tuple[int, ...], max_symbols: int, target: Target, load: LoadModel
) -> None:
    model = load("tdt")
    config = replace(model.config.transducer, durations=durations, max_symbols=max_symbols)
    head = model.weights.transducer.head
    count = config.vocab_size + len(durations)
    assert head.bias is not None
    head = replace(head, weight=head.weight[:count], bias=head.bias[:count])
    weights = replace(model.weights.transducer, head=head)
    frames = [random_frames(n) for n in (1, 7, 13)]
    expected, _ = decode(Transducer(weights, config), frames)
    found, _ = decode_at(kernels(weights, config, target), frames)
    assert_same(found, expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
def test_chunks_are_decoded_as_the_whole(kind: Kind, target: Target, load: LoadModel) -> None:
    """Durations may lead beyond the end of a chunk, and beyond whole chunks."""
    model = load(kind, blank_bias=4.0)
    ours = kernels(model.weights.transducer, model.config.transducer, target)
    for size in (1, 7):
        frames = random_frames(15 if kind == "tdt" else 8, size)
        whole, [end] = decode_at(ours, [frames])
        states, parts = [ours.start()], []
        for chunk in frames.split(size):
            found, states = decode_at(ours, [chunk], states)
            parts += found[0]
        assert whole[0]
        assert_same([parts], whole)
        assert torch.allclose(states[0].hidden, end.hidden, atol=1e-6)
        assert torch.allclose(states[0].cell, end.cell, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_is_decoded_as_solo_streams(
    dtype: str, target: Target, recogniser: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: tokens, confidence and state.

    The sums of a product of cuBLAS depend on its rows. Each frame is therefore projected alone.
    """
    model = load_model(recogniser("rnnt", blank_bias=4.0), CPU, getattr(torch, dtype))
    ours = kernels(model.weights.transducer, model.config.transducer, target)
    project = ours.project

    def project_solo(frames: Tensor) -> Tensor:
        rows = [project(frame[None, None]) for frame in frames.flatten(0, 1)]
        return torch.cat(rows).unflatten(0, frames.shape[:2]).squeeze(2)

    monkeypatch.setattr(ours, "project", project_solo)
    frames = [random_frames(4 + seed % 3, seed).to(getattr(torch, dtype)) for seed in range(10)]
    together, states = decode_at(ours, frames)
    assert any(together)
    for i in (0, 4, 9):
        solo, [state] = decode_at(ours, [frames[i]])
        assert solo[0] == together[i]
        for name in ("hidden", "cell", "output"):
            assert torch.equal(getattr(state, name), getattr(states[i], name))


def sized(kind: Kind, folder: MakeCheckpoint, size: Size, dtype: torch.dtype) -> Model:
    """A recogniser of a size, with few tokens."""
    path = folder(kind).parent / f"{kind}-{size.decoder_size}-{size.vocab_size}"
    if not path.exists():
        write_checkpoint(path, kind, size, blank_bias=9.0)
    return load_model(path, CPU, dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_that_are_not_full_and_64_streams(
    kind: Kind, dtype: str, target: Target, recogniser: MakeCheckpoint
) -> None:
    """Thread blocks with many tiles, warps without a step of K, more columns than eight."""
    size = Size(decoder_size=48, vocab_size=331)
    model = sized(kind, recogniser, size, getattr(torch, dtype))
    args = model.weights.transducer, model.config.transducer
    frames = [random_frames(n % 4 % 3, n).to(getattr(torch, dtype)) for n in range(64)]
    expected, _ = decode(Transducer(*args), frames)
    found, _ = decode_at(kernels(*args, target), frames)
    assert_same(found, expected)
    assert 20 < sum(map(len, found)) < 480


@pytest.mark.parametrize("num_blocks", [1, 2, 7])
def test_the_number_of_thread_blocks_does_not_change_tokens(
    num_blocks: int, load: LoadModel
) -> None:
    model = load("tdt", blank_bias=4.0)
    args = model.weights.transducer, model.config.transducer
    frames = [random_frames(n) for n in (3, 9)]
    expected, _ = decode(Transducer(*args), frames)
    found, _ = decode(emulated_transducer(*args, num_blocks), frames)
    assert_same(found, expected)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_schedule_does_not_change_tokens(seed: int, load: LoadModel) -> None:
    """With thread blocks and warps that pause at random, and a block 0 that begins late."""
    model = load("rnnt", blank_bias=2.0)
    config = model.config.transducer
    module = EmulatedTransducerModule(config.hidden_size)
    ours = KernelTransducer(model.weights.transducer, config, module, 4)
    frames = [random_frames(n) for n in (1, 4, 3)]
    expected, _ = decode(ours, frames)
    module.schedule_seed, module.late = seed, 300 * (seed % 2)
    found, _ = decode(ours, frames)
    assert found == expected and any(found)


@pytest.mark.parametrize("target", TARGETS)
def test_states_are_read_from_and_written_to_slots(target: Target, load: LoadModel) -> None:
    """Streams at different phases, and a fork."""
    model = load("tdt", blank_bias=4.0)
    ours = kernels(model.weights.transducer, model.config.transducer, target)
    like = ours.start().output
    early, late = random_frames(5, 1).to(like), random_frames(9, 2).to(like)
    pool = TransducerState.join([ours.start() for _ in range(4)])
    _, [state] = decode(ours, [late[:4]])
    for name in ("hidden", "cell", "output", "num_frames", "frame"):
        getattr(pool, name)[2] = getattr(state, name)[0]
    before = TransducerState.join([pool])

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=like.device)

    batch = torch.stack([early, late[4:]])
    ours.launch(ours.project(batch), integers(5, 5), integers(0, 2), integers(0, 1), pool)
    for slot, frames in ((0, early), (1, late)):
        _, [expected] = decode(ours, [frames])
        assert torch.equal(pool.hidden[slot], expected.hidden[0])
        assert torch.equal(pool.output[slot], expected.output[0])
        assert pool.num_frames[slot] == len(frames) and pool.frame[slot] == expected.frame[0]
    for slot in (2, 3):  # the source of the fork, and a slot of no stream
        for name in ("hidden", "cell", "output", "num_frames", "frame"):
            assert torch.equal(getattr(pool, name)[slot], getattr(before, name)[slot])


@pytest.mark.parametrize("target", TARGETS)
def test_of_equal_logits_the_lowest_id_is_chosen(target: Target, load: LoadModel) -> None:
    """Also if some are -0."""
    model = load("rnnt", blank_bias=-100.0)
    head = model.weights.transducer.head
    weight, bias = torch.zeros_like(head.weight), torch.zeros(len(head.weight))
    weight[:2] = -0.0
    bias[:2] = -0.0
    weights = replace(model.weights.transducer, head=replace(head, weight=weight, bias=bias))
    found, _ = decode_at(kernels(weights, model.config.transducer, target), [random_frames(1)])
    assert [e.token for e in found[0]] == [0] * model.config.transducer.max_symbols
    assert all(e.confidence == pytest.approx(0, abs=1e-4) for e in found[0])


def test_tiles_hold_the_operands_of_lanes() -> None:
    """Lane 4 g + t has the rows g and g + 8, and the elements of K that its product takes."""
    weight = torch.arange(32 * 48).view(32, 48).float()
    g, t, tile, step = 5, 2, 1, 2
    lane = pack_tiles(weight)[tile, step, 4 * g + t]
    rows = weight[16 * tile : 16 * tile + 16, 16 * step : 16 * step + 16]
    assert torch.equal(lane, rows[[g, g + 8], 4 * t : 4 * t + 4].flatten())
    small = torch.arange(256).view(16, 16).to(torch.bfloat16)
    pairs = [small[row, k : k + 2] for k in (2 * t, 2 * t + 8) for row in (g, g + 8)]
    assert torch.equal(pack_tiles(small)[0, 0, 4 * g + t], torch.cat(pairs))


def test_sizes_without_kernels_are_named(load: LoadModel) -> None:
    config = load("rnnt").config.transducer
    assert kernel_obstacle(config) is None
    for changes, sentence in (
        ({"hidden_size": 24}, "multiples of 16 up to 640; this model has 24"),
        ({"hidden_size": 656}, "this model has 656"),
        ({"num_layers": 17}, "take 16 layers; this model has 17"),
    ):
        assert sentence in (kernel_obstacle(replace(config, **changes)) or "")


def logits_after(
    weights: TransducerWeights, config: TransducerConfig, tokens: list[int], frame: Tensor
) -> Tensor:
    """Logits of a frame [1, in] after some tokens, as float32."""
    decoder = Transducer(weights, config)
    state = decoder.start()
    output, hidden, cell = state.output, state.hidden, state.cell
    for token in tokens:
        output, hidden, cell = decoder._predict([token], hidden, cell)
    projected = apply(weights.encoder_projector, frame[None])
    return apply(weights.head, torch.relu(projected + output[:, None]))[0, 0].float()


def assert_explained(
    weights: TransducerWeights,
    config: TransducerConfig,
    frames: Tensor,
    ours: list[Emission],
    theirs: list[Emission],
) -> None:
    """The first difference of tokens lies between logits that are closer than their rounding."""
    pairs = zip(triples(ours), triples(theirs), strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    after = [found[same] for found in (ours, theirs) if len(found) > same]
    frame = min(emission.frame for emission in after)
    chosen = {e.token if e.frame == frame else config.blank_id for e in after}
    chosen |= {config.blank_id} if len(chosen) == 1 else set()
    tokens = [emission.token for emission in ours[:same]]
    rounded = logits_after(weights, config, tokens, frames[frame : frame + 1])
    precise = map_leaves(weights, Tensor.float)
    exact = logits_after(precise, config, tokens, frames[frame : frame + 1].float())
    first, second = (exact[token] for token in chosen)
    assert (first - second).abs() <= 2 * (rounded - exact).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1025, 8193, 13088])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_200_streams_of_released_size(vocab_size: int, dtype: str) -> None:
    """In bfloat16, a product's summation order may change a choice between nearly equal logits."""
    device, kind = torch.device("cuda"), getattr(torch, dtype)
    size = replace(RELEASED_SIZE, hidden_size=32, num_layers=1, num_heads=4, vocab_size=vocab_size)
    model = random_model("rnnt", size, device, kind)
    weights, config = model.weights.transducer, model.config.transducer
    num_tokens = num_different = 0
    with torch.inference_mode():
        sample = torch.stack([random_frames(24, n) for n in range(8)]).to(device, kind)
        weights, _ = calibrated(weights, config, sample, load_transducer)
        ours, torchs = load_transducer(weights, config), Transducer(weights, config)
        for first in range(0, 200, 50):
            frames = [random_frames(n % 25, n).to(device, kind) for n in range(first, first + 50)]
            (found, _), (expected, _) = decode(ours, frames), decode(torchs, frames)
            for mine, theirs, own in zip(found, expected, frames, strict=True):
                num_tokens += len(mine)
                if triples(mine) != triples(theirs):
                    assert kind == torch.bfloat16
                    num_different += 1
                    assert_explained(weights, config, own, mine, theirs)
    assert num_tokens > 100 and num_different < 100


def test_an_unexplained_difference_is_found(recogniser: MakeCheckpoint) -> None:
    model = load_model(recogniser("rnnt", blank_bias=4.0), CPU, torch.bfloat16)
    weights, config = model.weights.transducer, model.config.transducer
    frames = random_frames(9).to(torch.bfloat16)
    [expected], _ = decode(Transducer(weights, config), [frames])
    logits = logits_after(weights, config, [], frames[expected[0].frame : expected[0].frame + 1])
    assert logits.argmax() == expected[0].token
    wrong = replace(expected[0], token=int(logits[:-1].argmin()))
    with pytest.raises(AssertionError):
        assert_explained(weights, config, frames, [wrong], expected)
    with pytest.raises(AssertionError):
        assert_explained(weights, config, frames, [], expected)
