"""Cloned voices of a server: those that it was started with, and those that clients uploaded."""

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakernel_tts import MegakernelTTSError, Voice
from megakernel_tts.server.errors import RequestError

_log = logging.getLogger("megakernel_tts.server")

_MAX_UPLOADED = 1000  # voices, of about 0.1 MB each
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.IGNORECASE)  # also the name of its files


@dataclass(frozen=True, kw_only=True)
class UploadedVoice:
    """A voice that a client uploaded.

    Attributes:
        name: Its name, as it was uploaded; requests may use another case.
        voice: The voice.
        consent: Who agreed to its use, in the client's words.
        created_at: Seconds since 1970.
        file_size: Bytes of the recording.
        mime_type: Type of the recording.
        speaker_description: Description of the speaker, or None.
    """

    name: str
    voice: Voice
    consent: str
    created_at: int
    file_size: int
    mime_type: str
    speaker_description: str | None

    def describe(self) -> dict[str, object]:
        """The fields of vLLM-Omni's list of voices."""
        fields: dict[str, object] = {
            "name": self.name,
            "consent": self.consent,
            "created_at": self.created_at,
            "file_size": self.file_size,
            "mime_type": self.mime_type,
        }
        if self.voice.text is not None:
            fields["ref_text"] = self.voice.text
        if self.speaker_description is not None:
            fields["speaker_description"] = self.speaker_description
        return fields


class VoiceLibrary(Mapping[str, Voice]):
    """Cloned voices by name in lower case. Uploaded ones are kept in a folder, if there is one.

    A voice of the folder has two files: `NAME.safetensors`, which `Voice.save` writes, and
    `NAME.json` with what else was uploaded, which may be missing.
    """

    def __init__(self, voices: Mapping[str, Voice], folder: Path | None) -> None:
        """Reads the voices of the folder; files that are no voices are logged and not changed.

        Args:
            voices: Voices that clients cannot remove.
            folder: Keeps the uploaded voices; None to keep them in memory.

        Raises:
            OSError: The folder cannot be read.
        """
        self._fixed = {name.strip().lower(): voice for name, voice in voices.items()}
        self._folder = folder
        self._uploaded: dict[str, UploadedVoice] = {}
        self._busy: set[str] = set()  # names whose files are being written or removed
        for upload in sorted(_read_all(folder), key=lambda upload: upload.created_at):
            self._uploaded[upload.name.lower()] = upload

    def __getitem__(self, name: str) -> Voice:
        """The voice of a name in lower case."""
        return self._fixed[name] if name in self._fixed else self._uploaded[name].voice

    def __iter__(self) -> Iterator[str]:
        yield from self._fixed
        yield from (name for name in self._uploaded if name not in self._fixed)

    def __len__(self) -> int:
        return len(self._fixed.keys() | self._uploaded.keys())

    @property
    def uploaded(self) -> list[UploadedVoice]:
        """The uploaded voices, the oldest first."""
        return [*self._uploaded.values()]

    def check_name(self, name: str) -> None:
        """Checks that a voice can be uploaded under a name.

        Raises:
            RequestError: The name is invalid or taken, or there are too many voices.
        """
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"The name {name[:100]!r} must have 1 to 64 letters, digits, - or _, and begin "
                "with a letter or digit.",
                parameter="name",
            )
        if name.lower() in self or name.lower() in self._busy:
            raise RequestError(
                f"There is a voice {name!r}; delete it, or choose another name.",
                400,
                "voice_exists",
                "name",
            )
        if len(self._uploaded) >= _MAX_UPLOADED:
            raise RequestError(
                f"There are {_MAX_UPLOADED:,} uploaded voices; delete one.", 400, "too_many_voices"
            )

    async def add(self, upload: UploadedVoice) -> None:
        """Adds a voice, after its files were written.

        Raises:
            RequestError: See `check_name`; or its files cannot be written.
        """
        self.check_name(upload.name)
        key = upload.name.lower()
        self._busy.add(key)
        try:
            if self._folder is not None:
                await asyncio.to_thread(_write, self._folder, upload)
            self._uploaded[key] = upload
        except (MegakernelTTSError, OSError) as error:
            _log.error("The voice %s was not saved: %s", upload.name, error)
            raise RequestError("The voice could not be saved.", 500, "voice_not_saved") from None
        finally:
            self._busy.discard(key)

    async def remove(self, name: str) -> UploadedVoice:
        """Removes an uploaded voice and its files; streams that speak with it continue.

        Raises:
            RequestError: There is no such voice, or its files cannot be removed.
        """
        key = name.lower()
        if key not in self._uploaded or key in self._busy:
            raise RequestError(
                f"There is no uploaded voice {name[:100]!r}.", 404, "voice_not_found", "name"
            )
        self._busy.add(key)
        try:
            if self._folder is not None:
                await asyncio.to_thread(_remove, self._folder, key)
            return self._uploaded.pop(key)
        except OSError as error:
            _log.error("The voice %s was not removed: %s", name, error)
            raise RequestError("The voice could not be removed.", 500, "voice_not_saved") from None
        finally:
            self._busy.discard(key)


def _files(folder: Path, key: str) -> tuple[Path, Path]:
    """The files of a voice: the voice itself, and its description."""
    return folder / f"{key}.safetensors", folder / f"{key}.json"


def _write(folder: Path, upload: UploadedVoice) -> None:
    voice_file, description_file = _files(folder, upload.name.lower())
    try:
        description_file.write_text(json.dumps(upload.describe()), encoding="utf-8")
        upload.voice.save(voice_file)  # the last one: without it there is no voice
    except (MegakernelTTSError, OSError):
        description_file.unlink(missing_ok=True)
        raise


def _remove(folder: Path, key: str) -> None:
    for file in _files(folder, key):
        file.unlink(missing_ok=True)


def _read_all(folder: Path | None) -> Iterator[UploadedVoice]:
    if folder is None:
        return
    for file in sorted(folder.glob("*.safetensors")):
        try:
            if not _NAME.fullmatch(file.stem) or file.stem != file.stem.lower():
                raise ValueError("its name must be lower-case letters, digits, - and _")
            yield _read(file)
        except (MegakernelTTSError, OSError, TypeError, ValueError) as error:
            _log.warning("%s is left out: %s", file, error)


def _read(file: Path) -> UploadedVoice:
    voice = Voice.load(file)
    description_file = _files(file.parent, file.stem)[1]
    stored: Any = {}
    if description_file.exists():
        stored = json.loads(description_file.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError(f"{description_file.name} is no JSON object")
    name = str(stored.get("name", file.stem))
    description = stored.get("speaker_description")
    return UploadedVoice(
        name=name if name.lower() == file.stem else file.stem,
        voice=voice,
        consent=str(stored.get("consent", "")),
        created_at=int(stored.get("created_at", file.stat().st_mtime)),
        file_size=int(stored.get("file_size", 0)),
        mime_type=str(stored.get("mime_type", "")),
        speaker_description=None if description is None else str(description),
    )
