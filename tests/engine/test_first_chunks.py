"""The first chunk of a stream: what precedes it while few streams are open, and while many are."""

import threading

import pytest

from megakernel_tts import AudioChunk, Session
from megakernel_tts.engine.pending_opens import PendingOpens
from megakernel_tts.engine.work_times import IterationWork, WorkTimes
from tests.fakes import TIMEOUT_S
from tests.rig import TEXT, UNLIMITED, MakeRig, Rig, drain, read

_MANY = 12  # streams


def _speaking(rig: Rig, count: int) -> list[Session]:
    """Opens streams with chunks of one frame, which are stopped in a step after their first."""
    sessions = [
        rig.open(seed=1 + i, first=1, largest=1, ahead=UNLIMITED, at_once=True)
        for i in range(count)
    ]
    for session in sessions:
        assert isinstance(next(iter(session)), AudioChunk)
    rig.hold()
    return sessions


@pytest.mark.parametrize(
    ("num_speaking", "late_by_s", "expected"),
    [(1, 0, [1, 2]), (23, 0, [1, 24]), (1, 60, [2, 2]), (24, 0, [25, 25])],
    ids=["one", "many", "one that is late", "too many"],
)
def test_a_first_frame_is_made_before_those_of_streams_that_can_wait(
    make_rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    num_speaking: int,
    late_by_s: float,
    expected: list[int],
) -> None:
    rig = make_rig(num_speaking + 1)
    rig.backend.endless = True
    speaking = _speaking(rig, num_speaking)
    num_prefills = rig.backend.events.count("prefill")
    times = rig.engine._loop.scheduler.deadlines.times
    works, add = list[IterationWork](), times.add
    monkeypatch.setattr(times, "add", lambda work: (works.append(work), add(work)))
    rig.advance(late_by_s)
    other = rig.open(seed=99, first=1, largest=1, ahead=UNLIMITED, at_once=True)
    rig.resume()
    assert isinstance(next(iter(other)), AudioChunk)
    frames = _frames_before(rig, num_prefills + 1)
    rig.backend.wait_until(lambda: rig.backend.events.count("frame") >= frames + 2)
    assert rig.backend.batch_sizes[frames : frames + 2] == expected
    is_divided = expected[0] == 1
    assert [work.num_streams for work in works if work.only_first_frames] == [1] * is_divided
    for session in (*speaking, other):
        session.cancel()


def test_the_time_of_first_frames_predicts_no_later_ones() -> None:
    times = WorkTimes()
    times.add(IterationWork(0, 4, 1, 0.002, 0.003))
    before = times.frame_s(8), times.iteration_s(8), times.position_s
    times.add(IterationWork(10, 1, 1, 0.001, 0.002, only_first_frames=True))
    assert (times.frame_s(8), times.iteration_s(8), times.position_s) == before


def test_prompts_beside_first_frames_raise_the_time_of_a_position() -> None:
    times = WorkTimes()
    times.add(IterationWork(0, 4, 1, 0.002, 0.003))
    position_s, frame_s = times.position_s, times.frame_s(4)
    for _ in range(20):
        times.add(IterationWork(100, 1, 1, 0.001, 0.083, only_first_frames=True))
    assert position_s < 0.0008 == pytest.approx(times.position_s, rel=0.01)
    assert times.frame_s(4) == frame_s
    for _ in range(20):  # a first frame takes less time than that of another stream
        times.add(IterationWork(100, 1, 1, 0.001, 0.0025, only_first_frames=True))
    assert times.position_s == position_s, "a delay is forgotten, and the least is that at first"


def _frames_before(rig: Rig, prefill: int) -> int:
    """Frames that the backend made before a prefill; the first is 1."""
    events = rig.backend.events
    index = [i for i, event in enumerate(events) if event == "prefill"][prefill - 1]
    return events[:index].count("frame")


@pytest.mark.parametrize(
    ("count", "expected"), [(1, ["step", "deliver", "step"]), (_MANY, ["step", "step", "deliver"])]
)
def test_a_first_chunk_of_few_streams_is_delivered_before_the_next_step(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, count: int, expected: list[str]
) -> None:
    """Of many streams it is delivered beside that step, so that the device does not wait."""
    rig, calls = make_rig(_MANY), list[str]()
    decoding = rig.engine._loop.decoding
    step, deliver = rig.backend.step, decoding.deliver

    def record_step(*arguments: object) -> object:
        calls.append("step")
        return step(*arguments)  # type: ignore[arg-type]

    def record_delivery() -> bool:
        if decoding.in_flight:
            calls.append("deliver")
        return deliver()

    monkeypatch.setattr(rig.backend, "step", record_step)
    monkeypatch.setattr(decoding, "deliver", record_delivery)
    sessions = [rig.open(None, seed=1 + i) for i in range(count)]
    rig.settle()
    with rig.paused():
        for session in sessions:
            session.push_text(TEXT)
            session.end()
    assert {finish.reason for finish in read(sessions)} == {"eos"}
    assert calls[:3] == expected


def test_an_idle_backend_is_prepared_while_a_session_is_being_opened(rig: Rig) -> None:
    with rig.engine.pending_open():
        rig.backend.wait_until(lambda: rig.backend.events == ["prepare"])
    assert drain(rig.open(seed=1))[1].reason == "eos"
    assert rig.backend.events.count("prepare") == 1


def test_a_backend_at_work_is_not_prepared(rig: Rig) -> None:
    """It is prepared once it has made the last frame."""
    speaking = rig.open(seed=1)
    rig.hold()
    with rig.engine.pending_open():
        rig.resume()
        assert drain(speaking)[1].reason == "eos"
        rig.backend.wait_until(lambda: "prepare" in rig.backend.events)
    events = rig.backend.events
    assert "frame" not in events[events.index("prepare") :]


def test_a_stream_gets_the_slot_that_was_left_last(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are those of the stream before, and begin with the prefix of the same voice."""
    rig, slots = make_rig(3), list[int]()
    prefill = rig.backend.prefill

    def record(requests: list[object], budget: int | None = None) -> object:
        slots.extend(request.slot for request in requests)  # type: ignore[attr-defined]
        return prefill(requests, budget)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.backend, "prefill", record)
    for seed in range(3):
        assert drain(rig.open(seed=seed, at_once=True))[1].reason == "eos"
    assert slots == [0, 0, 0]


def test_an_error_while_the_backend_is_prepared_ends_no_stream(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = threading.Event()

    def fail() -> None:
        called.set()
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(rig.backend, "prepare", fail)
    with rig.engine.pending_open():
        assert called.wait(TIMEOUT_S)
    assert drain(rig.open(seed=1))[1].reason == "eos"


def test_the_loop_is_woken_for_the_first_of_several_opens() -> None:
    calls = list[int]()
    pending = PendingOpens(lambda: calls.append(pending.count))
    for _ in range(2):
        with pending, pending:
            pass
    assert calls == [1, 1]


def test_only_the_first_segment_of_a_stream_begins_speech(make_rig: MakeRig) -> None:
    """The first frame of the second segment is made together with those of another stream."""
    rig = make_rig(2)
    rig.backend.runaway = {1}
    (speaking,) = _speaking(rig, 1)
    num_before = len(rig.backend.batch_sizes)
    other = rig.open(None, seed=2, first=1, largest=1, ahead=UNLIMITED)
    for text in ("hello to the world.", "this is a test"):
        other.push_text(text)
        other.flush()
    other.end()
    rig.resume()
    assert drain(other)[1].reason == "eos"
    frames = [_frames_before(rig, prefill) for prefill in (2, 3)]
    sizes = rig.backend.batch_sizes
    assert [sizes[frame] for frame in frames] == [1, 2] and frames[0] >= num_before
    speaking.cancel()


def test_the_deferred_audio_of_a_segment_is_no_first_chunk_for_a_reader(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With retries it is delivered at the end of the segment."""
    decoding = rig.engine._loop.decoding
    first, deliver = list[bool](), decoding.deliver

    def record() -> bool:
        if decoding.in_flight:
            first.append(decoding.has_first_chunk)
        return deliver()

    monkeypatch.setattr(decoding, "deliver", record)
    assert drain(rig.open(seed=1, max_retries=1))[1].reason == "eos"
    assert first and not any(first)
