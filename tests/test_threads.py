"""The number of threads with which torch computes in an engine's thread, and in others."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megakernel_common import threads
from megakernel_common.threads import compute_threads, start_thread
from megakernel_stt import STT
from megakernel_stt.engine.recogniser import StreamingRecogniser
from megakernel_stt.model.config import SAMPLE_RATE
from megakernel_tts import TTS
from megakernel_tts.backends.reference import Reference
from tests.fakes import TIMEOUT_S

OTHERS = 3  # threads of torch in other threads


@pytest.fixture(autouse=True)
def _several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(OTHERS)
    yield
    torch.set_num_threads(before)


def recorder(method: Callable[..., object], found: list[int]) -> Callable[..., object]:
    """A method that also records with how many threads torch computes where it is called."""

    def wrapper(*args: object, **options: object) -> object:
        result = method(*args, **options)
        found.append(torch.get_num_threads())
        return result

    return wrapper


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (2, 2), (None, OTHERS)])
def test_the_number_holds_in_this_thread_only(number: int | None, expected: int) -> None:
    found = dict[str, int]()
    has_started = threading.Event()

    def count(name: str) -> None:
        torch.ones(1 << 16).sum()  # a first call of torch in the thread
        found[name] = torch.get_num_threads()

    def run() -> None:
        assert has_started.wait(TIMEOUT_S)
        count("started")

    started = start_thread(run, "engine", num_compute_threads=number)
    assert started.name == "engine" and started.daemon
    count("starter")
    later = threading.Thread(target=count, args=["later"])
    later.start()
    later.join(TIMEOUT_S)
    has_started.set()
    started.join(TIMEOUT_S)
    assert found == {"starter": OTHERS, "later": OTHERS, "started": expected}


def test_a_starter_with_a_number_of_its_own_does_not_pass_it_on() -> None:
    found = list[int]()

    def start() -> None:
        torch.get_num_threads()
        torch.set_num_threads(2)  # of this thread and of the process
        of_others = threading.Thread(target=torch.set_num_threads, args=[OTHERS])
        of_others.start()
        of_others.join(TIMEOUT_S)
        start_thread(lambda: None, "engine", num_compute_threads=1).join(TIMEOUT_S)
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join(TIMEOUT_S)
        found.append(torch.get_num_threads())

    starter = threading.Thread(target=start)
    starter.start()
    starter.join(TIMEOUT_S)
    assert found == [OTHERS, 2]


@pytest.mark.parametrize(
    ("num_cores", "of_torch", "expected"),
    [(1, 1, 1), (2, 2, 1), (4, 4, 3), (16, 16, 4), (16, 2, 2), (16, 1, 1)],
)
def test_small_networks_leave_a_core_and_take_few(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, of_torch: int, expected: int
) -> None:
    monkeypatch.setattr(threads, "_num_cores", lambda: num_cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    small = torch.empty(17_000_000, device="meta")
    assert compute_threads((small, (small,)), torch.device("cpu")) == expected


def test_other_networks_take_the_threads_of_torch() -> None:
    small, large = torch.empty(17_000_000, device="meta"), torch.empty(440_000_000, device="meta")
    assert compute_threads((small, large), torch.device("cpu")) is None
    assert compute_threads(small, torch.device("cuda")) is None


@pytest.fixture
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_num_cores", lambda: 2)


@pytest.mark.usefixtures("_two_cores")
def test_a_small_voice_leaves_one_of_two_cores(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path]
) -> None:
    found = list[int]()
    monkeypatch.setattr(Reference, "step", recorder(Reference.step, found))
    with TTS.load(checkpoint(shallow=True), device="cpu", slots=1) as tts:
        tts.say("Good morning.")
    assert set(found) == {1}


@pytest.mark.usefixtures("_two_cores")
def test_a_small_recogniser_leaves_one_of_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[int]()
    monkeypatch.setattr(StreamingRecogniser, "step", recorder(StreamingRecogniser.step, found))
    with STT.load("demo", device="cpu", slots=1) as stt:
        stt.transcribe((np.zeros(SAMPLE_RATE, np.float32), SAMPLE_RATE))
    assert set(found) == {1}
