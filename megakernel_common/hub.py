"""Files of the hub: ids of repositories, and downloads."""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError

from megakernel_common.errors import CheckpointError


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
