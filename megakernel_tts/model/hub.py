"""Finds the checkpoint folder of a model by name."""

import os
import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError

from megakernel_tts.errors import CheckpointError
from megakernel_tts.model.demo import DEMO

_DEMO_FOLDER = Path(__file__).parents[1] / "voices" / "demo"
_FILES = ["*.json", "*.safetensors", "merges.txt", "speech_tokenizer/*"]


def find_checkpoint(model: str | os.PathLike[str]) -> Path:
    """Finds a checkpoint, downloading it first where needed.

    Args:
        model: `demo`, a folder, or a hub id (`owner/name` or `owner/name@revision`).

    Raises:
        CheckpointError: The name is none of these, or the download failed.
    """
    name = os.fspath(model)
    if name == DEMO:
        return _DEMO_FOLDER
    if 0 < len(name) < 4096 and Path(name).is_dir():
        return Path(name)
    hub_id = parse_hub_id(name)
    if hub_id is None:
        raise CheckpointError(
            f"{name!r} is not a model: name a folder that exists, a hub id such as "
            "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice (add @revision for one version), or demo."
        )
    return download(*hub_id, _FILES)


def parse_hub_id(name: str) -> tuple[str, str | None] | None:
    """Repository and revision of `owner/name` or `owner/name@revision`; None for other names."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if match is None or name.startswith((".", "/", "~")):
        return None
    return match[1], match[2]


def download(repository: str, revision: str | None, files: list[str]) -> Path:
    """Downloads files of a repository of the hub, or finds them in its cache.

    Args:
        repository: `owner/name`.
        revision: A branch, tag or commit; None for the newest version.
        files: Patterns of their names.

    Raises:
        CheckpointError: There is no such repository, or the download failed.
    """
    where = f"{repository}@{revision}" if revision else repository
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=files
        )
    except (OSError, HFValidationError) as error:  # the library's own errors are OSErrors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{where!r} is not a local folder, and it could not be downloaded from the hub: "
            f"{reason}"
        ) from error
    return Path(folder)
