"""Sizes of chunks by the speed of the engine, on a virtual clock: arrivals, gaps, growth."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from megakernel_tts.engine.chunking import Chunking
from megakernel_tts.loader import LoadedModel
from megakernel_tts.session import FRAME_S, ChunkPolicy
from megakernel_tts.text.splitter import SplitLimits
from tests.engine.timed import Device, TimedBackend, TimedVocoder, gaps, record_chunks
from tests.rig import Rig, drain

NUM_FRAMES = 40  # of a turn


def speak(
    loaded: LoadedModel, device: Device, num_turns: int = 1, **chunks: Any
) -> list[list[tuple[float, int]]]:
    """The arrival in seconds and the frames of every chunk of each turn; `chunks` as `Rig.open`."""
    decoder = loaded.engine.decoder
    rig = Rig(loaded, TimedBackend(device), vocoder=TimedVocoder(decoder, device))
    device.clock, rig.backend.endless = rig.clock, True
    turns: list[list[tuple[float, int]]] = []
    for seed in range(num_turns):
        session = rig.open(None, seed=seed, max_frames=NUM_FRAMES, **chunks)
        turns.append(record_chunks(session, device.clock))
        with rig.paused():  # else the text may run dry before its end is known
            session.push_text("hello to the world.")
            session.end()
        drain(session)
    rig.close()
    return turns


@pytest.mark.parametrize("real_time_factor", [0.3, 0.45, 0.6, 0.7, 0.79])
@pytest.mark.parametrize("codec_share", [0.0, 0.4])
@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_ten_turns_have_no_gap_if_the_real_time_factor_is_below_0_8(
    load: Callable[..., LoadedModel], real_time_factor: float, codec_share: float, jitter: float
) -> None:
    """The factor is that of the smallest chunks."""
    total_s = real_time_factor * FRAME_S
    codec_s = codec_share * total_s / 2
    device = Device(total_s - 2 * codec_s, codec_s, codec_s, jitter)
    turns = speak(load(), device, num_turns=10)
    assert all(sum(size for _, size in chunks) == NUM_FRAMES for chunks in turns)
    assert [max(gaps(chunks)) for chunks in turns] == [0.0] * 10


def test_chunks_double_if_the_device_is_idle(load: Callable[..., LoadedModel]) -> None:
    """With the times of an H200: 1.2 ms for a frame, 0.4 ms for a call of the codec."""
    (chunks,) = speak(load(), Device(0.0012, 0.0003, 0.0001))
    assert [size for _, size in chunks][:6] == [1, 2, 4, 8, 8, 8]


@pytest.mark.parametrize("real_time_factor", [0.1, 0.7, 0.9, 1.5])
def test_the_speed_does_not_change_chunks_of_one_size(
    load: Callable[..., LoadedModel], real_time_factor: float
) -> None:
    (chunks,) = speak(load(), Device(real_time_factor * FRAME_S, jitter=0.2), first=8, largest=8)
    assert [size for _, size in chunks] == [8] * (NUM_FRAMES // 8)


def test_chunks_grow_to_the_largest_where_there_is_time(load: Callable[..., LoadedModel]) -> None:
    (chunks,) = speak(load(), Device(0.6 * FRAME_S))
    sizes = [size for _, size in chunks]
    assert sizes[:2] == [1, 1] and max(sizes) == 8
    assert all(later >= size for size, later in pairwise(sizes[:-1]))


def test_chunks_double_if_the_engine_is_slower_than_playback(
    load: Callable[..., LoadedModel],
) -> None:
    """A large chunk costs less per frame: eight frames are made in real time, one is not."""
    (chunks,) = speak(load(), Device(0.4 * FRAME_S, 0.8 * FRAME_S))
    assert [size for _, size in chunks][:6] == [1, 1, 1, 2, 4, 8]
    assert max(gaps(chunks)[6:]) == 0.0


@pytest.mark.parametrize(("stall_s", "restarts"), [(0.05, False), (5.0, True)])
@pytest.mark.parametrize("continued", [" the quick brown fox jumps over the lazy dog", ". the end"])
def test_chunks_begin_small_again_after_their_audio_was_played_while_text_was_missing(
    load: Callable[..., LoadedModel], stall_s: float, continued: str, restarts: bool
) -> None:
    loaded, device = load(), Device(0.1 * FRAME_S)
    vocoder = TimedVocoder(loaded.engine.decoder, device)
    rig = Rig(loaded, TimedBackend(device), vocoder=vocoder)
    device.clock = rig.clock
    rig.backend.endless = False
    session = rig.open(None, ahead=400, limits=SplitLimits(sentence=1))
    session.push_text("hello to the world and to the quick brown fox and the lazy dog")
    if continued.startswith("."):
        session.flush()
    rig.settle()
    num_before = session._events.num_unread
    rig.advance(stall_s)
    session.push_text(continued)
    session.end()
    chunks, _ = drain(session)
    rig.close()
    ends = np.cumsum([len(chunk.codes) for chunk in chunks])
    first_after = chunks[int(np.searchsorted(ends, num_before)) + 1]
    assert (len(first_after.codes) == 1) == restarts


def test_a_plan_holds_until_its_chunk_is_complete() -> None:
    chunking = Chunking(ChunkPolicy(1, 8), num_lookahead=0)
    chunking.plan(0.0, num_out=0, num_pending=0)
    chunking.plan(0.01, num_out=1, num_pending=0)
    assert chunking.size == 2
    chunking.plan(10.0, num_out=1, num_pending=1)
    assert chunking.size == 2


def test_the_lookahead_is_part_of_the_time_of_a_chunk() -> None:
    sizes: list[int] = []
    for num_lookahead in (0, 2):
        chunking = Chunking(ChunkPolicy(1, 8), num_lookahead)
        chunking.plan(0.0, num_out=0, num_pending=0)
        chunking.plan(0.02, num_out=1, num_pending=0)
        sizes.append(chunking.size)
    assert sizes == [2, 1]
