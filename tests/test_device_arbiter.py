"""Short work of a GPU goes before long work; neither side waits without limit."""

import pytest
import torch

from megakernel_common import device_arbiter as module
from megakernel_common.device_arbiter import DeviceArbiter, LongWork, ShortWork, device_arbiter
from tests.background import Background, Waits
from tests.fakes import TIMEOUT_S


def ignore() -> None:
    """Has no work end."""


@pytest.fixture
def arbiter(monkeypatch: pytest.MonkeyPatch) -> DeviceArbiter:
    """An arbiter whose users wait as long as the test."""
    monkeypatch.setattr(module, "_MAX_WAIT_S", TIMEOUT_S)
    return DeviceArbiter()


def test_long_work_waits_for_short_work(arbiter: DeviceArbiter) -> None:
    waits, interrupted = Waits(arbiter), list[str]()
    short, long = ShortWork(arbiter), LongWork(arbiter, lambda: interrupted.append("long"))
    assert not short.begin() and long.must_wait
    beginning = Background(long.begin)
    waits.next()
    assert not arbiter.long
    short.end()
    beginning.join()
    assert arbiter.long == {long} and not long.must_wait
    assert not interrupted, "it began when the device was free"


def test_short_work_interrupts_long_work_and_waits_for_its_end(arbiter: DeviceArbiter) -> None:
    waits, interrupted = Waits(arbiter), list[int]()
    long = [LongWork(arbiter, lambda i=i: interrupted.append(i)) for i in range(3)]
    long[0].begin()
    long[1].begin()
    beginning = Background(ShortWork(arbiter).begin)
    waits.next()
    assert sorted(interrupted) == [0, 1], "the third one is not under way"
    long[0].end()
    waits.next()  # again, for the other one
    long[1].end()
    beginning.join()
    assert beginning.result is True


def test_short_work_of_two_engines_runs_together(arbiter: DeviceArbiter) -> None:
    waits, long = Waits(arbiter), LongWork(arbiter, ignore)
    first, second = ShortWork(arbiter), ShortWork(arbiter)
    assert not first.begin() and not second.begin() and not first.begin(), "it does not wait"
    beginning = Background(long.begin)
    waits.next()
    first.end()
    waits.next()
    assert not arbiter.long
    second.end()
    beginning.join()
    assert arbiter.long


def test_work_that_was_begun_is_not_begun_again(arbiter: DeviceArbiter) -> None:
    waits, short, long = Waits(arbiter), ShortWork(arbiter), LongWork(arbiter, ignore)
    long.begin()
    beginning = Background(short.begin)
    waits.next()
    long.begin()  # a prefill has begun, and now the frames behind it: it does not wait
    long.end()
    beginning.join()
    long.end()
    short.end()
    short.end()
    assert not arbiter.long and not arbiter.short


def test_neither_side_waits_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_WAIT_S", 0.0)
    arbiter, interrupted = DeviceArbiter(), list[str]()
    short, long = ShortWork(arbiter), LongWork(arbiter, lambda: interrupted.append("long"))
    short.begin()
    long.begin()
    assert interrupted == ["long"], "its work ends soon"
    assert short.begin(), "beside long work that does not end"
    assert interrupted == ["long", "long"]


def test_engines_on_one_gpu_share_an_arbiter() -> None:
    gpus = [device_arbiter(torch.device(name)) for name in ("cuda:0", "cuda:0", "cuda:1")]
    assert gpus[0] is gpus[1] and gpus[0] is not gpus[2]
    cpu = torch.device("cpu")
    assert device_arbiter(cpu) is not device_arbiter(cpu)


@pytest.mark.gpu
def test_a_gpu_without_an_index_is_the_current_one() -> None:
    current = torch.device("cuda", torch.cuda.current_device())
    assert device_arbiter(torch.device("cuda")) is device_arbiter(current)
