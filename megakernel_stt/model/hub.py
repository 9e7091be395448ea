"""Finds a recogniser's folder or archive by name."""

import os
from pathlib import Path

from megakernel_common.errors import CheckpointError
from megakernel_common.hub import download, parse_hub_id

DEMO = "demo"
_DEMO_FOLDER = Path(__file__).parents[1] / "checkpoints" / "demo"
_EXAMPLE = "nvidia/nemotron-speech-streaming-en-0.6b"


def find_model(model: str | os.PathLike[str]) -> Path:
    """Finds a recogniser, downloading it first where needed.

    Args:
        model: `demo`, a folder, a `.nemo` file, or a hub id (`owner/name` or
            `owner/name@revision`).

    Raises:
        CheckpointError: The name is none of these, or the download failed.
    """
    name = os.fspath(model)
    if name == DEMO:
        return _DEMO_FOLDER
    if 0 < len(name) < 4096 and (Path(name).is_dir() or Path(name).is_file()):
        return Path(name)
    hub_id = parse_hub_id(name)
    if hub_id is None:
        raise CheckpointError(
            f"{name!r} is not a recognition model: name a folder or a .nemo file that exists, a "
            f"hub id such as {_EXAMPLE} (add @revision for one version), or demo."
        )
    folder = download(*hub_id, ["*.json", "*.safetensors"])
    if not any(folder.glob("*.safetensors")):
        folder = download(*hub_id, ["*.nemo"])
    return folder
