"""States in slots: the same tokens as with states in tensors, on the emulator and on a GPU."""

import gc
import warnings
from typing import Literal

import numpy as np
import pytest
import torch

from megakernel_stt.engine.recogniser import StreamingRecogniser
from megakernel_stt.engine.slot_recogniser import SlotRecogniser, SlotRecognisers, batch_sizes
from megakernel_stt.engine.slots import SlotPool
from megakernel_stt.kernels.conformer import load_conformer
from megakernel_stt.kernels.transducer import load_transducer
from megakernel_stt.model.checkpoint import Model, load_model
from megakernel_stt.model.config import HOP_SIZE
from megakernel_stt.model.random_checkpoint import Kind
from megakernel_stt.network.encoder import StreamingEncoder
from megakernel_stt.network.transducer import Transducer
from tests.emulator.conformer import emulated_conformer
from tests.emulator.transducer import emulated_transducer
from tests.stt.conftest import CPU, MakeCheckpoint
from tests.stt.streams import NOTHING, ids, packets, recognise, run, sound

Target = Literal["emulator", "cuda"]
TARGETS = ["emulator", pytest.param("cuda", marks=pytest.mark.gpu)]


def load(recogniser: MakeCheckpoint, kind: Kind, target: Target) -> Model:
    device = CPU if target == "emulator" else torch.device("cuda")
    return load_model(recogniser(kind, blank_bias=4.0), device, torch.float32)


def slots(model: Model, target: Target, num_streams: int = 3) -> SlotRecognisers:
    args = model.weights.transducer, model.config.transducer
    encoder = model.weights.encoder, model.config.encoder
    if target == "emulator":
        transducer, conformer = emulated_transducer(*args), emulated_conformer(*encoder)
    else:
        transducer, conformer = load_transducer(*args), load_conformer(*encoder)
    return SlotRecognisers(model, transducer, conformer, num_streams)


def torchs(model: Model, lookahead: int) -> StreamingRecogniser:
    transducer = Transducer(model.weights.transducer, model.config.transducer)
    return StreamingRecogniser(model, transducer, lookahead)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kind", "lookahead"), [("streaming", 0), ("multilingual", 3), ("streaming", 13)]
)
def test_a_stream_is_recognised_as_with_tensors(
    kind: Kind, lookahead: int, target: Target, recogniser: MakeCheckpoint
) -> None:
    """Also where it ends within a chunk."""
    model = load(recogniser, kind, target)
    with torch.inference_mode():
        ours = slots(model, target).make(lookahead)
    expected = torchs(model, lookahead)
    for length in (1, 45):
        arriving = packets(sound(length, length), length)
        found, theirs = (recognise(r, arriving, prompt=1) for r in (ours, expected))
        assert ids(found) == ids(theirs) and found.num_frames == theirs.num_frames
        assert length == 1 or ids(found)


@pytest.mark.parametrize("target", TARGETS)
def test_streams_at_different_phases_are_recognised_as_solo(
    target: Target, recogniser: MakeCheckpoint
) -> None:
    """Three streams in a step for four, which begin and end at different steps."""
    model = load(recogniser, "streaming", target)
    with torch.inference_mode():
        ours = slots(model, target).make(1)
    recordings = [sound(length, length) for length in (33, 57, 20)]
    solo = [ids(recognise(ours, [recording])) for recording in recordings]
    streams = [ours.start(0) for _ in recordings]
    for stream, recording in zip(streams, recordings, strict=True):
        stream.add(recording)
    ready = streams[:1]
    with torch.inference_mode():
        while ready:
            ours.step(ready)
            streams = [s if s.ended or ours.is_ready(s) else s.fork_ended(NOTHING) for s in streams]
            ready = [stream for stream in streams if ours.is_ready(stream)]
    assert [ids(stream) for stream in streams] == solo and any(solo)


def test_a_fork_does_not_change_its_stream(recogniser: MakeCheckpoint) -> None:
    """Bit for bit, also if the stream goes on before the fork ends."""
    model = load(recogniser, "streaming", "emulator")
    ours = slots(model, "emulator").make(1)
    first, rest = np.split(sound(40, 1), [30 * HOP_SIZE])
    plain, forked = ours.start(0), ours.start(0)
    for stream in (plain, forked):
        stream.add(first)
        run(ours, stream)
    fork = forked.fork_ended(sound(20, 2))
    for stream in (plain, forked):
        stream.add(rest)
        run(ours, stream)
    run(ours, fork)
    ended = ours.start(0)
    ended.add(np.concatenate([first, sound(20, 2)]))
    run(ours, ended)
    last = ended.fork_ended(NOTHING)
    run(ours, last)
    assert ids(fork) == ids(last)
    pool = ours._pool
    for name in ("keys", "values", "gated", "stage1", "num_frames"):
        tensor = getattr(pool.encoder, name)
        assert torch.equal(tensor[plain.state.index], tensor[forked.state.index])
    assert torch.equal(
        pool.transducer.hidden[plain.state.index], pool.transducer.hidden[forked.state.index]
    )


def test_slots_are_free_again_after_their_streams(recogniser: MakeCheckpoint) -> None:
    model = load(recogniser, "streaming", "emulator")
    made = slots(model, "emulator", num_streams=2)
    first, second = made.make(1), made.make(0)
    other = made.make(3)  # with other keys and values: 68 of the past
    assert first._pool is second._pool and other._pool is not first._pool
    num_free = first._pool.num_free
    assert num_free == 2 * 2 + 2
    for ours in (first, second):
        recognise(ours, [sound(30, 1)])
        stream = ours.start(0)
        stream.add(sound(20, 2))
        run(ours, stream)
        assert first._pool.num_free == num_free - 1
        del stream
        gc.collect()
        assert first._pool.num_free == num_free


def test_a_pool_without_a_free_slot_says_so(recogniser: MakeCheckpoint) -> None:
    model = load(recogniser, "streaming", "emulator")
    encoder = StreamingEncoder(model.weights.encoder, model.config.encoder, 0)
    decoder = Transducer(model.weights.transducer, model.config.transducer)
    pool = SlotPool(encoder.start(), decoder.start(), num_streams=1)
    taken = [pool.take() for _ in range(pool.num_free)]
    with pytest.raises(RuntimeError, match="No slot is free"):
        pool.take()
    del taken
    assert pool.take().index > pool.unused


def test_batch_sizes_cover_all_streams() -> None:
    assert [batch_sizes(n) for n in (1, 3, 8, 64)] == [
        [1],
        [1, 2, 4],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 16, 32, 64],
    ]
    assert batch_sizes(1000) == batch_sizes(64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_host_waits_once_per_chunk(dtype: str, recogniser: MakeCheckpoint) -> None:
    """Nothing between audio and tokens makes the host wait: torch reports what does."""
    folder = recogniser("streaming", blank_bias=4.0)
    model = load_model(folder, torch.device("cuda"), getattr(torch, dtype))
    with torch.inference_mode():
        ours: SlotRecogniser = slots(model, "cuda").make(1)
    stream = ours.start(0)
    stream.add(sound(80, 1))
    run(ours, stream)
    stream.add(sound(80, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(ours, stream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [f"{w.filename}:{w.lineno}: {w.message}" for w in caught]
    # The first use of the debug mode in a process also warns that the mode is a prototype.
    waits = [line for line in found if "synchronizing CUDA operation" in line]
    assert ids(stream) and len(waits) == 5, found  # chunks
