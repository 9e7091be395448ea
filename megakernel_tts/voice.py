"""Cloned voices: an x-vector, and optionally the recording's codes with its transcript."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel_tts.checks import MAX_POSITIONS, check_text
from megakernel_tts.errors import TextError, VoiceError
from megakernel_tts.files import replace_file

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = "megakernel-tts-voice-1"
_MAX_FILE_BYTES = 4 << 20  # more than every voice that fits a slot
_MAX_MAGNITUDE = 1e6  # of an x-vector's values, far above those of speech
_MAX_CODE = 1 << 20  # far above the codebooks of a released model


@dataclass(frozen=True, eq=False)
class Voice:
    """A voice cloned from a recording.

    With a transcript the model continues the recording (in-context reference). Without one it uses
    the x-vector only.

    Attributes:
        x_vector: Speaker embedding [hidden], float32.
        codes: Codec codes of the recording [frames, groups], int64; None without a transcript.
        text: The transcript; None without one.

    Raises:
        VoiceError: A tensor has an unexpected shape, dtype or value, or the recording is too long
            for a prompt.
        TextError: The transcript is not Unicode text.
    """

    x_vector: "Tensor"
    codes: "Tensor | None" = None
    text: str | None = None

    def __post_init__(self) -> None:
        import torch

        x, codes = self.x_vector, self.codes
        is_vector = isinstance(x, torch.Tensor) and x.ndim == 1 and len(x) > 0
        if not (is_vector and x.dtype == torch.float32):
            raise VoiceError("A voice's x_vector must be a float32 tensor [hidden].")
        if not bool((x.abs() <= _MAX_MAGNITUDE).all()):  # false for NaN
            raise VoiceError(
                "The voice's x_vector holds NaN, infinity or very large values; clone the voice "
                "again."
            )
        if (codes is None) != (self.text is None):
            raise VoiceError(
                "A voice has both codes and a transcript of its recording, or neither."
            )
        if codes is not None:
            is_matrix = isinstance(codes, torch.Tensor) and codes.ndim == 2 and 0 not in codes.shape
            if not (is_matrix and codes.dtype == torch.int64):
                raise VoiceError("A voice's codes must be an int64 tensor [frames, groups].")
            if len(codes) >= MAX_POSITIONS:
                raise VoiceError(
                    f"The voice's recording has {len(codes):,} frames, and a prompt has at most "
                    f"{MAX_POSITIONS:,} positions; clone the voice from a shorter recording."
                )
            if not 0 <= int(codes.min()) <= int(codes.max()) < _MAX_CODE:
                raise VoiceError(
                    f"The voice's codes must be from 0 to {_MAX_CODE - 1:,}; clone the voice again."
                )
        if self.text is not None:
            check_text(self.text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the voice to a safetensors file.

        Args:
            path: A regular file, which is replaced and keeps its mode, or a new file.

        Raises:
            VoiceError: The file cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save

        tensors = {"x_vector": self.x_vector.contiguous()}
        metadata = {"format": _FORMAT}
        if self.codes is not None and self.text is not None:
            tensors["codes"] = self.codes.contiguous()
            metadata["text"] = self.text
        try:
            replace_file(path, save(tensors, metadata))
        except (SafetensorError, OSError, ValueError) as error:
            raise VoiceError(f"The voice cannot be written to {path} ({error}).") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Voice":
        """Reads a voice that `save` wrote.

        Raises:
            VoiceError: There is no such file, it is not a voice file, or its voice is invalid.
        """
        from safetensors import SafetensorError, safe_open

        file = Path(path)
        try:
            if file.is_dir():
                raise VoiceError(f"{file} is a folder; name a voice file, which Voice.save writes.")
            if not file.is_file():
                raise VoiceError(
                    f"{file} does not exist; a voice file is what a cloned voice is saved to."
                )
            if file.stat().st_size > _MAX_FILE_BYTES:
                raise VoiceError(
                    f"{file} is no voice file: it is larger than {_MAX_FILE_BYTES >> 20} MiB."
                )
            with safe_open(str(file), framework="pt") as stored:
                metadata = stored.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise VoiceError(f"{file} is no voice file: no voice was saved to it.")
                x_vector = stored.get_tensor("x_vector")
                codes = stored.get_tensor("codes") if "codes" in stored.keys() else None
        except (SafetensorError, OSError) as error:
            raise VoiceError(f"{file} is no voice file ({error}).") from error
        try:
            return Voice(x_vector, codes, metadata.get("text"))
        except (TextError, VoiceError) as error:
            raise VoiceError(f"{file}: {error}") from error
