"""Writes figures together with machine, versions, commit and date."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megakernel_tts.bench.provenance import provenance


def write(
    figures: Mapping[str, object], file: Path | None, packages: Sequence[str] = ("pipecat-ai",)
) -> None:
    """Prints figures with their provenance, and writes them to a file if one is given.

    Args:
        figures: Serialisable as JSON.
        file: Where to write, or None.
        packages: Distributions whose versions are added.
    """
    content = dict(figures) | provenance(packages)
    print(json.dumps(content, indent=2))
    if file is not None:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
