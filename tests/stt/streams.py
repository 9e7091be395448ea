"""Streams without an engine, for comparisons."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_stt.engine.recogniser import (
    OfflineRecogniser,
    Recogniser,
    Recognition,
    StreamingRecogniser,
)
from megakernel_stt.model.checkpoint import Model
from megakernel_stt.network.encoder import ENDLESS, FIRST_PADDING, StreamingEncoder, num_frames
from megakernel_stt.network.transducer import Transducer


def packets(frames: Tensor, seed: int) -> list[Tensor]:
    """Divides features [frames, ...] into packets of 0 to 40 frames."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(0, 41, len(frames) + 1)
    ends = np.minimum(np.cumsum(sizes), len(frames))
    return list(torch.tensor_split(frames, ends.tolist()))


def recognise(
    recogniser: Recogniser, packets: Iterable[Tensor], prompt: int = 0
) -> Recognition[Any]:
    """Runs one stream, solo, to its end.

    Args:
        recogniser: Of the model.
        packets: Features [frames, bins].
        prompt: Index of the language.
    """
    stream = recogniser.start(prompt)
    for packet in packets:
        stream.add(packet)
        run(recogniser, stream)
    last = stream.ending(torch.zeros(0, stream.mels.shape[1]))
    run(recogniser, last)
    return last


def run(recogniser: Recogniser, stream: Recognition[Any]) -> None:
    """Computes the chunks that a stream has."""
    with torch.inference_mode():
        while recogniser.is_ready(stream):
            recogniser.step([stream])


def ids(stream: Recognition[Any]) -> list[int]:
    """The tokens of a stream."""
    return [token.id for token in stream.tokens]


def make_recogniser(model: Model, lookahead: int | None) -> Recogniser:
    """A recogniser of a model; `lookahead` is None for an offline one."""
    transducer = Transducer(model.weights.transducer, model.config.transducer)
    if lookahead is None:
        return OfflineRecogniser(model, transducer)
    return StreamingRecogniser(model, transducer, lookahead)


def encode(model: Model, mels: Tensor, lookahead: int) -> Tensor:
    """Encodes a whole recording [mel frames, bins] chunk by chunk; returns [frames, hidden]."""
    encoder = StreamingEncoder(model.weights.encoder, model.config.encoder, lookahead)
    padded, state = F.pad(mels, (0, 0, FIRST_PADDING, 0)), encoder.start()
    frames = []
    for chunk in padded.split(encoder.num_mels):
        missing = encoder.num_mels - len(chunk)
        length = torch.tensor([len(mels) if missing else ENDLESS])
        out, state = encoder.encode(F.pad(chunk, (0, 0, 0, missing))[None], length, state)
        frames.append(out[0])
    return torch.cat(frames)[: num_frames(len(mels))]


def decode(model: Model, frames: Tensor) -> list[int]:
    """Decodes the frames [frames, hidden] of a whole recording to tokens."""
    transducer = Transducer(model.weights.transducer, model.config.transducer)
    with torch.inference_mode():
        found, _ = transducer.decode(frames[None], [len(frames)], transducer.start())
    return [emission.token for emission in found[0]]
