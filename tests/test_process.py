"""Forked processes: what cannot work there is refused at once, what can work does."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
            signal.alarm(60)
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
INHERITED = "The TTS was loaded before this process was forked"
TORCH_RAN = "Torch ran, or may have run, before this process was forked"


def run(program: str, checkpoint: Path, before_import: str = "") -> list[str]:
    """What a program prints; its torch has a thread pool."""
    process = subprocess.run(
        [sys.executable, "-c", before_import + PROLOGUE + program, checkpoint],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_a_forked_process_cannot_use_its_parents_engine(checkpoint: Callable[..., Path]) -> None:
    program = """
tts = load()
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
"""
    outputs = run(program, checkpoint())
    assert len(outputs) == 9 and all(line.startswith(INHERITED) for line in outputs)


def test_a_forked_process_may_drop_its_parents_engine(checkpoint: Callable[..., Path]) -> None:
    """And does not reach the backend, whose flags may be in memory that only the parent has."""
    program = """
def fail():
    print("the backend is used", flush=True)

def drop():
    global tts, session
    tts._loaded.engine.backend.interrupt = fail
    session.cancel()
    tts.close()
    tts = session = None

tts = load()
session = tts.open()
in_child(drop)
session.cancel()
print(tts.say("hi", sampling=BRIEF).finish, flush=True)
if os.fork() == 0:
    tts._loaded.engine.backend.interrupt = fail
    sys.exit(0)  # runs what is registered to run at exit
assert os.wait()[1] == 0
"""
    assert run(program, checkpoint()) == ["done", "length"]


def test_a_forked_process_cannot_load_a_model_after_its_parent(
    checkpoint: Callable[..., Path],
) -> None:
    for parent in ("tts = load()", "use()"):
        (message,) = run(f"{parent}\nin_child(use)", checkpoint())
        assert message.startswith(TORCH_RAN) and "get_context('spawn')" in message


def test_a_forked_process_cannot_load_a_model_after_torch_may_have_run(
    checkpoint: Callable[..., Path],
) -> None:
    run_torch = "import torch\ntorch.ones(1 << 20).sum()\n"
    for before_import, program in (("", run_torch), (run_torch, ""), ("import torch\n", "")):
        (message,) = run(program + "in_child(use)", checkpoint(), before_import)
        assert message.startswith(TORCH_RAN)


def test_a_forked_process_can_load_a_model_if_torch_did_not_run(
    checkpoint: Callable[..., Path],
) -> None:
    assert run("in_child(use, use)\nuse()", checkpoint()) == ["done", "done"]
