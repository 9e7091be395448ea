"""One step of recognition: the next chunk of several streams, from features to tokens.

`Recognition` is the progress of one stream, or of a fork of it that ends earlier. A `Recogniser`
computes the next chunk of several of them, which may be at different phases.
"""

import copy
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_stt.errors import AudioError
from megakernel_stt.model.checkpoint import Model
from megakernel_stt.model.config import FRAME_S, HOP_SIZE, MELS_PER_FRAME, SAMPLE_RATE
from megakernel_stt.network.encoder import (
    ENDLESS,
    FIRST_PADDING,
    EncoderState,
    OfflineEncoder,
    StreamingEncoder,
    num_frames,
)
from megakernel_stt.network.features import normalized
from megakernel_stt.network.prompt import add_prompt
from megakernel_stt.network.transducer import Emission, Transducer, TransducerState
from megakernel_stt.text.words import Token, TokenReader


class Recognition:
    """The progress of one stream. Tensors and tuples are replaced, never changed in place.

    Attributes:
        prompt: Index of the language.
        num_mels: Mel frames so far, those that are encoded included.
        num_frames: Frames that are decoded.
        ended: Whether no features follow.
        encoder: State of the encoder; None for an offline model.
        transducer: State of the decoder.
        tokens: What was recognised.
    """

    def __init__(
        self,
        mels: Tensor,
        encoder: EncoderState | None,
        transducer: TransducerState,
        reader: TokenReader,
        prompt: int,
    ) -> None:
        """Begins a stream.

        Args:
            mels: Features before the first.
            encoder: State of the encoder; None for an offline model.
            transducer: State of the decoder.
            reader: Converts decoded tokens.
            prompt: Index of the language.
        """
        self.prompt = prompt
        self._mels = (mels,)
        self.num_mels = 0
        self.num_frames = 0
        self.ended = False
        self.encoder = encoder
        self.transducer = transducer
        self.tokens: tuple[Token, ...] = ()
        self._reader = reader

    @property
    def mels(self) -> Tensor:
        """[frames, bins], features that are not encoded yet."""
        if len(self._mels) > 1:
            self._mels = (torch.cat(self._mels),)
        return self._mels[0]

    def add(self, mels: Tensor) -> None:
        """Adds features [frames, bins]. They are copied when `mels` is read, not at each call."""
        if len(mels):
            self._mels = (*self._mels, mels)
            self.num_mels += len(mels)

    def ending(self, mels: Tensor) -> "Recognition":
        """A fork that ends after some more features [frames, bins]."""
        fork = copy.copy(self)
        fork.add(mels)
        fork.ended = True
        return fork

    def advance(
        self,
        num_mels: int,
        num_frames: int,
        encoder: EncoderState | None,
        transducer: TransducerState,
        found: Sequence[Emission],
    ) -> None:
        """Moves behind a chunk.

        Args:
            num_mels: Features that it takes.
            num_frames: Its frames.
            encoder: State after it.
            transducer: State after it.
            found: Its tokens.
        """
        self._mels = (self.mels[num_mels:],)
        self.num_frames += num_frames
        self.encoder, self.transducer = encoder, transducer
        if found:
            self._reader, tokens = self._reader.read(found)
            self.tokens = (*self.tokens, *tokens)


class Recogniser(Protocol):
    """Computes the chunks of streams of one kind."""

    @property
    def chunk_s(self) -> float | None:
        """Seconds of audio of a chunk; None if the recording is one chunk."""

    def start(self, prompt: int) -> Recognition:
        """A new stream, with the index of its language."""
        ...

    def is_ready(self, recognition: Recognition) -> bool:
        """Whether a stream has a chunk to compute."""
        ...

    def check_length(self, recognition: Recognition) -> None:
        """Checks that the model takes as much audio as a stream has.

        Raises:
            AudioError: It is longer than the model's positions.
        """

    def step(self, recognitions: Sequence[Recognition]) -> None:
        """Computes the next chunk of each stream, all of which are ready.

        No stream is changed if it raises.
        """


class StreamingRecogniser:
    """A cache-aware model with one lookahead."""

    def __init__(self, model: Model, transducer: Transducer, lookahead: int) -> None:
        """Prepares the encoder.

        Args:
            model: The model.
            transducer: Its decoder.
            lookahead: Frames of a chunk after its first.
        """
        self._encoder = StreamingEncoder(model.weights.encoder, model.config.encoder, lookahead)
        self._transducer = transducer
        self._model = model
        self._reader = TokenReader(model.tokenizer, model.config.transducer.durations is not None)

    @property
    def chunk_s(self) -> float:
        """Seconds of audio of a chunk."""
        return self._encoder.chunk_size * FRAME_S

    def start(self, prompt: int) -> Recognition:
        """A new stream, with the index of its language."""
        padding = torch.zeros(FIRST_PADDING, self._model.config.encoder.num_mels)
        encoder, transducer = self._encoder.start(), self._transducer.start()
        return Recognition(padding, encoder, transducer, self._reader, prompt)

    def is_ready(self, recognition: Recognition) -> bool:
        """Whether a stream has a whole chunk, or its last one."""
        if recognition.ended:
            return _num_left(recognition) > 0
        return len(recognition.mels) >= self._encoder.num_mels

    def check_length(self, recognition: Recognition) -> None:
        """Does nothing: a stream may have any length."""

    def step(self, recognitions: Sequence[Recognition]) -> None:
        """Computes the next chunk of each stream, all of which are ready."""
        config, weights = self._model.config, self._model.weights
        size = self._encoder.num_mels
        chunks = [F.pad(r.mels[:size], (0, 0, 0, max(size - len(r.mels), 0))) for r in recognitions]
        like = weights.encoder.subsampling.linear.weight
        mels = torch.stack(chunks).to(like)
        lengths = [r.num_mels if r.ended else ENDLESS for r in recognitions]
        state = EncoderState.join([r.encoder for r in recognitions if r.encoder is not None])
        lengths = torch.tensor(lengths, device=like.device)
        frames, encoded = self._encoder.encode(mels, lengths, state)
        if weights.prompt is not None and config.prompt is not None:
            prompts = torch.tensor([r.prompt for r in recognitions], device=like.device)
            frames = add_prompt(weights.prompt, frames, prompts, config.prompt.num_prompts)
        chunk_size = self._encoder.chunk_size
        counts = [min(_num_left(r), chunk_size) if r.ended else chunk_size for r in recognitions]
        before = TransducerState.join([r.transducer for r in recognitions])
        found, decoded = self._transducer.decode(frames, counts, before)
        encoders, transducers = encoded.split(), decoded.split()
        for i, recognition in enumerate(recognitions):
            recognition.advance(size, counts[i], encoders[i], transducers[i], found[i])


class OfflineRecogniser:
    """A model that sees the whole recording, and recognises nothing before its end."""

    def __init__(self, model: Model, transducer: Transducer) -> None:
        """Prepares the encoder.

        Args:
            model: The model.
            transducer: Its decoder.
        """
        self._encoder = OfflineEncoder(model.weights.encoder, model.config.encoder)
        self._transducer = transducer
        self._model = model
        self._reader = TokenReader(model.tokenizer, model.config.transducer.durations is not None)

    @property
    def chunk_s(self) -> None:
        """The recording is one chunk."""

    def start(self, prompt: int) -> Recognition:
        """A new stream; the model has no prompt."""
        nothing = torch.zeros(0, self._model.config.encoder.num_mels)
        return Recognition(nothing, None, self._transducer.start(), self._reader, prompt)

    def is_ready(self, recognition: Recognition) -> bool:
        """Whether a stream has ended and has features."""
        return recognition.ended and len(recognition.mels) > 0

    def check_length(self, recognition: Recognition) -> None:
        """Checks that the model takes as much audio as a recording has.

        Raises:
            AudioError: It is longer than the model's positions.
        """
        limit = self._model.config.encoder.max_frames * MELS_PER_FRAME
        if recognition.num_mels > limit:
            raise AudioError(
                f"The audio is longer than {limit * HOP_SIZE / SAMPLE_RATE:.0f} s, the longest "
                "that this offline model takes; divide it, or load a streaming model."
            )

    def step(self, recognitions: Sequence[Recognition]) -> None:
        """Recognises whole recordings, one after the other. No one is changed if it raises.

        Raises:
            AudioError: One is longer than the model's positions.
        """
        for recognition in recognitions:
            self.check_length(recognition)
        results = [self._recognise(recognition) for recognition in recognitions]
        for recognition, (size, after, found) in zip(recognitions, results, strict=True):
            recognition.advance(recognition.num_mels, size, None, after, found)

    def _recognise(
        self, recognition: Recognition
    ) -> tuple[int, TransducerState, Sequence[Emission]]:
        """The frames of a recording, the decoder's state after it, and its tokens."""
        like = self._model.weights.encoder.subsampling.linear.weight
        frames = self._encoder.encode(normalized(recognition.mels).to(like))
        counts = [frames.shape[1]]
        found, after = self._transducer.decode(frames, counts, recognition.transducer)
        return counts[0], after, found[0]


def _num_left(recognition: Recognition) -> int:
    """Frames of a stream that ends that are not decoded yet."""
    return num_frames(recognition.num_mels) - recognition.num_frames
