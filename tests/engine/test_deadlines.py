"""Deadlines of playback: no schedule makes a stream late that the device could serve in time."""

import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel_tts import Session
from megakernel_tts.engine import deadlines
from megakernel_tts.engine.deadlines import DeadlineScheduler
from megakernel_tts.engine.scheduler import SchedulingPolicy
from megakernel_tts.engine.work_times import IterationWork
from megakernel_tts.loader import LoadedModel
from megakernel_tts.session import FRAME_S
from megakernel_tts.text.prompt import PromptLayout
from tests.engine.timed import Device, TimedBackend, TimedVocoder, gaps, record_chunks
from tests.rig import TEXT, UNLIMITED, Rig, codes, drain, scripted

DELIVERY_S = SchedulingPolicy().delivery_s


@dataclass(frozen=True)
class Arrival:
    """A stream that is opened at a time in seconds, and makes so many frames, or is cancelled."""

    time_s: float
    num_frames: int
    layout: PromptLayout = "full"
    cancelled_s: float | None = None


@dataclass
class Spoken:
    """A stream, and the arrival in seconds and the frames of each of its chunks."""

    seed: int
    opened_s: float
    session: Session
    chunks: list[tuple[float, int]]


class Run:
    """Opens streams at their times on a device's clock, and reads them to their ends."""

    def __init__(
        self,
        loaded: LoadedModel,
        device: Device,
        arrivals: Sequence[Arrival],
        num_slots: int,
        max_streams: int | None = None,
        policy: SchedulingPolicy | None = None,
        max_pending_frames: int = sys.maxsize,
    ) -> None:
        self.backend = TimedBackend(device, num_slots, max_streams)
        self.backend.endless = True
        vocoder = TimedVocoder(loaded.engine.decoder, device)
        vocoder.max_pending_frames = max_pending_frames
        self.rig = Rig(loaded, self.backend, len(arrivals), vocoder=vocoder, policy=policy)
        self.spoken: list[Spoken] = []
        self._device = device
        self._left = sorted(enumerate(arrivals), key=lambda pair: pair[1].time_s)
        self._left_to_cancel: list[tuple[float, Session]] = []
        self._opening = threading.Lock()
        device.clock, device.on_work = self.rig.clock, self._open_arrived
        while self._left:
            self.rig.settle()
            if self._left:
                device.clock.now_s = max(device.clock.now_s, self._left[0][1].time_s)
                self._open_arrived()
        self.delivered = [drain(spoken.session) for spoken in self.spoken]
        assert self.rig.idle()
        self.rig.close()

    def _open_arrived(self) -> None:
        """Opens and cancels the streams whose time has come; for the test and the engine's thread.

        Streams are cancelled only while others are left to open.
        """
        with self._opening:
            self._open_left()
            for cancelled_s, session in self._left_to_cancel[:]:
                if cancelled_s <= self._device.clock.now_s:
                    self._left_to_cancel.remove((cancelled_s, session))
                    session.cancel()

    def _open_left(self) -> None:
        while self._left and self._left[0][1].time_s <= self._device.clock.now_s:
            seed, arrival = self._left.pop(0)
            session = self.rig.open(
                TEXT,
                seed=seed,
                layout=arrival.layout,
                max_frames=arrival.num_frames,
                ahead=UNLIMITED,
            )
            chunks = record_chunks(session, self._device.clock)
            self.spoken.append(Spoken(seed, self._device.clock.now_s, session, chunks))
            if arrival.cancelled_s is not None:
                self._left_to_cancel.append((arrival.cancelled_s, session))

    def check_codes(self) -> None:
        """Checks that each stream has the codes of a solo stream, and all of its frames."""
        for spoken, (chunks, finish) in zip(self.spoken, self.delivered, strict=True):
            assert finish.reason == "length"
            np.testing.assert_array_equal(codes(chunks), scripted(spoken.seed, finish.frames))

    def longest_gap_s(self, delay_s: float = 0.0) -> float:
        """The longest gap if each chunk but the first reaches its caller so much later."""

        def received(chunks: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
            return [*chunks[:1], *((time_s + delay_s, count) for time_s, count in chunks[1:])]

        return max(max(gaps(received(spoken.chunks))) for spoken in self.spoken)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_stream_misses_a_deadline_while_the_device_has_capacity(
    load: Callable[..., LoadedModel], data: st.DataObject
) -> None:
    """With random arrivals, lengths, numbers of slots and columns, and shares of the device.

    Nor if each chunk but the first reaches its listener later, by no more than the time for it.
    """
    num_slots = data.draw(st.integers(1, 10), "slots")
    max_streams = data.draw(st.integers(1, num_slots), "columns")
    num_launches = -(-num_slots // max_streams)
    delay_s = data.draw(st.sampled_from([0.0, DELIVERY_S]), "delay of the delivery")
    # Of the time in which a frame is played: all streams' frames, each decoded solo.
    load_share = data.draw(st.floats(0.05, 0.3 - delay_s / FRAME_S), "load")
    codec_share = data.draw(st.floats(0.0, 0.5), "codec")
    frame_s = load_share * (1 - codec_share) * FRAME_S / num_launches
    budget = SchedulingPolicy().prefill_budget_positions
    call_s = load_share * codec_share * FRAME_S / num_slots
    device = Device(
        frame_s / 2,
        call_s / 2,
        call_s / 2,
        jitter=data.draw(st.sampled_from([0.0, 0.1]), "jitter"),
        stream_s=frame_s / 2 / max_streams,
        # A budget of positions, a frame of all streams and the delay leave a fifth of the time.
        position_s=data.draw(
            st.floats(1e-5, ((0.8 - load_share) * FRAME_S - delay_s) / budget), "position"
        ),
    )
    arrivals = data.draw(
        st.lists(
            st.builds(
                Arrival,
                st.sampled_from([0.0, 0.3]) | st.floats(0.0, 3.0),
                st.integers(3, 60),
                st.sampled_from(["full", "streaming"]),
            ),
            min_size=1,
            max_size=num_slots + 4,
        ),
        "arrivals",
    )
    max_pending_frames = data.draw(st.sampled_from([sys.maxsize, 1]), "frames decoded early")
    max_unshared = data.draw(st.sampled_from([1, 36]), "streams of steps that are not shared")
    with patch.object(deadlines, "_MAX_UNSHARED", max_unshared):
        run = Run(load(), device, arrivals, num_slots, max_streams, None, max_pending_frames)
    run.check_codes()
    assert run.longest_gap_s(delay_s) == 0.0


def test_streams_are_in_time_before_the_time_of_a_frame_is_known(
    load: Callable[..., LoadedModel],
) -> None:
    """The first iterations run a prompt each, so that no frame was measured solo."""
    device = Device(0.0125, stream_s=0.00625, position_s=0.00025)
    run = Run(load(), device, [Arrival(0.0, 3), Arrival(0.012, 3)], num_slots=2)
    assert run.backend.prefill_positions[1:], "the second prompt was run with the first"
    assert run.longest_gap_s(DELIVERY_S) == 0.0


def burst(loaded: LoadedModel, device: Device | None = None, **policy: float) -> Run:
    """Four streams have just begun when 32 prompts arrive, 0.5 s of work on the device."""
    device = device or Device(0.004, 0.0003, 0.0005, stream_s=0.0002, position_s=0.0008)
    arrivals = [Arrival(0.0, 100)] * 4 + [Arrival(0.11, 20)] * 32
    return Run(loaded, device, arrivals, 36, policy=SchedulingPolicy(**policy))  # type: ignore[arg-type]


def test_a_burst_of_prompts_delays_no_stream_past_its_deadline(
    load: Callable[..., LoadedModel],
) -> None:
    run = burst(load())
    run.check_codes()
    assert run.longest_gap_s(DELIVERY_S) == 0.0
    assert max(run.backend.prefill_positions) <= SchedulingPolicy().prefill_budget_positions
    assert sum(run.backend.prefill_positions) * 0.0008 > 0.5, "the burst is light"


def test_without_deadlines_the_burst_would_delay_a_stream(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeadlineScheduler, "prefill_budget", lambda *_, **__: 1 << 20)
    run = burst(load())
    assert run.longest_gap_s() > 0.0


@pytest.mark.parametrize(("delivery_s", "is_in_time"), [(0.0, False), (DELIVERY_S, True)])
def test_the_burst_leaves_time_for_the_delivery(
    load: Callable[..., LoadedModel], delivery_s: float, is_in_time: bool
) -> None:
    """Also where two iterations take less than it."""
    run = burst(load(), Device(0.0004, position_s=0.0008), delivery_s=delivery_s)
    assert run.longest_gap_s() == 0.0
    assert (run.longest_gap_s(DELIVERY_S) == 0.0) == is_in_time


@pytest.mark.parametrize("real_time_factor", [0.02, 0.3])
def test_time_for_the_delivery_changes_no_chunk_of_a_solo_stream(
    load: Callable[..., LoadedModel], real_time_factor: float
) -> None:
    """Neither its frames nor its time: on such a device no deadline is near."""
    chunks: list[list[tuple[float, int]]] = []
    for delivery_s in (0.0, DELIVERY_S):
        device = Device(0.8 * real_time_factor * FRAME_S, 0.2 * real_time_factor * FRAME_S)
        policy = SchedulingPolicy(delivery_s=delivery_s)
        run = Run(load(), device, [Arrival(0.0, 60)], num_slots=1, policy=policy)
        chunks.append(run.spoken[0].chunks)
    assert chunks[0] == chunks[1]


def test_a_prompt_longer_than_the_budget_is_run_in_chunks(load: Callable[..., LoadedModel]) -> None:
    """Streams that speak get a frame between two chunks."""
    run = burst(load(), prefill_budget_positions=4, burst_budget_positions=4)
    run.check_codes()
    assert max(run.backend.prefill_positions) <= 4 < max(run.backend.prompt_lengths) - 9
    assert run.longest_gap_s(DELIVERY_S) == 0.0


def test_a_burst_has_a_larger_budget() -> None:
    deadlines = DeadlineScheduler(
        max_streams=8, prefill_budget=128, burst_budget=1024, delivery_s=DELIVERY_S
    )
    assert deadlines.prefill_budget([], 0.0, is_burst=True) == 1024
    assert deadlines.prefill_budget([], 0.0) == 128


def test_streams_share_too_few_columns_fairly(load: Callable[..., LoadedModel]) -> None:
    """Streams that begin together get their first chunks in turn."""
    device = Device(0.01)
    run = Run(load(), device, [Arrival(0.0, 40)] * 6, num_slots=6, max_streams=2)
    run.check_codes()
    firsts = [spoken.chunks[0][0] for spoken in run.spoken]
    assert max(firsts) <= 4 * device.frame_s
    assert run.longest_gap_s(DELIVERY_S) == 0.0


def test_no_stream_starves_while_the_device_is_too_slow(load: Callable[..., LoadedModel]) -> None:
    """Every stream gets its first chunk long before the others end, and all end."""
    device = Device(1.5 * FRAME_S, position_s=0.002)
    rng = random.Random(0)
    arrivals = [Arrival(rng.uniform(0, 2), 30) for _ in range(8)]
    total_s = 8 * 30 / 2 * device.frame_s
    run = Run(load(), device, arrivals, num_slots=8, max_streams=2)
    run.check_codes()
    waits = [spoken.chunks[0][0] - spoken.opened_s for spoken in run.spoken]
    assert max(waits) < total_s / 4


def test_a_wrong_prediction_does_not_postpone_prefills_for_good() -> None:
    """A prompt during which the machine stood still for a minute."""
    deadlines = DeadlineScheduler(
        max_streams=8, prefill_budget=128, burst_budget=1024, delivery_s=DELIVERY_S
    )
    deadlines.times.add(IterationWork(0, 1, 1, 0.001, 0.001))
    deadlines.times.add(IterationWork(10, 1, 1, 0.001, 60.0))
    stream = SimpleNamespace(deadline_s=0.5)
    budgets = [deadlines.prefill_budget([stream], 0.0) for _ in range(20)]  # type: ignore[list-item]
    assert budgets[0] == 0 and max(budgets) > 0
