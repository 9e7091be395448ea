"""Measures how a speech service scales with its GPUs: the same random arrivals at one and at two.

For each number of GPUs it starts `megakernel-tts serve --gpus` (with --ray: Ray Serve; with
--in-process: `megakernel-tts serve` with the engine in its process) and sends requests over HTTP
from several client processes, at each of --rates. On a machine with twice as many cores as clients,
these have cores of their own. Each request is 4 s of speech: 50 frames, with the runaway guard off,
as speech of random weights seldom ends. Short loads then find the largest rate that the service
holds: every request is served, no stream has an underrun (or at most the share --max-underruns),
and the 95th percentile of the time to the first audio is at most --p95-ms, as is the 99th of the
delay of its sending.

python -m bench.scaling --model 0.6B --kill --json bench/results/scaling-0.6B-h100x2.json
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil

from bench.engine_failure import EngineFailure, measure_failure
from bench.load import LoadClients, LoadFigures, summarise, wait_with_progress
from bench.rate_search import find_largest_rate, largest_held
from bench.separate_cores import separate_cores
from bench.service import (
    Cores,
    CpuMeter,
    ServedInProcess,
    Service,
    gpu_memory_mib,
    serve_command,
    serve_engines,
)
from megakernel_common.files import check_output, replace_file
from megakernel_tts.bench.benchmark import ARRIVALS_TEXT, RANDOM_FRAMES
from megakernel_tts.bench.provenance import provenance
from megakernel_tts.cli.console import (
    file_path,
    positive_integer,
    positive_integers,
    positive_number,
    positive_numbers,
)
from megakernel_tts.model.random_released import SIZES
from megakernel_tts.server.cluster.placement import count_gpus

_SIMULATED = "simulated"
_WARM_UP_S = 3.0
_FIELDS: Mapping[str, object] = {
    "input": ARRIVALS_TEXT,
    "response_format": "pcm",
    "non_streaming_mode": False,  # as in requests of Nari's benchmark
    "max_new_tokens": RANDOM_FRAMES,
    "guard": False,
}
_PACKAGES = ("torch", "uvicorn", "starlette", "uvloop", "httptools", "aiohttp")

StartService = Callable[[int], AbstractContextManager[Service]]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        gpus: Numbers of GPUs.
        rates: Requests per second.
        duration_s: Seconds in which requests arrive.
        search_s: The same for the loads that find the largest rate; 0 for no such loads.
        p95_ms: Bound of the 95th percentile of the time to the first audio.
        max_underruns: Share of the streams that may have an underrun.
        kill: Whether an engine of the service with the most GPUs is killed at the end.
    """

    gpus: Sequence[int]
    rates: Sequence[float]
    duration_s: float
    search_s: float
    p95_ms: float
    max_underruns: float
    kill: bool


@dataclass(frozen=True)
class Run:
    """A load of a service.

    Attributes:
        gpus: Number of GPUs.
        search: Whether it is one of the loads that find the largest rate.
        holds: Whether the service held the rate.
        figures: Of the requests.
        cores: That the service used while requests arrived.
    """

    gpus: int
    search: bool
    holds: bool
    figures: LoadFigures
    cores: Cores

    def __str__(self) -> str:
        """The figures in a line."""
        figures, cores = self.figures, self.cores
        threads = " + ".join(f"{each:.2f}" for each in cores.engine_threads)
        return (
            f"{self.gpus} GPU, {figures.rate:g} requests/s for {figures.duration_s:g} s "
            f"{'hold' if self.holds else 'do not hold'}: first audio p50 "
            f"{figures.first_audio_ms_p50:.1f}, p95 {figures.first_audio_ms_p95:.1f}, p99 "
            f"{figures.first_audio_ms_p99:.1f} ms; {figures.underruns} underruns, "
            f"{figures.refused} refused, {figures.failed} failed; {figures.served_per_second:g} "
            f"served/s, {figures.max_concurrent} at once; cores: front {cores.front:.2f}, engine "
            f"threads {threads}, busiest client {max(figures.client_cores):.2f}"
        )


class Scaling:
    """The figures of a service with several numbers of GPUs.

    Attributes:
        runs: The loads in their order.
        largest_rate: The largest rate that the service holds, by number of GPUs; None if it holds
            no rate.
        gpu_memory_mib: GPU memory in use after the loads, by number of GPUs, then by GPU.
        engine_failure: What the end of an engine process did.
    """

    def __init__(self, plan: Plan, clients: LoadClients, save: Callable[["Scaling"], None]) -> None:
        """Starts without a figure.

        Args:
            plan: What to measure.
            clients: Send the requests.
            save: Called after each load, so that an interruption loses no figures.
        """
        self.runs: list[Run] = []
        self.largest_rate: dict[int, float | None] = {}
        self.gpu_memory_mib: dict[int, dict[str, int]] = {}
        self.engine_failure: EngineFailure | None = None
        self._plan = plan
        self._clients = clients
        self._save = save

    @property
    def ratio(self) -> float | None:
        """The largest rate with the most GPUs, divided by that with the fewest; None if equal."""
        counts = min(self._plan.gpus), max(self._plan.gpus)
        fewest, most = (self.largest_rate.get(gpus) for gpus in counts)
        return round(most / fewest, 3) if fewest and most and counts[0] < counts[1] else None

    def measure(self, start_service: StartService) -> None:
        """Measures everything, and prints a line for each load.

        Args:
            start_service: Runs a service with a number of GPUs until the block ends.

        Raises:
            RuntimeError: A service or a client process has ended.
            TimeoutError: An engine that was killed does not become warm again.
            psutil.NoSuchProcess: An engine process has ended by itself.
        """
        plan = self._plan
        for gpus in plan.gpus:
            with start_service(gpus) as service:
                self._load(service, gpus, max(plan.rates), min(_WARM_UP_S, plan.duration_s))
                measured = {
                    rate: self._measure(service, gpus, rate, plan.duration_s) for rate in plan.rates
                }
                self.largest_rate[gpus] = largest_held(measured)
                if plan.search_s:
                    search = partial(
                        self._measure, service, gpus, duration_s=plan.search_s, search=True
                    )
                    self.largest_rate[gpus] = find_largest_rate(search, measured)
                self.gpu_memory_mib[gpus] = gpu_memory_mib()
                print(f"{gpus} GPU: {self.largest_rate[gpus] or 0:g} requests/s hold", flush=True)
                if plan.kill and gpus == max(plan.gpus):
                    self.engine_failure = measure_failure(
                        service, self._clients, _FIELDS, min(plan.rates), plan.duration_s
                    )
                    print(self.engine_failure, flush=True)
                self._save(self)

    def _measure(
        self, service: Service, gpus: int, rate: float, duration_s: float, search: bool = False
    ) -> bool:
        """Measures a load, and returns whether the service holds its rate."""
        figures, cores = self._load(service, gpus, rate, duration_s)
        holds = figures.holds(self._plan.p95_ms, self._plan.max_underruns)
        run = Run(gpus, search, holds, figures, cores)
        print(run, flush=True)
        self.runs.append(run)
        self._save(self)
        return run.holds

    def _load(
        self, service: Service, gpus: int, rate: float, duration_s: float
    ) -> tuple[LoadFigures, Cores]:
        start_s = self._clients.send(service.authority, _FIELDS, rate, duration_s)
        meter = CpuMeter(service)
        wait_with_progress(start_s + duration_s, f"{gpus} GPU, {rate:g} requests/s")
        cores = meter.read()
        return summarise(rate, duration_s, self._clients.records()), cores


def _starter(options: argparse.Namespace, model: str) -> StartService:
    """How the service with a number of GPUs is started."""
    if options.ray:
        from bench.ray_service import serve_replicas

        return lambda gpus: serve_replicas(model, gpus, options.slots)

    def start(gpus: int) -> AbstractContextManager[Service]:
        if options.in_process:
            return serve_engines(serve_command(model, (), options.slots), 1, ServedInProcess)
        command = serve_command(model, range(gpus), options.slots)
        if model == _SIMULATED:
            command = [sys.executable, "-m", "bench.simulated_front", "--engines", str(gpus)]
            command += ["--slots", str(options.slots), "--frame-ms", str(options.frame_ms)]
        return serve_engines(command, gpus)

    return start


@contextmanager
def _model(name: str, folder: Path | None) -> Generator[str]:
    """The name or the folder of the model; random weights are written, if they are missing."""
    if name not in SIZES:
        yield name
        return
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(folder or temporary, f"random-{name}")
        if not target.exists():
            partial_target = target.with_name(f"{target.name}.partial")
            print(f"writing random weights to {target}", flush=True)
            writer = [sys.executable, "-m", "megakernel_tts.model.random_released"]
            subprocess.run([*writer, str(partial_target), "--size", name], check=True)
            partial_target.rename(target)
        yield str(target)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="0.6B",
        help="0.6B (the default) or 1.7B with random weights; simulated: engines without a model, "
        "which measure the front; else as in megakernel-tts serve",
    )
    parser.add_argument(
        "--weights",
        type=file_path,
        metavar="DIR",
        help="keeps the random weights (2 to 4 GB); a temporary folder by default",
    )
    parser.add_argument(
        "--rates",
        type=positive_numbers,
        default=(50.0, 100.0, 200.0),
        metavar="R,R",
        help="requests per second (default: 50,100,200)",
    )
    parser.add_argument(
        "--duration",
        type=positive_number,
        default=60.0,
        metavar="SECONDS",
        help="time in which the requests of a rate arrive (default: 60)",
    )
    parser.add_argument(
        "--search-duration",
        type=_positive_or_zero,
        default=10.0,
        metavar="SECONDS",
        help="the same for loads that find the largest rate; 0 for none (default: 10)",
    )
    parser.add_argument(
        "--p95-ms",
        type=positive_number,
        default=100.0,
        metavar="MS",
        help="bound of the 95th percentile of the time to the first audio (default: 100)",
    )
    parser.add_argument(
        "--max-underruns",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="share of the streams that may have an underrun, such as 0.001 (default: 0)",
    )
    parser.add_argument(
        "--gpus",
        type=positive_integers,
        default=(1, 2),
        metavar="N,N",
        help="numbers of GPUs; every one is measured (default: 1,2)",
    )
    parser.add_argument(
        "--slots", type=positive_integer, default=64, help="of each engine (default: 64)"
    )
    parser.add_argument(
        "--clients", type=positive_integer, default=4, help="client processes (default: 4)"
    )
    parser.add_argument(
        "--frame-ms",
        type=positive_number,
        default=5.0,
        metavar="MS",
        help="time of a frame of a simulated engine (default: 5)",
    )
    parser.add_argument(
        "--ray",
        action="store_true",
        help="measure Ray Serve, with a replica for each GPU, instead of megakernel-tts serve",
    )
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="measure a server whose engine runs in its process, on one GPU: megakernel-tts serve "
        "without --gpus",
    )
    parser.add_argument(
        "--kill",
        action="store_true",
        help="at the end, kill an engine process under a load of the lowest rate, and measure "
        "which streams are lost and when all engines are warm again",
    )
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    if reason := _obstacle(options):
        parser.error(reason)
    return options


def _service_name(options: argparse.Namespace) -> str:
    if options.ray:
        return "Ray Serve"
    return "megakernel-tts serve" if options.in_process else "megakernel-tts serve --gpus"


def _positive_or_zero(value: str) -> float:
    """Type of an option with a number from 0 on."""
    return 0.0 if value == "0" else positive_number(value)


def _share(value: str) -> float:
    """Type of an option with a share, from 0 to 1."""
    share = _positive_or_zero(value)
    if share > 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a share from 0 to 1")
    return share


def _obstacle(options: argparse.Namespace) -> str | None:
    """Why the options cannot be measured here."""
    if missing := [name for name in ("aiohttp", "uvicorn", "starlette") if not find_spec(name)]:
        return f"{missing[0]} is not installed: pip install '.[test]'"
    if options.ray and not find_spec("ray"):
        return "--ray needs Ray Serve: pip install '.[server,ray]'"
    if options.ray and options.model == _SIMULATED:
        return "--ray has no simulated engines; use --model demo without a GPU"
    if options.in_process and (options.ray or options.kill or options.model == _SIMULATED):
        return "--in-process needs a model, and cannot be combined with --ray or --kill"
    if options.in_process and [*options.gpus] != [1]:
        return "--in-process has one engine; add --gpus 1"
    if options.kill and max(options.gpus) < 2:
        return "--kill needs another engine, which continues; add 2 to --gpus"
    num_gpus = count_gpus()
    if options.model in SIZES and not num_gpus:
        return f"{options.model} needs a GPU; --model simulated or demo runs without one"
    if options.model != _SIMULATED and 0 < num_gpus < max(options.gpus):
        return f"--gpus {max(options.gpus)}: this process may use {num_gpus}"
    if options.json is not None:
        try:
            check_output(options.json)
        except OSError as error:
            return f"--json: {error}"
    return None


def main() -> None:
    """Prints a line for each load; writes all figures with --json."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the services as well
    plan = Plan(
        options.gpus,
        options.rates,
        options.duration,
        options.search_duration,
        options.p95_ms,
        options.max_underruns,
        options.kill,
    )
    random_weights = f", random weights, {RANDOM_FRAMES} frames" if options.model in SIZES else ""
    settings: dict[str, object] = {
        "model": f"{options.model}{random_weights}",
        "service": _service_name(options),
        "slots": options.slots,
        "client_processes": options.clients,
        "p95_bound_ms": options.p95_ms,
        "max_share_of_streams_with_underruns": options.max_underruns,
        "request": _FIELDS,
    }
    conditions = provenance((*_PACKAGES, "ray") if options.ray else _PACKAGES)

    def save(scaling: Scaling) -> None:
        if options.json is not None:
            content = settings | _describe(scaling) | conditions
            replace_file(options.json, (json.dumps(content, indent=2) + "\n").encode())

    with (
        _model(options.model, options.weights) as model,
        separate_cores(options.clients) as client_cores,
        LoadClients.start(options.clients, client_cores) as clients,
    ):
        settings["cores_of_clients_alone"] = len(client_cores)
        scaling = Scaling(plan, clients, save)
        try:
            scaling.measure(_starter(options, model))
        except (RuntimeError, TimeoutError, psutil.NoSuchProcess) as error:
            sys.exit(f"error: {error}")
    print(f"ratio of the largest rates: {scaling.ratio}")


def _describe(scaling: Scaling) -> dict[str, object]:
    """The figures, serialisable as JSON."""
    failure = scaling.engine_failure
    return {
        "largest_rate_by_gpus": scaling.largest_rate,
        "ratio_of_largest_rates": scaling.ratio,
        "gpu_memory_mib_by_gpus": scaling.gpu_memory_mib,
        "engine_failure": None if failure is None else asdict(failure),
        "runs": [asdict(run) for run in scaling.runs],
    }


if __name__ == "__main__":
    main()
