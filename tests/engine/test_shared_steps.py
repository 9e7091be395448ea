"""While many streams can make a frame, new sessions do not end each step with one frame."""

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_tts import Session
from megakernel_tts.engine import deadlines
from megakernel_tts.engine.chunking import Chunking
from megakernel_tts.engine.deadlines import DeadlineScheduler
from megakernel_tts.engine.interrupts import Interrupts
from megakernel_tts.engine.work_times import IterationWork
from megakernel_tts.loader import LoadedModel
from megakernel_tts.session import ChunkPolicy
from megakernel_tts.text.prompt import PromptLayout
from tests.engine.test_deadlines import DELIVERY_S, Arrival, Run
from tests.engine.timed import Device, gaps
from tests.rig import UNLIMITED, MakeRig, Rig

_SIZES = st.integers(1, 8)


@given(_SIZES, _SIZES, st.integers(0, 8), st.integers(2, 4))
def test_a_first_chunk_is_rounded_up_by_less_than_a_step(
    first: int, largest: int, num_pending: int, multiple: int
) -> None:
    largest = max(first, largest)
    chunking = Chunking(ChunkPolicy(first, largest, ahead=100), num_lookahead=0)
    chunking.round_up_first(num_pending, multiple)
    assert first <= (size := chunking.size) <= min(first + multiple - 1, largest)
    assert (size - num_pending) % multiple == 0 or size == largest
    for num_made in range(10):  # steps that end with one frame
        chunking.round_up_first(num_pending + num_made, multiple)
    assert chunking.size <= first + multiple - 1


def test_frames_of_a_shared_step() -> None:
    scheduler = DeadlineScheduler(8, prefill_budget=128, burst_budget=1024, delivery_s=DELIVERY_S)
    assert [scheduler.shared_frames(n) for n in (1, 36, 37, 65)] == [1, 1, 2, 2]


class _Planned:
    """A stream with chunks of eight frames, as far as a step is planned by it."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.rounded_to: list[int] = []

    def step_range(self) -> tuple[int, int]:
        return 8, 8

    def round_up_first_chunk(self, multiple: int) -> None:
        self.rounded_to.append(multiple)


@pytest.mark.parametrize(
    ("num_chosen", "left_out_until_s", "others_wait", "deadline_s", "num_frames", "rounded_to"),
    [
        (1, 9.0, False, 9.0, 8, []),
        (1, 9.0, True, 9.0, 1, []),
        (1, -1.0, False, 9.0, 1, []),
        (36, 9.0, False, 9.0, 8, [2]),
        (36, 9.0, True, 9.0, 2, [2]),
        (36, -1.0, False, 9.0, 2, [2]),
        (64, -1.0, False, 9.0, 2, [2]),
        (36, 9.0, False, 0.046, 2, [2]),
        (36, 0.035, False, 9.0, 1, []),
        (36, 9.0, True, 0.035, 1, []),
    ],
)
def test_what_limits_a_step(
    num_chosen: int,
    left_out_until_s: float,
    others_wait: bool,
    deadline_s: float,
    num_frames: int,
    rounded_to: list[int],
) -> None:
    """A frame takes 10 ms, one stream is left out, and chunks are due 25 ms before deadlines."""
    scheduler = DeadlineScheduler(64, prefill_budget=128, burst_budget=1024, delivery_s=0.005)
    scheduler.times.add(IterationWork(0, 64, 1, 0.01, 0.01))
    chosen: list[Any] = [_Planned(deadline_s) for _ in range(num_chosen)]
    left_out: list[Any] = [_Planned(left_out_until_s)]
    assert scheduler.plan_step(chosen, left_out, 0.0, others_wait=others_wait) == num_frames
    assert all(stream.rounded_to == rounded_to for stream in chosen)


def cancel(rig: Rig, sessions: list[Session]) -> None:
    sessions.pop().cancel()


def open_another(rig: Rig, sessions: list[Session]) -> None:
    sessions.append(rig.open(seed=99, at_once=True))


def open_with_a_break(rig: Rig, sessions: list[Session]) -> None:
    sessions.append(rig.open('<break time="1s"/>hello to the world.', seed=99, at_once=True))


@pytest.mark.parametrize("act", [cancel, open_another, open_with_a_break])
@pytest.mark.parametrize(
    ("num_speaking", "chunk_frames", "num_made"), [(37, 2, 2), (37, 8, 1), (20, 2, 1)]
)
def test_what_a_session_does_ends_no_shared_step(
    make_rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    num_speaking: int,
    chunk_frames: int,
    num_made: int,
    act: Callable[[Rig, list[Session]], None],
) -> None:
    """It is opened or cancelled during the first frame of a step."""
    rig = make_rig(num_speaking + 1)
    rig.backend.endless = True

    def begin(seed: int) -> Session:
        return rig.open(
            seed=seed, at_once=True, first=chunk_frames, largest=chunk_frames, ahead=UNLIMITED
        )

    sessions = [begin(seed) for seed in range(num_speaking)]
    rig.backend.wait_until(lambda: num_speaking in rig.backend.batch_sizes)
    rig.hold()
    step, made = rig.backend.step, list[int]()

    def act_during_step(slots: Sequence[int], num_frames: int, *arguments: Any) -> object:
        if len(slots) != num_speaking or num_frames < chunk_frames or made:
            return step(slots, num_frames, *arguments)
        before = len(rig.backend.batch_sizes)
        act(rig, sessions)
        result = step(slots, num_frames, *arguments)
        made.append(len(rig.backend.batch_sizes) - before)
        return result

    monkeypatch.setattr(rig.backend, "step", act_during_step)
    rig.resume()
    rig.backend.wait_until(lambda: bool(made))
    for session in sessions:
        session.cancel()
    assert made == [num_made]


def waits_s(
    loaded: LoadedModel, seed: int, layout: PromptLayout, cancelled_share: float = 0.0
) -> list[float]:
    """The times to the first chunks of 300 streams that arrive at random, 100 per second."""
    rng, time_s, arrivals = random.Random(seed), 0.0, list[Arrival]()
    while len(arrivals) < 300:
        time_s += rng.expovariate(100)
        is_cancelled, cancelled_s = rng.random() < cancelled_share, time_s + rng.uniform(0, 0.5)
        arrivals.append(Arrival(time_s, 50, layout, cancelled_s if is_cancelled else None))
    device = Device(0.0016, stream_s=6e-5, step_s=0.012)
    run = Run(loaded, device, arrivals, num_slots=192, max_streams=64)
    if not cancelled_share:
        run.check_codes()
    spoken = [spoken for spoken in run.spoken if spoken.chunks]
    assert max(max(gaps(stream.chunks)) for stream in spoken) == 0.0
    return sorted(stream.chunks[0][0] - stream.opened_s for stream in spoken)


@pytest.mark.parametrize("layout", ["streaming", "full"])
@pytest.mark.parametrize("seed", range(2))
def test_the_engine_keeps_up_with_a_rate_that_single_frames_do_not_reach(
    load: Callable[..., LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    layout: PromptLayout,
) -> None:
    """Steps of one frame make 64 / (12 + 5.4 ms) = 3,670 frames per second; 5,000 are played."""
    longest_s = waits_s(load(), seed, layout)[-1]
    monkeypatch.setattr(deadlines, "_MAX_UNSHARED", 192)
    assert longest_s < 0.1 < waits_s(load(), seed, layout)[-1]


@pytest.mark.parametrize("seed", range(2))
def test_cancellations_delay_no_first_chunk(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Half of the streams are cancelled within half a second."""

    def median_s() -> float:
        return statistics.median(waits_s(load(), seed, "streaming", cancelled_share=0.5))

    shared_s = median_s()
    monkeypatch.setattr(Interrupts, "interrupt_unless_shared", Interrupts.interrupt)
    assert shared_s < 0.8 * median_s()
