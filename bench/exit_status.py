"""Exit status of programs that end in every state of the engine thread.

A thread that is inside torch when the interpreter is finalised aborts the process. Each run is a
process of its own that ends with status 0 or 3. Several run at a time, so that threads are
preempted anywhere. The command fails if a run ends with another status or hangs. An interrupt or
SIGTERM ends it once the runs in progress have ended: with the figures of the runs before, status 1.

python -m bench.exit_status --device cpu --json bench/results/exit-status-cpu.json
"""

import argparse
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from bench.report import write

# State of the engine thread when the interpreter exits -> the program before that.
STATES = {
    "never closed": "tts = load(); tts.say('hi')",
    "closing": "tts = load(); s = tts.stream(TEXT); next(s); close(tts)",
    "synthesising": "tts = load(); s = tts.stream(TEXT); next(s)",
    "collected": "load().say('hi')",
    "collected while synthesising": "s = load().stream(TEXT); next(s); del s",
}
_PROGRAM = """
import threading
from megakernel_tts import TTS

TEXT = "This is a text of several words, so that it takes a while. " * 20

def load():
    return TTS.load({model!r}, {device!r})

def close(tts):
    threading.Thread(target=tts.close, daemon=True).start()

{state}
raise SystemExit({status})
"""
_STATUSES = (0, 3)  # of which the runs of a state end with one after the other
_TIMEOUT_S = 300.0  # a run takes seconds, also beside others


@dataclass(frozen=True)
class WrongStatus:
    """A run that did not end with the program's status.

    Attributes:
        state: Key of `STATES`.
        expected: The program's status.
        found: Status of the process; negative for a signal; None if it hung and was killed.
        output: The end of its standard error.
    """

    state: str
    expected: int
    found: int | None
    output: str


def run_state(
    state: str,
    status: int,
    model: str = "demo",
    device: str = "auto",
    timeout_s: float = _TIMEOUT_S,
) -> WrongStatus | None:
    """Runs the program of a state in a process of its own.

    Args:
        state: Key of `STATES`.
        status: Status that the program ends with.
        model: As in `TTS.load`.
        device: As in `TTS.load`.
        timeout_s: Seconds after which the process is killed.

    Returns:
        What was wrong, or None.
    """
    program = _PROGRAM.format(model=model, device=device, state=STATES[state], status=status)
    command = [sys.executable, "-c", program]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return WrongStatus(state, status, None, f"The process had not ended after {timeout_s:g} s.")
    if process.returncode == status:
        return None
    return WrongStatus(state, status, process.returncode, process.stderr[-500:])


def main() -> int:
    """Runs the command line; returns 1 if a status is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="of each state (default: 200)")
    parser.add_argument(
        "--jobs", type=int, default=2 * (os.cpu_count() or 1), help="processes at a time"
    )
    parser.add_argument("--model", default="demo", help="demo (the default), a folder or a hub id")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    options = parser.parse_args()
    run = partial(run_state, model=options.model, device=options.device)
    states = [*STATES] * options.runs
    statuses = [_STATUSES[i // len(STATES) % len(_STATUSES)] for i in range(len(states))]
    ended, wrong = Counter[str](), Counter[str]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            runs = {
                pool.submit(run, state, status): state
                for state, status in zip(states, statuses, strict=True)
            }
            for one in tqdm(as_completed(runs), total=len(runs), mininterval=10):
                ended[runs[one]] += 1
                if (failure := one.result()) is not None:
                    wrong[failure.state] += 1
                    print(failure, file=sys.stderr)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
    figures = {
        "command": "bench.exit_status",
        "device": options.device,
        "runs": options.runs,
        "ended": {state: ended[state] for state in STATES},
        "jobs": options.jobs,
        "cpus": os.cpu_count(),
        "wrong": {state: wrong[state] for state in STATES},
    }
    write(figures, options.json, ("torch",))
    return 0 if ended.total() == len(states) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
