"""What a cloned voice is: an x-vector, and the recording's codes with its transcript."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel_tts.errors import VoiceError

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = "megakernel-tts-voice-1"


@dataclass(frozen=True, eq=False)
class Voice:
    """A voice cloned from a recording.

    With a transcript the model continues the recording (in-context reference); without one it has
    the x-vector alone.

    Attributes:
        x_vector: [hidden], float32.
        codes: [frames, groups], int64: the recording; None without a transcript.
        text: The transcript; None without one.
    """

    x_vector: "Tensor"
    codes: "Tensor | None" = None
    text: str | None = None

    def __post_init__(self) -> None:
        if (self.codes is None) != (self.text is None):
            raise VoiceError(
                "A voice has both codes and a transcript of its recording, or neither."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the voice to one safetensors file."""
        from safetensors.torch import save_file

        tensors = {"x_vector": self.x_vector.float().contiguous()}
        metadata = {"format": _FORMAT}
        if self.codes is not None and self.text is not None:
            tensors["codes"] = self.codes.contiguous()
            metadata["text"] = self.text
        save_file(tensors, os.fspath(path), metadata=metadata)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Voice":
        """Reads a voice that `save` wrote.

        Raises:
            VoiceError: No such file, or none that `save` wrote.
        """
        import torch
        from safetensors import SafetensorError, safe_open

        file = Path(path)
        if not file.is_file():
            raise VoiceError(
                f"{file} does not exist; a voice file is made by TTS.clone and Voice.save."
            )
        try:
            with safe_open(str(file), framework="pt") as stored:
                metadata = stored.metadata() or {}
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        except (SafetensorError, OSError) as error:
            raise VoiceError(f"{file} is no voice file ({error}).") from error
        x_vector, codes = tensors.get("x_vector"), tensors.get("codes")
        ok = metadata.get("format") == _FORMAT and x_vector is not None and x_vector.ndim == 1
        ok = ok and (codes is None or (codes.ndim == 2 and codes.dtype == torch.int64))
        if not ok or (codes is None) != ("text" not in metadata):
            raise VoiceError(f"{file} is no voice file: Voice.save did not write it.")
        assert x_vector is not None
        return Voice(x_vector, codes, metadata.get("text"))
