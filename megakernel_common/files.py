"""Output files: which targets are accepted, and replacement of a file as a whole."""

import os
import secrets
import stat
import tempfile
from functools import partial
from pathlib import Path


def check_output(file: Path) -> None:
    """Checks that a file can be written: a regular file or a new one.

    Raises:
        OSError: It is a folder, a symbolic link, a pipe or a device, its folder does not exist, or
            permission is missing.
    """
    if file.is_symlink():
        raise FileExistsError(f"{file} is a symbolic link; name the file that it leads to")
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; name a file")
    if file.exists() and not file.is_file():
        raise FileExistsError(f"{file} is not a regular file; name one, or a new file")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{file.parent} is not a folder; create it, or name another file")
    if file.exists() and not os.access(file, os.W_OK):
        raise PermissionError(f"{file} cannot be written; name another file")
    try:
        tempfile.TemporaryFile(dir=file.parent).close()  # access rights say nothing of /proc
    except OSError as error:
        message = f"{file.parent} cannot be written ({error.strerror}); name another file"
        raise PermissionError(message) from error


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file through a temporary file beside it, so that readers find old or new content.

    Args:
        path: A regular file, whose mode is kept, or a new file.
        content: All of its content.

    Raises:
        OSError: See `check_output`; or writing failed. An existing file is then unchanged.
    """
    file = Path(path)
    check_output(file)
    temporary = file.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        # Readable by no other user before it has the mode of the file that it replaces.
        mode = 0o600 if file.exists() else 0o666
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as stream:
            stream.write(content)
        if file.exists():
            temporary.chmod(stat.S_IMODE(file.stat().st_mode))
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
