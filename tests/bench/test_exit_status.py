import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from bench import exit_status
from bench.exit_status import STATES, WrongStatus, run_state
from megakernel_tts.model.demo import DEMO_NOTE

# Forks a process for each program, since the import of torch takes seconds; prints their statuses.
FORKING = """
import gc
import os
from megakernel_tts import TTS  # with torch, which a child may use if its parent does not

gc.freeze()  # or each child collects the objects of torch when it ends
for program in {programs}:
    if os.fork() == 0:
        exec(program, {{}})
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)  # or later children print it, too
"""
PROGRAM = "import sys\n{state}\nraise SystemExit({status})"
# The command with programs of which the third ends with standard input.
FAKE_COMMAND = f"""
import sys
from bench import exit_status

exit_status._PROGRAM = {PROGRAM!r}
exit_status.STATES = {{"right": "", "wrong": "sys.exit(9)", "waiting": "sys.stdin.read()"}}
sys.exit(exit_status.main())
"""


@pytest.fixture
def fake_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_status, "_PROGRAM", PROGRAM)


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.exit_status", *options])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return exit_status.main()
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_exit_status_is_the_programs(device: str) -> None:
    options = {"model": "demo", "device": device, "status": 3}
    programs = [exit_status._PROGRAM.format(state=state, **options) for state in STATES.values()]
    command = [sys.executable, "-c", FORKING.format(programs=programs)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.stdout.split() == ["3"] * len(STATES), process.stderr
    notes = [line for line in process.stderr.splitlines() if line != DEMO_NOTE]
    assert all(line.startswith(("Building ", "Compiling ")) for line in notes), process.stderr


@pytest.mark.usefixtures("fake_program")
def test_a_program_that_does_not_end_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_status, "STATES", {"hangs": "import signal; signal.pause()"})
    assert run_state("hangs", 0, timeout_s=0.1) == WrongStatus(
        "hangs", 0, None, "The process had not ended after 0.1 s."
    )


@pytest.mark.usefixtures("fake_program")
@pytest.mark.parametrize(
    ("program", "wrong", "status"),
    [("", 0, 0), ("import os; os.abort()", 2, 1)],
    ids=["right", "wrong"],
)
def test_all_runs_are_counted_and_progress_needs_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    program: str,
    wrong: int,
    status: int,
) -> None:
    monkeypatch.setattr(exit_status, "STATES", {"right": "", "state": program})
    file = tmp_path / "figures.json"
    assert run(monkeypatch, "--runs", "2", "--json", str(file)) == status
    figures = json.loads(file.read_text())
    assert figures["ended"] == {"right": 2, "state": 2}
    assert figures["wrong"] == {"right": 0, "state": wrong}
    progress = capsys.readouterr().err
    assert " 0/4 " in progress and " 4/4 " in progress
    assert progress.count("found=-6") == wrong


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_with_the_figures_so_far(
    tmp_path: Path, number: signal.Signals
) -> None:
    file, pipe = tmp_path / "figures.json", subprocess.PIPE
    command = [sys.executable, "-c", FAKE_COMMAND, "--runs", "50", "--jobs", "1", "--json", file]
    # Background jobs of a shell script ignore interrupts, and so do their children.
    reset_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=reset_sigint
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        progress = ""
        while "WrongStatus(state='wrong'" not in progress:  # the second run was counted
            progress += process.stderr.readline()
            assert process.poll() is None, progress
        process.send_signal(number)
        output, error = process.communicate()  # closes the standard input of the third run
    assert process.returncode == 1 and "Traceback" not in error
    figures = json.loads(file.read_text())
    assert figures == json.loads(output)
    assert figures["runs"] == 50
    assert figures["ended"] == {"right": 1, "wrong": 1, "waiting": 0}
    assert figures["wrong"] == {"right": 0, "wrong": 1, "waiting": 0}
    assert " 0/150 " in progress
