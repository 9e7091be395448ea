"""Speech services that run for a measurement, their processes, and the cores that these use."""

import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from bench.running_server import wait_until

_START_TIMEOUT_S = 300.0  # compiling the kernels takes most of it
_STOP_TIMEOUT_S = 20.0
POLL_INTERVAL_S = 0.1  # long, as each read of the state is a request to the service
_TAIL_CHARACTERS = 2000  # of a log in an error
_ENGINES_READY = re.compile(r"^megakernel_tts:engines_ready\{.*\} (\d+)$", re.MULTILINE)


class Service(Protocol):
    """A service of several engines that runs.

    Attributes:
        authority: Host and port.
    """

    authority: str

    def front(self) -> list[psutil.Process]:
        """Processes between clients and engines."""
        ...

    def engines(self) -> list[psutil.Process]:
        """Engine processes that exist, with or without a warm engine."""
        ...

    def num_ready(self) -> int:
        """Number of warm engines that the service reports."""
        ...


class ServedEngines:
    """`megakernel-tts serve --gpus`, or a command that serves in the same way.

    Attributes:
        authority: Host and port.
    """

    def __init__(self, process: psutil.Process, authority: str) -> None:
        """Takes over a process that serves; `serve_engines` calls it."""
        self.authority = authority
        self._process = process

    def front(self) -> list[psutil.Process]:
        """See `Service`."""
        return [self._process]

    def engines(self) -> list[psutil.Process]:
        """See `Service`."""
        return self._process.children()

    def num_ready(self) -> int:
        """See `Service`."""
        with urllib.request.urlopen(f"http://{self.authority}/metrics", timeout=10) as reply:
            found = _ENGINES_READY.search(reply.read().decode())
        assert found, "a server with engine processes has this metric"
        return int(found[1])


class ServedInProcess(ServedEngines):
    """`megakernel-tts serve` without `--gpus`: the engine is in the server's process."""

    def front(self) -> list[psutil.Process]:
        """See `Service`."""
        return []

    def engines(self) -> list[psutil.Process]:
        """See `Service`."""
        return [self._process]

    def num_ready(self) -> int:
        """See `Service`."""
        try:
            with urllib.request.urlopen(f"http://{self.authority}/ready", timeout=10):
                return 1
        except urllib.error.HTTPError:
            return 0


@contextmanager
def serve_engines(
    command: Sequence[str], num_engines: int, kind: type[ServedEngines] = ServedEngines
) -> Generator[ServedEngines]:
    """Runs a service until the block ends; the block starts when all engines are warm.

    Args:
        command: Prints the URL of its web page first, and serves until SIGTERM.
        num_engines: Engines that it starts.
        kind: Where its engines run.

    Raises:
        RuntimeError: The command has ended, or the engines do not become warm in time.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        started(command, Path(folder, "log"), stdout=subprocess.PIPE) as command_process,
    ):
        process = command_process.process
        assert process.stdout is not None
        url = re.search(r"http://([^/\s]+)", process.stdout.readline().decode())
        service = kind(psutil.Process(process.pid), url[1] if url else "")
        command_process.wait_until(
            lambda: url is not None and service.num_ready() == num_engines, "warm engines"
        )
        yield service


@dataclass(frozen=True)
class StartedProcess:
    """A process whose start takes a while.

    Attributes:
        process: The process.
        log: File with its output.
    """

    process: subprocess.Popen[bytes]
    log: Path

    def wait_until(self, condition: Callable[[], bool], aim: str) -> None:
        """Waits until a condition holds.

        Args:
            condition: Is read repeatedly.
            aim: What is waited for, for the error.

        Raises:
            RuntimeError: The process has ended, or the condition does not hold in time.
        """

        def ended_or_ready() -> bool:
            return self.process.poll() is not None or condition()

        try:
            wait_until(ended_or_ready, _START_TIMEOUT_S, POLL_INTERVAL_S)
        except TimeoutError as error:
            raise RuntimeError(f"No {aim}: {error}.{self._log_tail()}") from None
        if (status := self.process.poll()) is not None:
            raise RuntimeError(f"No {aim}: the command has ended with {status}.{self._log_tail()}")

    def _log_tail(self) -> str:
        text = self.log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
        return f"\nIts log ends with:\n{text}" if text else ""


@contextmanager
def started(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    stdout: int | None = None,
) -> Generator[StartedProcess]:
    """Runs a command until the block ends, and then ends it by SIGTERM.

    Args:
        command: The command.
        log: File for its standard error, and its standard output if that is None.
        environment: All of its variables; those of this process if None.
        stdout: As in `subprocess.Popen`.
    """
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output if stdout is None else stdout, stderr=output, env=environment
        ) as process,
    ):
        try:
            yield StartedProcess(process, log)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(frozen=True)
class Cores:
    """CPU time of a service divided by the duration.

    Attributes:
        front: All processes between clients and engines.
        engines: Each process with an engine.
        engine_threads: Its busiest thread besides the main one, which runs an event loop.
        front_and_engine_threads: The sum of `front` and `engine_threads`.
    """

    front: float
    engines: tuple[float, ...]
    engine_threads: tuple[float, ...]
    front_and_engine_threads: float


class CpuMeter:
    """Measures the CPU time of a service from its construction on."""

    def __init__(self, service: Service) -> None:
        self._start_s = time.monotonic()
        self._front = {process: _cpu_s(process) for process in service.front()}
        self._engines = {process: _cpu_s(process) for process in service.engines()}
        self._threads = {process: _thread_cpu_s(process) for process in self._engines}

    def read(self) -> Cores:
        """The cores in use since the start.

        Raises:
            psutil.NoSuchProcess: A process has ended.
        """
        elapsed_s = time.monotonic() - self._start_s
        front = sum(  # without processes that have ended meanwhile
            _cpu_s(process) - before
            for process, before in self._front.items()
            if process.is_running()
        )
        engines = [_cpu_s(process) - before for process, before in self._engines.items()]
        threads = [
            max(
                (
                    cpu_s - before.get(thread, 0.0)
                    for thread, cpu_s in _thread_cpu_s(process).items()
                    if thread != process.pid
                ),
                default=0.0,
            )
            for process, before in self._threads.items()
        ]

        def cores(cpu_s: float) -> float:
            return round(cpu_s / elapsed_s, 3)

        return Cores(
            cores(front),
            tuple(map(cores, engines)),
            tuple(map(cores, threads)),
            cores(front + sum(threads)),
        )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _thread_cpu_s(process: psutil.Process) -> dict[int, float]:
    """CPU time of each thread, by its identifier."""
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


def gpu_memory_mib() -> dict[str, int]:
    """Memory in use on each GPU of the host in MiB, by index and name; empty without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=index,name,memory.used", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    cells = [row.split(", ") for row in rows.splitlines()]
    return {f"{index}: {name}": int(used) for index, name, used in cells}


def serve_command(model: str, gpus: Sequence[int], slots: int) -> list[str]:
    """The command that serves a model.

    Args:
        model: As in `megakernel-tts serve`.
        gpus: Numbers of the GPUs, each of which gets an engine process; none for an engine in the
            server's process.
        slots: Of each engine.
    """
    command = [sys.executable, "-m", "megakernel_tts", "serve", "--model", model]
    command += ["--slots", str(slots), "--port", "0"]
    return [*command, "--gpus", ",".join(map(str, gpus))] if gpus else command
