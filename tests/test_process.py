"""Forked processes: what cannot work there is refused at once, what can work does."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROLOGUE = """
import os, signal, sys
from megakernel_tts import TTS, ForkedProcessError, Sampling

BRIEF = Sampling(seed=0, max_frames=3, guard=False)

def load():
    return TTS.load(sys.argv[1], device="cpu", slots=1)

def in_child(*actions):
    # Each in a child of its own; a signal ends a child that hangs.
    for action in actions:
        if os.fork() == 0:
            signal.alarm(300)
            try:
                action()
                print("done", flush=True)
            except ForkedProcessError as error:
                print(error, flush=True)
            os._exit(0)
        _, status = os.wait()
        assert status == 0, status

def use():
    with load() as tts:
        assert tts.say("hi", sampling=BRIEF).finish == "length"
"""
# The states of a parent one after another, in one process, since a start takes seconds.
PARENT = """
def run_torch():
    import torch
    torch.ones(1 << 20).sum()
    in_child(use)

print("# torch did not run", flush=True)
in_child(use, use)

print("# torch ran without a model", flush=True)
in_child(run_torch)

print("# a model is loaded", flush=True)
tts = load()
in_child(use)

print("# a session is open", flush=True)
session = tts.open(sampling=BRIEF)
events = iter(session)
in_child(
    lambda: tts.say("hi"),
    lambda: tts.stream("hi"),
    lambda: tts.open(),
    lambda: tts.clone("hi.wav"),
    lambda: tts.warmup(),
    lambda: session.push_text("hi"),
    lambda: session.flush(),
    lambda: session.end(),
    lambda: next(events),
)
session.push_text("hello to the world.")
session.end()
assert [*events][-1].reason == "length"

print("# an engine is dropped", flush=True)
def fail():
    print("the backend is used", flush=True)

def drop():
    global tts, session
    tts._loaded.engine.backend.interrupt = fail
    session.cancel()
    tts.close()
    tts = session = None

session = tts.open()
in_child(drop)
session.cancel()
print(tts.say("hi", sampling=BRIEF).finish, flush=True)
if os.fork() == 0:
    tts._loaded.engine.backend.interrupt = fail
    sys.exit(0)  # runs what is registered to run at exit
assert os.wait()[1] == 0

print("# the model is closed", flush=True)
tts.close()
in_child(use)
use()
"""
# States of a parent that imported torch before the package, each in a process of its own, since the
# import takes seconds. A thread that `threading` does not know is like those of torch's pool and of
# BLAS libraries, which start theirs at the import, but none on a machine with one core.
IMPORTED = f"""
import _thread, os
import torch

def run_torch():
    torch.ones(1 << 20).sum()

def start_thread():
    lock = _thread.allocate_lock()
    lock.acquire()
    _thread.start_new_thread(lock.acquire, ())

for state in (run_torch, start_thread):
    if os.fork() == 0:
        state()
        exec({PROLOGUE!r})
        in_child(use)
        os._exit(0)
    assert os.wait()[1] == 0
"""
INHERITED = "The TTS was loaded before this process was forked"
TORCH_RAN = "Torch ran, or may have run, before this process was forked"


def run(program: str, checkpoint: Path) -> list[str]:
    """What a program prints; its torch has a thread pool."""
    process = subprocess.run(
        [sys.executable, "-c", program, checkpoint],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.fixture(scope="module")
def outputs(checkpoint: Callable[..., Path]) -> dict[str, list[str]]:
    """What forked processes print, by the state of their parent."""
    outputs: dict[str, list[str]] = {}
    state = ""
    for line in run(PROLOGUE + PARENT, checkpoint()):
        if line.startswith("# "):
            state = line.removeprefix("# ")
            outputs[state] = []
        else:
            outputs[state].append(line)
    return outputs


def test_a_forked_process_cannot_use_its_parents_engine(outputs: dict[str, list[str]]) -> None:
    lines = outputs["a session is open"]
    assert len(lines) == 9 and all(line.startswith(INHERITED) for line in lines)


def test_a_forked_process_may_drop_its_parents_engine(outputs: dict[str, list[str]]) -> None:
    """And does not reach the backend, whose flags may be in memory that only the parent has."""
    assert outputs["an engine is dropped"] == ["done", "length"]


@pytest.mark.parametrize("state", ["a model is loaded", "the model is closed"])
def test_a_forked_process_cannot_load_a_model_after_its_parent(
    outputs: dict[str, list[str]], state: str
) -> None:
    (message,) = outputs[state]
    assert message.startswith(TORCH_RAN) and "get_context('spawn')" in message


def test_a_forked_process_cannot_load_a_model_after_torch_has_run(
    outputs: dict[str, list[str]],
) -> None:
    message, end = outputs["torch ran without a model"]
    assert message.startswith(TORCH_RAN) and end == "done"


def test_a_forked_process_cannot_load_a_model_after_torch_may_have_run(
    checkpoint: Callable[..., Path],
) -> None:
    """Torch was imported before the package, which does not know what it did."""
    messages = run(IMPORTED, checkpoint())
    assert len(messages) == 2 and all(message.startswith(TORCH_RAN) for message in messages)


def test_a_forked_process_can_load_a_model_if_torch_did_not_run(
    outputs: dict[str, list[str]],
) -> None:
    assert outputs["torch did not run"] == ["done", "done"]
