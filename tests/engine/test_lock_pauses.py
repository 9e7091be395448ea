"""How long the engine thread works, on its clock, before other threads get the interpreter lock."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from megakernel_tts.engine import lock_pauses, scheduler
from megakernel_tts.engine.decoding import DecodePipeline
from megakernel_tts.engine.delivery import Delivery
from megakernel_tts.engine.feeding import TextFeeder
from megakernel_tts.engine.lock_pauses import LockPauses
from megakernel_tts.engine.stream import Stream
from tests.rig import MakeRig, ManualClock, Rig, read

_NUM_STREAMS = 2 * scheduler.LOW_LATENCY_STREAMS
_WORK_S = 4e-4  # of the work for one stream
_MAX_WORKED = 3  # streams; the work for them takes longer than the limit


class CountedPauses:
    """Replaces the module `time` for `lock_pauses`.

    Attributes:
        events: `pause` for each pause, and what a test adds.
        lengths_s: Seconds of each pause.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.lengths_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.events.append("pause")
        self.lengths_s.append(seconds)

    @property
    def count(self) -> int:
        """Number of pauses."""
        return self.events.count("pause")


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> CountedPauses:
    """Counts the pauses, which take no time."""
    counted = CountedPauses()
    monkeypatch.setattr(lock_pauses, "time", counted)
    return counted


@pytest.fixture
def paused_for_any(paused: CountedPauses, monkeypatch: pytest.MonkeyPatch) -> CountedPauses:
    """Counts the pauses, which any number of streams has."""
    monkeypatch.setattr(scheduler, "LOW_LATENCY_STREAMS", 0)
    return paused


def test_a_pause_is_due_when_the_last_one_or_a_wait_is_too_long_ago(paused: CountedPauses) -> None:
    clock = ManualClock()
    pauses = LockPauses(clock)
    for now_s, count in ((8e-4, 0), (12e-4, 1), (20e-4, 1), (24e-4, 2)):
        clock.now_s = now_s
        pauses.pause_if_due()
        assert paused.count == count
    clock.now_s = 32e-4
    pauses.restart()
    clock.now_s = 40e-4
    pauses.pause_if_due()
    assert paused.count == 2
    pauses.pause()
    assert paused.count == 3


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (TextFeeder, "build_prompt"),
        (TextFeeder, "begin_segment"),
        (TextFeeder, "feed"),
        (Stream, "plan_chunk"),
        (Stream, "read_text"),
        (Stream, "add_frames"),
        (Stream, "end_segment"),
        (Delivery, "deliver"),
    ],
)
def test_the_work_for_a_few_streams_is_followed_by_a_pause(
    owner: type,
    name: str,
    make_rig: MakeRig,
    paused_for_any: CountedPauses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One kind of work takes time, and the others none."""
    rig = make_rig(_NUM_STREAMS)
    function: Callable[..., Any] = getattr(owner, name)
    restart = LockPauses.restart
    num_worked, most_worked, num_pauses = 0, 0, 0

    def restarted(pauses: LockPauses) -> None:
        nonlocal num_worked
        num_worked = 0
        restart(pauses)

    def timed(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_worked, most_worked, num_pauses
        num_worked = num_worked + 1 if num_pauses == paused_for_any.count else 1
        most_worked, num_pauses = max(most_worked, num_worked), paused_for_any.count
        rig.clock.now_s += _WORK_S
        return function(*arguments, **keywords)

    monkeypatch.setattr(LockPauses, "restart", restarted)
    monkeypatch.setattr(owner, name, timed)
    rig.backend.gate.clear()
    sessions = [rig.open(seed=0, layout="full", first=1, largest=1)]
    rig.hold()
    sessions += [rig.open(seed=i, layout="full") for i in range(1, _NUM_STREAMS)]
    rig.resume()
    assert {finish.reason for finish in read(sessions)} == {"eos"}
    assert most_worked == _MAX_WORKED


@pytest.mark.parametrize(("num_streams", "is_few"), [(8, True), (9, False)])
def test_few_streams_have_no_pauses_but_behind_first_chunks(
    num_streams: int, is_few: bool, make_rig: MakeRig, paused: CountedPauses
) -> None:
    rig = make_rig(_NUM_STREAMS)
    rig.backend.gate.clear()
    sessions = [rig.open(seed=0, first=1, largest=1)]
    rig.hold()
    sessions += [rig.open(seed=i, first=1, largest=1) for i in range(1, num_streams)]
    rig.resume()
    assert {finish.reason for finish in read(sessions)} == {"eos"}
    assert paused.count and (set(paused.lengths_s) == {lock_pauses._WAKE_UP_S}) is is_few
    assert is_few is (lock_pauses._WAKE_UP_S in paused.lengths_s)


def test_no_pause_follows_a_wait(
    rig: Rig, paused_for_any: CountedPauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock was released during the wait; a pause would delay the first chunk."""
    loop = rig.engine._loop
    start, deliver = DecodePipeline._start, Delivery.deliver

    def waiting(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            rig.clock.now_s += 1.0
            paused_for_any.events.append("wait")
            return result

        return wait

    def recorded(*arguments: Any) -> None:
        paused_for_any.events.append("delivery")
        deliver(*arguments)

    rig.settle()
    monkeypatch.setattr(rig.backend, "step", waiting(rig.backend.step))
    monkeypatch.setattr(loop.wakeup, "wait", waiting(loop.wakeup.wait))
    monkeypatch.setattr(loop.pending_opens, "wait", waiting(loop.pending_opens.wait))
    monkeypatch.setattr(
        DecodePipeline,
        "_start",
        lambda pipeline, chunks, wait: start(pipeline, chunks, waiting(wait)),
    )
    monkeypatch.setattr(Delivery, "deliver", recorded)
    for _ in range(2):  # the loop waits for a wake-up in between
        assert read([rig.open()])[0].reason == "eos"
        rig.settle()
    followed = set(pairwise(paused_for_any.events))
    assert ("wait", "delivery") in followed and ("delivery", "pause") in followed
    assert ("wait", "pause") not in followed


def test_a_pause_follows_a_launch_and_the_requests_of_the_codec(
    rig: Rig, paused_for_any: CountedPauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is at work then; these two take long, and what follows ends with a wait."""
    early_chunks, deliver, step = DecodePipeline._early_chunks, Delivery.deliver, rig.backend.step

    def timed_step(*arguments: Any, **keywords: Any) -> Any:
        rig.clock.now_s += 2e-3
        paused_for_any.events.append("launch")
        return step(*arguments, **keywords)

    def timed_chunks(*arguments: Any) -> Any:
        rig.clock.now_s += 2e-3
        paused_for_any.events.append("requests")
        return early_chunks(*arguments)

    def recorded(*arguments: Any) -> None:
        paused_for_any.events.append("delivery")
        deliver(*arguments)

    monkeypatch.setattr(rig.backend, "step", timed_step)
    monkeypatch.setattr(DecodePipeline, "_early_chunks", timed_chunks)
    monkeypatch.setattr(Delivery, "deliver", recorded)
    assert read([rig.open(first=1, largest=1)])[0].reason == "eos"
    followed = {
        pair for pair in pairwise(paused_for_any.events) if pair[0] in ("launch", "requests")
    }
    assert followed == {("launch", "pause"), ("requests", "pause")}
