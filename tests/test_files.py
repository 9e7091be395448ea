"""Every writer of a file, on every kind of target."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megakernel_common.files import replace_file
from megakernel_tts import Speech, Voice, VoiceError
from megakernel_tts.align.alignment import Alignment
from megakernel_tts.cli.console import UsageError
from megakernel_tts.cli.output import check_writable


def _kept(file: Path) -> Path:
    file.write_text("kept")
    return file


def _device(file: Path) -> None:
    """Makes a null device, not to lose the real one if a writer replaces it."""
    try:
        os.mknod(file, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no permission to make a device")


WRITERS: dict[str, Callable[[Path], object]] = {
    "replace_file": lambda file: replace_file(file, b"content"),
    "voice": Voice(torch.zeros(3)).save,
    "alignment": Alignment(((0, 0),), 1e-4, 3, {}).save,
    "speech": Speech(np.zeros(9, np.int16), 24_000, np.zeros((0, 16), np.int64), (), "eos").save,
}
TARGETS: dict[str, tuple[Callable[[Path], object], str]] = {
    "link to a file": (
        lambda target: target.symlink_to(_kept(target.with_name("kept"))),
        "is a symbolic link",
    ),
    "link to nothing": (lambda target: target.symlink_to("none"), "is a symbolic link"),
    "link to a device": (lambda target: target.symlink_to("/dev/null"), "is a symbolic link"),
    "pipe": (os.mkfifo, "is not a regular file"),
    "device": (_device, "is not a regular file"),
    "folder": (Path.mkdir, "is a folder"),
}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Callable[[Path], object]:
    return WRITERS[request.param]


@pytest.mark.parametrize("kind", TARGETS)
def test_target_that_is_not_a_regular_file_is_refused_and_kept(
    tmp_path: Path, write: Callable[[Path], object], kind: str
) -> None:
    make, message = TARGETS[kind]
    target = tmp_path / "target"
    make(target)
    before = target.lstat()
    with pytest.raises((OSError, VoiceError), match=message):
        write(target)
    with pytest.raises(UsageError, match=message):  # the commands' check before any work
        check_writable(target)
    assert (target.lstat().st_mode, target.lstat().st_ino) == (before.st_mode, before.st_ino)
    names = {"target", "kept"} if kind == "link to a file" else {"target"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all(path.read_text() == "kept" for path in tmp_path.glob("kept"))


def test_content_has_the_mode_of_a_private_file_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, modes = _kept(tmp_path / "target"), list[int]()
    target.chmod(0o640)
    chmod = Path.chmod

    def record(file: Path, mode: int) -> None:
        modes.append(stat.S_IMODE(file.stat().st_mode))
        chmod(file, mode)

    monkeypatch.setattr(Path, "chmod", record)
    replace_file(target, b"content")
    assert modes == [0o600] and stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_mode_of_an_existing_file_is_kept(
    tmp_path: Path, write: Callable[[Path], object], mode: int
) -> None:
    target = _kept(tmp_path / "target")
    target.chmod(mode)
    write(target)
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert target.read_bytes() != b"kept" and list(tmp_path.iterdir()) == [target]


def test_new_file_has_the_mode_of_the_process(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    """As a file that `open` creates, which depends on the umask."""
    (tmp_path / "plain").touch()
    write(tmp_path / "target")
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_missing_folder_is_an_error(tmp_path: Path, write: Callable[[Path], object]) -> None:
    with pytest.raises((OSError, VoiceError), match="none is not a folder"):
        write(tmp_path / "none" / "target")


def test_failed_replacement_keeps_the_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = _kept(tmp_path / "target")

    def fail(*_: object) -> None:
        raise OSError("the device is full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="the device is full"):
        replace_file(target, b"content")
    assert target.read_text() == "kept" and list(tmp_path.iterdir()) == [target]


def test_missing_permission_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], object]
) -> None:
    """The answer of the system is replaced, since root may write everywhere."""
    target = _kept(tmp_path / "target")
    monkeypatch.setattr(os, "access", lambda path, _: path != target)
    with pytest.raises((OSError, VoiceError), match=f"{target} cannot be written"):
        write(target)
    assert target.read_text() == "kept"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that takes no files")
def test_a_folder_that_takes_no_files_is_an_error(write: Callable[[Path], object]) -> None:
    with pytest.raises((OSError, VoiceError), match="/proc cannot be written"):
        write(Path("/proc/target"))
