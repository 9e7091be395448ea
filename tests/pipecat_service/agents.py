"""Agents in processes of their own, which Pipecat's runner serves."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes import TIMEOUT_S

ROOT = Path(__file__).parents[2]


@contextmanager
def running_agent(*command: str, **environment: str) -> Iterator[tuple[str, list[str]]]:
    """Runs an agent until the end of the `with` block.

    Args:
        *command: Arguments of Python, before those of the runner.
        **environment: Of the process, besides this one's without keys.

    Yields:
        Its host and port, and the lines that it prints.
    """
    keyless = {k: v for k, v in os.environ.items() if not k.startswith("OPENAI_")}
    process = subprocess.Popen(
        [sys.executable, *command, "--port", "0"],
        cwd=ROOT,
        env=keyless | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    started = threading.Event()  # or the process has ended

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.append(line)
                if "Uvicorn running on" in line:
                    started.set()
        started.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert started.wait(TIMEOUT_S), "the agent does not start"
        address = re.search(r"running on http://([^ ]+)", "".join(lines))
        assert address is not None, "".join(lines)
        yield address[1], lines
    finally:
        process.kill()  # on SIGTERM, the runner waits for callers to disconnect
        process.wait()
        reader.join()
