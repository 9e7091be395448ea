"""Streams without an engine, for comparisons."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megakernel_stt.engine.recogniser import (
    OfflineRecogniser,
    Recogniser,
    Recognition,
    StreamingRecogniser,
)
from megakernel_stt.model.checkpoint import Model
from megakernel_stt.model.config import HOP_SIZE
from megakernel_stt.network.encoder import ENDLESS, NUM_MISSING, StreamingEncoder, num_frames
from megakernel_stt.network.prompt import add_prompt
from megakernel_stt.network.transducer import Transducer
from tests.stt.sessions import RATE
from tests.stt.sessions import noise as audio_noise

NOTHING = np.zeros(0, np.float32)


def sound(num_mels: int, seed: int) -> NDArray[np.float32]:
    """Samples of noise whose level changes, as many as so many mel frames."""
    return audio_noise(num_mels * HOP_SIZE / RATE, seed).astype(np.float32) / np.float32(32768)


def packets(samples: NDArray[np.float32], seed: int) -> list[NDArray[np.float32]]:
    """Divides samples into packets of 0 to 0.4 s."""
    generator = np.random.default_rng(seed)
    ends = np.cumsum(generator.integers(0, 6400, 1 + len(samples) // 1000))
    return np.split(samples, np.minimum(ends, len(samples)))


def recognise(
    recogniser: Recogniser, packets: Iterable[NDArray[np.float32]], prompt: int = 0
) -> Recognition[Any]:
    """Runs one stream, solo, to its end.

    Args:
        recogniser: Of the model.
        packets: Samples.
        prompt: Index of the language.
    """
    stream = recogniser.start(prompt)
    for packet in packets:
        stream.add(packet)
        run(recogniser, stream)
    last = stream.fork_ended(NOTHING)
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
    # Mel frames outside of the recording do not matter.
    padded, state = F.pad(mels, (0, 0, NUM_MISSING, 0), value=5.0), encoder.start()
    frames = []
    for chunk in padded.split(encoder.num_mels):
        missing = encoder.num_mels - len(chunk)
        length = torch.tensor([len(mels) if missing else ENDLESS])
        out, state = encoder.encode(
            F.pad(chunk, (0, 0, 0, missing), value=5.0)[None], length, state
        )
        frames.append(out[0])
    return torch.cat(frames)[: num_frames(len(mels))]


def with_prompt(model: Model, frames: Tensor, prompt: int) -> Tensor:
    """Merges a language into frames [frames, hidden], if the model has a language prompt."""
    config, weights = model.config.prompt, model.weights.prompt
    if weights is None or config is None:
        return frames
    return add_prompt(weights, frames[None], torch.tensor([prompt]), config.num_prompts)[0]


def decode(model: Model, frames: Tensor) -> list[int]:
    """Decodes the frames [frames, hidden] of a whole recording to tokens."""
    transducer = Transducer(model.weights.transducer, model.config.transducer)
    with torch.inference_mode():
        found, _ = transducer.decode(frames[None], [len(frames)], transducer.start())
    return [emission.token for emission in found[0]]
