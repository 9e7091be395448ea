"""A model's name -> the folder that holds its checkpoint."""

import os
import re
import shutil
import tempfile
from pathlib import Path

from megakernel_tts.errors import CheckpointError

DEMO = "demo"
DEMO_NOTE = (
    "The demo model is a small untrained checkpoint: it only makes noise. For real speech name a "
    "released model, such as Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice, or a folder that holds one."
)
_DEMO_VERSION = 1  # of the files; a newer one is made beside an older
_FILES = ["*.json", "*.safetensors", "merges.txt", "speech_tokenizer/*"]


def find_checkpoint(model: str | os.PathLike[str]) -> Path:
    """Finds a checkpoint, downloading or making it first where needed.

    Args:
        model: `demo`, a folder, or a hub id (`owner/name` or `owner/name@revision`).

    Raises:
        CheckpointError: It is none of these, or the download failed.
    """
    name = os.fspath(model)
    if name == DEMO:
        return _demo()
    if 0 < len(name) < 4096 and Path(name).is_dir():
        return Path(name)
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if match is None or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{name!r} is no model: name a folder that exists, a hub id such as "
            "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice (add @revision for one version), or demo."
        )
    return _download(match[1], match[2])


def _download(repository: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    where = f"{repository}@{revision}" if revision else repository
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=_FILES
        )
    except (OSError, HFValidationError) as error:  # the library's own errors are OSErrors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{where!r} is no folder here, and it could not be fetched from the hub: {reason}"
        ) from error
    return Path(folder)


def _demo() -> Path:
    """The demo's folder in the user's cache; made at first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megakernel-tts"
    folder = cache / f"demo-{_DEMO_VERSION}"
    if folder.is_dir():
        return folder
    from safetensors import SafetensorError

    from megakernel_tts.random_checkpoint import write_checkpoint

    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="demo-", dir=cache))
        write_checkpoint(made)
        try:
            made.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(made)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The demo model could not be written to {cache} ({error}); set XDG_CACHE_HOME to a "
            "folder that can be written to."
        ) from error
    return folder
