"""Ragged batches that NeMo's decoders decode; shared by `make_nemo.py` and the tests."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megakernel_stt.model.checkpoint import Model
from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.model.random_checkpoint import Kind
from megakernel_stt.model.weights import TransducerWeights

FILE = Path(__file__).parent / "nemo.npz"
BATCHES = {"rnnt": 100, "tdt": 50}  # of each decoding: 500 of RNN-T, and 500 of TDT
NUM_RECORDED = 2  # of them, the first ones


@dataclass(frozen=True)
class Decoding:
    """A decoder and its ragged batches.

    Attributes:
        kind: `rnnt` or `tdt`.
        blank_bias: Added to the logit of blank.
        max_symbols: Tokens of a frame.
        durations: Of a TDT.
    """

    kind: Kind
    blank_bias: float
    max_symbols: int = 10
    durations: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Of its arrays in the file."""
        durations = "".join(map(str, self.durations or ()))
        return f"{self.kind}{durations}-{self.blank_bias:.0f}-{self.max_symbols}"

    def decoder(self, model: Model) -> tuple[TransducerWeights, TransducerConfig]:
        """The tensors of a model with the same kind and bias, with the decoding's durations."""
        weights, config = model.weights.transducer, model.config.transducer
        config = replace(config, max_symbols=self.max_symbols, durations=self.durations)
        count = config.vocab_size + len(self.durations or ())
        assert weights.head.bias is not None
        head = replace(
            weights.head, weight=weights.head.weight[:count], bias=weights.head.bias[:count]
        )
        return replace(weights, head=head), config

    def batches(self, count: int) -> Iterator[list[Tensor]]:
        """So many batches of frames [frames, 32]; one recording of each, or all, have none."""
        generator = np.random.RandomState(sum(self.name.encode()))
        for i in range(count):
            lengths = generator.randint(0, 13, generator.randint(1, 6))
            if i % 10 == 1:
                lengths[:] = 0
            lengths = np.insert(lengths, generator.randint(len(lengths) + 1), 0)
            values = [generator.standard_normal((length, 32)) for length in lengths]
            yield [torch.from_numpy(value.astype(np.float32)) for value in values]


SATURATED, BLANK_ONLY = -100.0, 100.0
_RELEASED = (0, 1, 2, 3, 4)  # durations of the released model
DECODINGS = (
    *(Decoding("rnnt", bias) for bias in (SATURATED, 6.0, 9.0, 12.0, BLANK_ONLY)),
    *(Decoding("tdt", bias, 10, _RELEASED) for bias in (SATURATED, 4.0, 7.0, 10.0, BLANK_ONLY)),
    Decoding("tdt", SATURATED, 10, (0,)),
    Decoding("tdt", 4.0, 3, (0,)),
    Decoding("tdt", 4.0, 1, (0, 1)),
    Decoding("tdt", 4.0, 3, (3, 0, 2)),
    Decoding("tdt", 7.0, 3, (4, 1)),
)
