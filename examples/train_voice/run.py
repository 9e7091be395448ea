"""Runs the stages that need a GPU, each in a process of its own with a log, and times them.

With two GPUs the stages that do not depend on each other run beside each other: `synthesis`,
`vocoder` and `speak` on the second one. Trainings and `synthesis` have more time then; all stages
together take less than 30 minutes. More GPUs make the steps of `talker` shorter. Trainings and
`synthesis` continue where an earlier run was stopped.

python -m examples.train_voice.run WORK TEACHER --gpus 0,1 --json durations.json
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from examples.train_voice.layout import Work, summary

_POLL_INTERVAL_S = 0.5
_MINUTES = {  # of trainings and the teacher, by the number of GPUs; the rest takes 5
    1: {"synthesis": 7.5, "codec": 10.5, "vocoder": 3.9, "talker": 8.4},
    2: {"synthesis": 10.0, "codec": 9.5, "vocoder": 12.5, "talker": 12.5},
}
_SYNTHESIS_WORKERS = 3  # processes


@dataclass(frozen=True)
class Stage:
    """A command of the recipe.

    Attributes:
        name: Its module, or its name in the log.
        command: Arguments of Python.
        after: Stages that must have ended before it starts.
        beside: Whether it runs on the second GPU, if there is one.
        processes: GPUs that it uses, the second one excepted.
        shares: Whether it may start while other stages run, if there is only one GPU.
    """

    name: str
    command: tuple[str, ...]
    after: tuple[str, ...] = ()
    beside: bool = False
    processes: int = 1
    shares: bool = False


class StageError(RuntimeError):
    """A stage ended with an error."""


class Process(Protocol):
    """A running stage, such as `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Returns the exit status; None while the stage runs."""
        ...

    def terminate(self) -> None:
        """Ends the stage."""
        ...


def stages(work: Work, teacher: Path, num_gpus: int) -> list[Stage]:
    """The stages from the tokenizer to the speech that `evaluate` judges.

    Args:
        work: The run's folder, after `pronunciation`.
        teacher: Folder of the teacher.
        num_gpus: One or more.
    """
    folder, truth = str(work.folder), str(work.folder / "truth.json")

    def module(
        name: str,
        *arguments: str,
        after: Sequence[str],
        beside: bool = False,
        processes: int = 1,
        shares: bool = False,
    ) -> Stage:
        minutes = _MINUTES[min(num_gpus, 2)].get(name)
        limit = ("--minutes", str(minutes)) if minutes else ()
        command = ("-m", f"examples.train_voice.{name}", folder, *arguments, *limit)
        return Stage(name, command, tuple(after), beside, processes, shares)

    workers = "--workers", str(_SYNTHESIS_WORKERS)
    talker_gpus = max(1, num_gpus - 1)  # all but that of `vocoder`
    calibrate = ("-m", "megakernel_tts", "calibrate", str(work.voice), "--truth", truth)
    return [
        module("tokenizer", after=()),
        module("synthesis", str(teacher), *workers, after=["tokenizer"], beside=True),
        module("codec", after=["tokenizer"], shares=True),
        module("codes", after=["synthesis", "codec"]),
        module("vocoder", after=["synthesis", "codec"], beside=True),
        module("talker", "--processes", str(talker_gpus), after=["codes"], processes=talker_gpus),
        module("export", after=["talker", "vocoder"]),
        module("truth", truth, after=["export"], shares=True),
        Stage("calibrate", calibrate, ("truth",), shares=True),
        module("speak", "--device", "cuda", after=["export"], beside=True, shares=True),
    ]


def gpus_of(stage: Stage, gpus: Sequence[str]) -> Sequence[str]:
    """The GPUs that a stage uses, of all that a run has."""
    if stage.beside and len(gpus) > 1:
        return gpus[1:2]
    return [gpus[0], *gpus[2:]][: stage.processes]


def start_stage(logs: Path, gpus: Sequence[str], stage: Stage) -> Process:
    """Starts a stage; its output goes to `logs`/NAME.log."""
    with (logs / f"{stage.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *stage.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus_of(stage, gpus))},
        )


def run_stages(
    all_stages: Sequence[Stage],
    start: Callable[[Stage], Process],
    report: Callable[[str], object] = print,
    *,
    num_gpus: int = 1,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Mapping[str, float]:
    """Runs stages in their order, each as soon as it may start.

    On one GPU `codec` runs beside `synthesis`, with whose first recordings it begins, and the
    stages after `export` beside each other.

    Args:
        all_stages: Each behind those that it depends on.
        start: Starts a stage.
        report: Receives a line whenever a stage starts or ends.
        num_gpus: One or more.
        wait: Waits for so many seconds; called while no stage has ended.
        clock: Returns the time in seconds.

    Returns:
        Seconds of each stage.

    Raises:
        StageError: A stage failed. The others have been ended.
    """
    left, seconds = list(all_stages), dict[str, float]()
    running: dict[str, tuple[Process, float]] = {}
    try:
        while left or running:
            for stage in list(left):
                must_wait = num_gpus == 1 and not stage.shares and running
                if must_wait or any(name not in seconds for name in stage.after):
                    continue
                left.remove(stage)
                running[stage.name] = start(stage), clock()
                report(f"{stage.name}: started")
            ended = [name for name, (process, _) in running.items() if process.poll() is not None]
            for name in ended:
                process, begin_s = running.pop(name)
                if (status := process.poll()) != 0:
                    raise StageError(
                        f"The stage {name} ended with status {status}; its log says why. "
                        "Then run the command again: trainings and synthesis continue."
                    )
                seconds[name] = round(clock() - begin_s, 1)
                report(f"{name}: {seconds[name]:g} s")
            if not ended:
                wait(_POLL_INTERVAL_S)
    finally:
        for process, _ in running.values():
            process.terminate()
    return seconds


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `pronunciation`")
    parser.add_argument("teacher", type=Path, help="folder that `teacher/get.sh` made")
    parser.add_argument("--gpus", default="0", help="GPUs, such as 0,1 (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the durations")
    options = parser.parse_args()
    gpus = options.gpus.split(",")
    work = Work(options.work)
    if not work.phonemes.exists():
        parser.error(f"{work.phonemes} is missing; run examples.train_voice.pronunciation first")
    logs = work.folder / "logs"
    logs.mkdir(exist_ok=True)
    print(f"Logs are in {logs}.", flush=True)
    begin_s = time.monotonic()
    try:
        seconds = run_stages(
            stages(work, options.teacher, len(gpus)),
            partial(start_stage, logs, gpus),
            partial(print, flush=True),
            num_gpus=len(gpus),
        )
    except StageError as error:
        sys.exit(str(error))
    figures = {"gpus": len(gpus), "seconds": seconds, "all_s": round(time.monotonic() - begin_s, 1)}
    print(f"all: {figures['all_s']:g} s, in sum {sum(seconds.values()):g} s")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
