"""Cloned voices: an x-vector, and optionally the recording's codes with its transcript."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megakernel_common.files import replace_file
from megakernel_tts.checks import MAX_POSITIONS, check_text
from megakernel_tts.errors import TextError, VoiceError

_FORMAT = "megakernel-tts-voice-1"
_MAX_FILE_BYTES = 4 << 20  # more than every voice that fits a slot
_MAX_MAGNITUDE = 1e6  # of an x-vector's values, far above those of speech
_MAX_CODE = 1 << 20  # far above the codebooks of a released model
_STORED_TYPES = {"x_vector": "F32", "codes": "I64"}  # of a voice file
_EXPECTED = {
    "x_vector": "must be a float32 array [hidden].",
    "codes": "must be an int64 array [frames, groups].",
}


@dataclass(frozen=True, eq=False, init=False)
class Voice:
    """A voice cloned from a recording. Programs without torch can load, hold and save it.

    With a transcript the model continues the recording (in-context reference). Without one it uses
    the x-vector only.

    Attributes:
        x_vector: Speaker embedding [hidden], float32.
        codes: Codec codes of the recording [frames, groups], int64; None without a transcript.
        text: The transcript; None without one.
    """

    x_vector: NDArray[np.float32]
    codes: NDArray[np.int64] | None
    text: str | None

    def __init__(
        self, x_vector: ArrayLike, codes: ArrayLike | None = None, text: str | None = None
    ) -> None:
        """Checks the values. Arrays are not copied; tensors on the CPU are arrays as well.

        Args:
            x_vector: As the attribute.
            codes: As the attribute.
            text: As the attribute.

        Raises:
            VoiceError: An array has an unexpected shape, dtype or value, or the recording is too
                long for a prompt.
            TextError: The transcript is not Unicode text.
        """
        if (codes is None) != (text is None):
            raise VoiceError(
                "A voice has both codes and a transcript of its recording, or neither."
            )
        object.__setattr__(self, "x_vector", _check_x_vector(x_vector))
        object.__setattr__(self, "codes", None if codes is None else _check_codes(codes))
        if text is not None:
            check_text(text)
        object.__setattr__(self, "text", text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the voice to a safetensors file.

        Args:
            path: A regular file, which is replaced and keeps its mode, or a new file.

        Raises:
            VoiceError: The file cannot be written.
        """
        tensors: dict[str, NDArray[Any]] = {"x_vector": np.ascontiguousarray(self.x_vector)}
        metadata = {"format": _FORMAT}
        if self.codes is not None and self.text is not None:
            tensors["codes"] = np.ascontiguousarray(self.codes)
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
        file = Path(path)
        try:
            if file.is_dir():
                raise VoiceError(f"{file} is a folder; name a voice file, which Voice.save writes.")
            if not file.is_file():
                raise VoiceError(
                    f"{file} does not exist or is no file; a cloned voice is saved to a voice file."
                )
            if file.stat().st_size > _MAX_FILE_BYTES:
                raise VoiceError(
                    f"{file} is no voice file: it is larger than {_MAX_FILE_BYTES >> 20} MiB."
                )
            with safe_open(str(file), framework="np") as stored:
                metadata = stored.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise VoiceError(f"{file} is no voice file: no voice was saved to it.")
                names = set(stored.keys())
                for name in names & _STORED_TYPES.keys():  # numpy lacks some of the types
                    if stored.get_slice(name).get_dtype() != _STORED_TYPES[name]:
                        raise VoiceError(f"{file}: a voice's {name} {_EXPECTED[name]}")
                x_vector = stored.get_tensor("x_vector")
                codes = stored.get_tensor("codes") if "codes" in names else None
        except (SafetensorError, OSError) as error:
            raise VoiceError(f"{file} is no voice file ({error}).") from error
        try:
            return Voice(x_vector, codes, metadata.get("text"))
        except (TextError, VoiceError) as error:
            raise VoiceError(f"{file}: {error}") from error


def _check_x_vector(values: ArrayLike) -> NDArray[np.float32]:
    x_vector = _array(values)
    if not (x_vector.ndim == 1 and len(x_vector) > 0 and x_vector.dtype == np.float32):
        raise VoiceError(f"A voice's x_vector {_EXPECTED['x_vector']}")
    if not (np.abs(x_vector) <= _MAX_MAGNITUDE).all():  # false for NaN
        raise VoiceError(
            "The voice's x_vector holds NaN, infinity or very large values; clone the voice again."
        )
    return x_vector


def _check_codes(values: ArrayLike) -> NDArray[np.int64]:
    codes = _array(values)
    if not (codes.ndim == 2 and 0 not in codes.shape and codes.dtype == np.int64):
        raise VoiceError(f"A voice's codes {_EXPECTED['codes']}")
    if len(codes) >= MAX_POSITIONS:
        raise VoiceError(
            f"The voice's recording has {len(codes):,} frames, and a prompt has at most "
            f"{MAX_POSITIONS:,} positions; clone the voice from a shorter recording."
        )
    if not 0 <= codes.min() <= codes.max() < _MAX_CODE:
        raise VoiceError(
            f"The voice's codes must be from 0 to {_MAX_CODE - 1:,}; clone the voice again."
        )
    return codes


def _array(values: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise VoiceError(f"A voice's x_vector and codes must be arrays ({error}).") from error
