import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench import scaling
from bench.load import LoadClients
from bench.scaling import main

FRAMES, FRAME_MS = 25, 20.0  # 0.5 s for a request
SIMULATED = ["--model", "simulated", "--frame-ms", str(FRAME_MS), "--clients", "1"]


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.scaling", *options])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        main()
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(("gpus", "ratio"), [((2, 1), 1.5), ((2,), None), ((2, 4), None)])
def test_the_ratio_is_that_of_the_most_gpus_to_the_fewest(
    gpus: Sequence[int], ratio: float | None
) -> None:
    plan = scaling.Plan(gpus, (1.0,), 1.0, 1.0, 100.0, 0.0, kill=False)
    measured = scaling.Scaling(plan, LoadClients([]), lambda _: None)
    measured.largest_rate = {1: 50.0, 2: 75.0, 4: None}
    assert measured.ratio == ratio


@pytest.mark.parametrize("search_s", [0.0, 1.0])
def test_a_duration_of_zero_ends_with_the_rates_that_were_given(
    monkeypatch: pytest.MonkeyPatch, search_s: float
) -> None:
    loads: list[tuple[float, bool]] = []

    def measure(
        _self: object,
        _service: object,
        _gpus: int,
        rate: float,
        duration_s: float,
        search: bool = False,
    ) -> bool:
        assert duration_s == (search_s if search else 2.0)
        loads.append((rate, search))
        return rate < 45

    monkeypatch.setattr(scaling.Scaling, "_load", lambda *_: None)
    monkeypatch.setattr(scaling.Scaling, "_measure", measure)
    monkeypatch.setattr(scaling, "gpu_memory_mib", lambda: {})
    plan = scaling.Plan((1,), (30.0, 10.0, 50.0), 2.0, search_s, 100.0, 0.0, kill=False)
    measured = scaling.Scaling(plan, LoadClients([]), lambda _: None)
    service: Any = None
    measured.measure(lambda gpus: nullcontext(service))
    assert loads[:3] == [(30.0, False), (10.0, False), (50.0, False)]
    assert all(search for _, search in loads[3:]) and bool(loads[3:]) == bool(search_s)
    largest = measured.largest_rate[1]
    assert largest is not None and (43 < largest < 45 if search_s else largest == 30)


def test_a_search_may_have_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.scaling", *SIMULATED, "--search-duration", "0"])
    assert scaling._parse().search_duration == 0


@pytest.mark.parametrize("gpus", [[2], pytest.param([1, 2], marks=pytest.mark.slow)])
def test_engines_are_measured_and_one_is_killed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    gpus: list[int],
) -> None:
    monkeypatch.setattr(
        scaling, "find_largest_rate", lambda holds, measured: 4.0 if holds(9) else 2.0
    )
    monkeypatch.setattr(scaling, "_WARM_UP_S", 0.1)
    monkeypatch.setattr(scaling, "_FIELDS", {**scaling._FIELDS, "max_new_tokens": FRAMES})
    file = tmp_path / "scaling.json"
    options = ["--rates", "24", "--duration", "1.2", "--search-duration", "0.3", "--kill"]
    options += ["--slots", "64", "--p95-ms", "60000", "--max-underruns", "1", "--json", str(file)]
    options += ["--gpus", ",".join(map(str, gpus))]
    run(monkeypatch, *SIMULATED, *options)
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["request"]["non_streaming_mode"] is False, "as in Nari's benchmark"
    assert report["largest_rate_by_gpus"] == {str(count): 4.0 for count in gpus}
    has_two_cores = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1
    assert report["cores_of_clients_alone"] == has_two_cores  # there is one client
    assert report["ratio_of_largest_rates"] == (1.0 if len(gpus) > 1 else None)
    loads = [(run["gpus"], run["figures"]["rate"], run["search"]) for run in report["runs"]]
    assert loads == [
        (count, rate, search) for count in gpus for rate, search in ((24.0, False), (9, True))
    ]
    for each in report["runs"]:
        figures, cores = each["figures"], each["cores"]
        assert each["holds"]
        assert figures["requests"] == figures["complete"] > 0
        assert FRAME_MS <= figures["first_audio_ms_p50"] <= figures["first_audio_ms_p99"]
        assert figures["audio_seconds_per_second"] == pytest.approx(
            0.08 * FRAMES * figures["served_per_second"], abs=0.1
        )
        assert (cores["front"] > 0 or each["search"]) and len(cores["engines"]) == each["gpus"]
    lines = capsys.readouterr().out.splitlines()
    assert sum("requests/s for" in line for line in lines) == len(loads)

    failure = report["engine_failure"]
    assert 0 < failure["lost_streams"] < failure["open_streams"] <= failure["requests"]
    assert failure["other_errors"] == failure["refused"] == 0
    assert 0 < failure["last_error_s"] < failure["recovery_s"], "no stream waits for the engine"


def test_a_server_with_its_engine_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scaling, "_FIELDS", {**scaling._FIELDS, "max_new_tokens": 2})
    file = tmp_path / "scaling.json"
    options = ["--model", "demo", "--in-process", "--gpus", "1", "--rates", "10", "--duration", "1"]
    options += ["--search-duration", "0", "--clients", "1", "--json", str(file)]
    run(monkeypatch, *options)
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["service"] == "megakernel-tts serve"
    (measured,) = report["runs"]
    assert measured["figures"]["requests"] == measured["figures"]["complete"] > 0
    cores = measured["cores"]
    assert cores["front"] == 0  # the engine's process is the server
    assert 0 < cores["engine_threads"][0] <= cores["engines"][0] + 0.05  # of steps of 10 ms


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "0.6B"], "0.6B needs a GPU; --model simulated or demo runs without one"),
        (["--model", "demo", "--ray"], "pip install '.[server,ray]'"),
        ([*SIMULATED, "--kill", "--gpus", "1"], "add 2 to --gpus"),
        ([*SIMULATED, "--in-process", "--gpus", "1"], "--in-process needs a model"),
        (["--model", "demo", "--in-process", "--kill"], "--in-process needs a model"),
        (["--model", "demo", "--in-process"], "--in-process has one engine; add --gpus 1"),
        ([*SIMULATED, "--json", "missing/x.json"], "missing is not a folder"),
        ([*SIMULATED, "--max-underruns", "2"], "'2' is not a share from 0 to 1"),
        ([*SIMULATED, "--rates", "0"], "'0' is not a number above 0"),
        ([*SIMULATED, "--search-duration", "-1"], "'-1' is not a number above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(scaling, "count_gpus", lambda: 0)
    monkeypatch.setattr(scaling, "find_spec", lambda name: None if name == "ray" else name)
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *options)
    assert message in capsys.readouterr().err


def test_more_gpus_than_there_are_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "count_gpus", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--model", "0.6B")
    assert "--gpus 2: this process may use 1" in capsys.readouterr().err


def test_random_weights_are_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def write(command: list[str], *, check: bool) -> None:
        commands.append(command)
        Path(command[3]).mkdir()

    monkeypatch.setattr(scaling.subprocess, "run", write)
    for _ in range(2):
        with scaling._model("0.6B", tmp_path) as model:
            assert model == str(tmp_path / "random-0.6B")
    ((*_, module, target, size_option, size),) = commands
    assert module == "megakernel_tts.model.random_released" and target != str(
        tmp_path / "random-0.6B"
    )
    assert (size_option, size) == ("--size", "0.6B")
    assert [*tmp_path.iterdir()] == [tmp_path / "random-0.6B"]
    with scaling._model("demo", None) as model:
        assert model == "demo"


def test_a_service_that_does_not_start_is_an_error_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    monkeypatch.setattr(scaling, "serve_command", lambda *arguments: failing)
    monkeypatch.setattr(scaling, "count_gpus", lambda: 0)
    with pytest.raises(SystemExit, match=r"error: .*ended with 1"):
        run(monkeypatch, "--model", "other", "--clients", "1")
