"""Deadlines of playback: no schedule makes a stream late that the device could serve in time."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel_tts import Session
from megakernel_tts.engine.deadlines import DeadlineScheduler
from megakernel_tts.engine.scheduler import SchedulingPolicy
from megakernel_tts.engine.work_times import IterationWork
from megakernel_tts.loader import LoadedModel
from megakernel_tts.session import FRAME_S
from megakernel_tts.text.prompt import PromptLayout
from tests.engine.timed import Device, TimedBackend, TimedVocoder, gaps, record_chunks
from tests.rig import TEXT, UNLIMITED, Rig, codes, drain, scripted


@dataclass(frozen=True)
class Arrival:
    """A stream that is opened at a time in seconds, and makes so many frames."""

    time_s: float
    num_frames: int
    layout: PromptLayout = "full"


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
    ) -> None:
        self.backend = TimedBackend(device, num_slots, max_streams)
        self.backend.endless = True
        vocoder = TimedVocoder(loaded.engine.decoder, device)
        self.rig = Rig(loaded, self.backend, len(arrivals), vocoder=vocoder, policy=policy)
        self.spoken: list[Spoken] = []
        self._device = device
        self._left = sorted(enumerate(arrivals), key=lambda pair: pair[1].time_s)
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

    def check_codes(self) -> None:
        """Checks that each stream has the codes of a stream alone, and all of its frames."""
        for spoken, (chunks, finish) in zip(self.spoken, self.delivered, strict=True):
            assert finish.reason == "length"
            np.testing.assert_array_equal(codes(chunks), scripted(spoken.seed, finish.frames))

    @property
    def longest_gap_s(self) -> float:
        return max(max(gaps(spoken.chunks)) for spoken in self.spoken)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_stream_misses_a_deadline_while_the_device_has_capacity(
    load: Callable[..., LoadedModel], data: st.DataObject
) -> None:
    """With random arrivals, lengths, numbers of slots and columns, and shares of the device."""
    num_slots = data.draw(st.integers(1, 10), "slots")
    max_streams = data.draw(st.integers(1, num_slots), "columns")
    num_launches = -(-num_slots // max_streams)
    # Of the time in which a frame is played: all streams' frames, each decoded alone.
    load_share = data.draw(st.floats(0.05, 0.4), "load")
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
        # A budget of positions and a frame of all streams leave a fifth of a frame's time.
        position_s=data.draw(st.floats(1e-5, (0.8 - load_share) * FRAME_S / budget), "position"),
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
    run = Run(load(), device, arrivals, num_slots, max_streams)
    run.check_codes()
    assert run.longest_gap_s == 0.0


def burst(loaded: LoadedModel, **policy: int) -> Run:
    """Four streams have just begun when 28 prompts arrive, 0.5 s of work on the device."""
    device = Device(0.004, 0.0003, 0.0005, stream_s=0.0002, position_s=0.0008)
    arrivals = [Arrival(0.0, 100)] * 4 + [Arrival(0.11, 20)] * 28
    return Run(loaded, device, arrivals, 32, policy=SchedulingPolicy(**policy))


def test_a_burst_of_prompts_delays_no_stream_past_its_deadline(
    load: Callable[..., LoadedModel],
) -> None:
    run = burst(load())
    run.check_codes()
    assert run.longest_gap_s == 0.0
    assert max(run.backend.prefill_positions) <= SchedulingPolicy().prefill_budget_positions
    assert sum(run.backend.prefill_positions) * 0.0008 > 0.5, "the burst is light"


def test_without_deadlines_the_burst_would_delay_a_stream(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeadlineScheduler, "prefill_budget", lambda *_: 1 << 20)
    run = burst(load())
    assert run.longest_gap_s > 0.0


def test_a_prompt_longer_than_the_budget_is_run_in_parts(load: Callable[..., LoadedModel]) -> None:
    """Streams that speak get a frame between two parts."""
    run = burst(load(), prefill_budget_positions=4)
    run.check_codes()
    assert max(run.backend.prefill_positions) <= 4 < max(run.backend.prompt_lengths) - 9
    assert run.longest_gap_s == 0.0


def test_streams_share_too_few_columns_fairly(load: Callable[..., LoadedModel]) -> None:
    """Streams that begin together get their first chunks in turn."""
    device = Device(0.01)
    run = Run(load(), device, [Arrival(0.0, 40)] * 6, num_slots=6, max_streams=2)
    run.check_codes()
    firsts = [spoken.chunks[0][0] for spoken in run.spoken]
    assert max(firsts) <= 4 * device.frame_s
    assert run.longest_gap_s == 0.0


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
    deadlines = DeadlineScheduler(max_streams=8, prefill_budget=128)
    deadlines.times.add(IterationWork(0, 1, 1, 0.001, 0.001))
    deadlines.times.add(IterationWork(10, 1, 1, 0.001, 60.0))
    stream = SimpleNamespace(deadline_s=0.5)
    budgets = [deadlines.prefill_budget([stream], 0.0) for _ in range(20)]  # type: ignore[list-item]
    assert budgets[0] == 0 and max(budgets) > 0
