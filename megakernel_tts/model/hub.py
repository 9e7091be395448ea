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
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if match is None or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{name!r} is not a model: name a folder that exists, a hub id such as "
            "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice (add @revision for one version), or demo."
        )
    return _download(match[1], match[2])


def _download(repository: str, revision: str | None) -> Path:
    where = f"{repository}@{revision}" if revision else repository
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=_FILES
        )
    except (OSError, HFValidationError) as error:  # the library's own errors are OSErrors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{where!r} is not a local folder, and it could not be downloaded from the hub: "
            f"{reason}"
        ) from error
    return Path(folder)
