import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from email.message import Message
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest

from bench import service
from bench.service import CpuMeter, ServedInProcess, serve_command, serve_engines
from megakernel_tts.cli.main import _parser
from tests.fakes import TIMEOUT_S


class ThisProcess:
    """A service that is this process, as front and as engine."""

    authority = ""

    def front(self) -> list[psutil.Process]:
        return [psutil.Process()]

    def engines(self) -> list[psutil.Process]:
        return [psutil.Process()]

    def num_ready(self) -> int:
        return 1


def burn(cpu_s: float) -> None:
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        pass


def test_the_cores_of_processes_and_threads_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core is a second of CPU time: the measurement takes a second of its clock."""
    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=iter([10.0, 11.0]).__next__))
    meter = CpuMeter(ThisProcess())
    thread = threading.Thread(target=burn, args=(0.2,))
    thread.start()
    burn(0.5)
    computed, ended = threading.Event(), threading.Event()
    waiting = threading.Thread(target=ended.wait)  # a thread without work, and one that lives
    waiting.start()
    busy = threading.Thread(target=lambda: (burn(0.2), computed.set(), ended.wait()))
    busy.start()
    thread.join()
    assert computed.wait(TIMEOUT_S)
    cores = meter.read()
    ended.set()
    assert 0.85 < cores.front and cores.engines[0] == pytest.approx(cores.front, abs=0.1)
    assert 0.15 < cores.engine_threads[0] < 0.45  # not the 0.5 s of the main thread
    assert cores.front_and_engine_threads == pytest.approx(
        cores.front + cores.engine_threads[0], abs=0.01
    )


def test_a_command_that_fails_is_reported_with_its_log() -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(RuntimeError, match=r"ended with 1.*\n.*\nno such model"),
        serve_engines(failing, 1),
    ):
        pass


@pytest.mark.parametrize(("gpus", "option"), [(range(2), "0,1"), ((), None)])
def test_the_command_is_that_of_the_package(gpus: Sequence[int], option: str | None) -> None:
    options = _parser().parse_args(serve_command("demo", gpus, 63)[3:])
    configured = options.configuration.resolve(options, {})
    assert {name: configured[name].value for name in ("model", "gpus", "slots", "port")} == {
        "model": "demo",
        "gpus": option,
        "slots": 63,
        "port": 0,
    }


def test_a_server_with_its_engine_is_ready_once_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def answer(url: str, timeout: float) -> Any:
        requested.append(url)
        if len(requested) == 1:
            raise HTTPError(url, 503, "not ready", Message(), None)
        return nullcontext()

    monkeypatch.setattr(service.urllib.request, "urlopen", answer)
    served = ServedInProcess(psutil.Process(), "a:1")
    assert [served.num_ready() for _ in range(2)] == [0, 1]
    assert requested == 2 * ["http://a:1/ready"]
