"""Conditions of a measurement; imported without torch."""

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def provenance(packages: Sequence[str] = ("torch",)) -> dict[str, str]:
    """Machine, versions, commit (in a checkout) and date of a measurement."""
    conditions = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
    if commit := _commit():
        conditions["commit"] = commit
    return conditions | {"date": date.today().isoformat()}


def _commit() -> str | None:
    """The commit of the checkout that contains this package; None if there is none."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(_PACKAGE), *arguments]
        try:
            run = subprocess.run(command, capture_output=True, text=True)
        except OSError:  # git is not installed
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", "__init__.py") is not None
    return git("describe", "--always", "--dirty") if tracked else None
