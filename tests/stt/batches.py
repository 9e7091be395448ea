"""Ragged batches of frames for decoders."""

import torch
from torch import Tensor

from megakernel_stt.network.transducer import Emission, Transducer, TransducerState


def random_frames(length: int, seed: int = 0) -> Tensor:
    """Frames [length, 32] of an encoder."""
    return torch.randn(length, 32, generator=torch.Generator().manual_seed(97 * seed + length))


def decode(
    transducer: Transducer, frames: list[Tensor], states: list[TransducerState] | None = None
) -> tuple[list[list[Emission]], list[TransducerState]]:
    """Decodes a ragged batch of streams, which begin unless `states` are given."""
    states = states or [transducer.start() for _ in frames]
    batch = torch.nn.utils.rnn.pad_sequence(frames, batch_first=True)
    found, after = transducer.decode(batch, [len(f) for f in frames], TransducerState.join(states))
    return found, after.split()


def triples(emissions: list[Emission]) -> list[tuple[int, int, int]]:
    """Token, frame and duration of every token."""
    return [(e.token, e.frame, e.duration) for e in emissions]


def padded(frames: list[Tensor]) -> tuple[Tensor, list[int]]:
    """Frames [batch, frames, in], one at least, which NeMo requires; and the lengths."""
    batch = torch.nn.utils.rnn.pad_sequence([*frames, frames[0].new_zeros(1, 32)], batch_first=True)
    return batch[:-1], [len(f) for f in frames]
