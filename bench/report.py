"""Figures with what a reader must know of how they were taken."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megakernel_tts.bench.report import provenance


def write(
    figures: Mapping[str, object], file: Path | None, packages: Sequence[str] = ("pipecat-ai",)
) -> None:
    """Prints figures with date, commit and machine; writes them to the file, if one is given."""
    content = dict(figures) | provenance(packages)
    print(json.dumps(content, indent=2))
    if file is not None:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
