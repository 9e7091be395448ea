"""Runs the stages that need a GPU, each in a process of its own with a log, and times them.

`synthesis` uses all of the GPUs, `train` the first one.

python -m examples.train_ears.run WORK TEACHER --json durations.json
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

from examples.train_ears.layout import Work
from examples.train_voice.layout import summary
from examples.train_voice.run import Stage, StageError, run_stages, start_stage

_SYNTHESIS_WORKERS = 3  # processes for each GPU


def stages(
    work: Work, teacher: Path, synthesis_minutes: float, minutes: float, num_gpus: int
) -> list[Stage]:
    """The stages from the tokenizer to the checkpoint.

    Args:
        work: The run's folder, after `pronunciation`.
        teacher: Folder of the teacher.
        synthesis_minutes: Minutes in which the teacher speaks texts.
        minutes: Minutes of the training.
        num_gpus: GPUs of `synthesis`.
    """
    folder = str(work.folder)

    def module(name: str, *arguments: str, after: tuple[str, ...] = ()) -> Stage:
        return Stage(name, ("-m", f"examples.train_ears.{name}", folder, *arguments), after)

    workers = str(num_gpus * _SYNTHESIS_WORKERS)
    spoken = ("--minutes", str(synthesis_minutes), "--workers", workers)
    return [
        module("tokenizer"),
        module("synthesis", str(teacher), *spoken, after=("tokenizer",)),
        module("train", "--minutes", str(minutes), after=("synthesis",)),
        module("export", after=("train",)),
    ]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `pronunciation`")
    parser.add_argument("teacher", type=Path, help="folder that the voice's `get.sh` made")
    parser.add_argument("--gpus", default="0", help="GPUs, such as 0,1 (default: 0)")
    parser.add_argument("--synthesis-minutes", type=float, default=6.0, help="(default: 6)")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the durations")
    options = parser.parse_args()
    work = Work(options.work)
    logs = work.folder / "ears_logs"
    logs.mkdir(exist_ok=True)
    print(f"Logs are in {logs}.", flush=True)
    begin_s = time.monotonic()
    try:
        seconds = run_stages(
            stages(
                work,
                options.teacher,
                options.synthesis_minutes,
                options.minutes,
                len(options.gpus.split(",")),
            ),
            partial(start_stage, logs, [options.gpus]),  # all are visible to every stage
            partial(print, flush=True),
        )
    except StageError as error:
        sys.exit(str(error))
    all_s = round(time.monotonic() - begin_s, 1)
    print(f"all: {all_s:g} s")
    if options.json:
        figures = {"seconds": seconds, "all_s": all_s}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
