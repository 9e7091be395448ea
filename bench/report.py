"""Figures with what a reader must know of how they were taken."""

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import psutil


def write(
    figures: Mapping[str, object], file: Path | None, packages: Sequence[str] = ("pipecat-ai",)
) -> None:
    """Prints figures with date, commit and machine; writes them to the file, if one is given."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    content = dict(figures) | {
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "commit": commit,
        "date": date.today().isoformat(),
    }
    print(json.dumps(content, indent=2))
    if file is not None:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
