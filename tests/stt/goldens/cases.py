"""What transformers computes from tiny recognisers; shared by `make.py` and the tests."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_stt.model.random_checkpoint import Kind

FILE = Path(__file__).parent / "transformers.npz"


@dataclass(frozen=True)
class Case:
    """Recordings for one model with one lookahead; blanks are more or less likely."""

    kind: Kind
    lookahead: int | None
    blank_bias: float
    bias: bool = False

    @property
    def name(self) -> str:
        """Of its arrays in the file."""
        return f"{self.kind}-{self.lookahead}-{self.blank_bias:.0f}"


SATURATED, USUAL, BLANK_ONLY = -30.0, 11.0, 100.0
LENGTHS = (1, 2, 9, 10, 47, 130)  # mel frames
CASES = (
    *(Case("streaming", lookahead, USUAL) for lookahead in (0, 1, 3, 6, 13)),
    Case("streaming", 1, SATURATED),
    Case("streaming", 1, BLANK_ONLY),
    Case("multilingual", 3, 8.0, bias=True),
    Case("rnnt", None, 7.0, bias=True),
    Case("rnnt", None, SATURATED, bias=True),
    Case("tdt", None, 2.0, bias=True),
)
PROMPT = 3  # transformers' default of the multilingual model


def mels(length: int) -> Tensor:
    """Random features [length, 128]."""
    values = np.random.RandomState(length).standard_normal((length, 128))
    return torch.from_numpy(values.astype(np.float32))


def audio(seconds: float = 0.6) -> NDArray[np.float32]:
    """Noise whose level rises and falls, with a silent part, at 16 kHz."""
    count = int(16_000 * seconds) + 77
    noise = np.random.RandomState(0).standard_normal(count) * 0.3
    envelope = np.maximum(np.sin(np.linspace(0.0, 9.0, count)), 0.0)
    return (noise * envelope).astype(np.float32)
