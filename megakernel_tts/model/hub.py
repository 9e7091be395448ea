"""Finds the checkpoint folder of a model by name."""

import os
from pathlib import Path

from megakernel_common.errors import CheckpointError
from megakernel_common.hub import download, parse_hub_id
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
