"""One step of recognition: the next chunk of several streams, from features to tokens.

`Recognition` is the progress of one stream, or of a fork of it that ends earlier. A `Recogniser`
computes the next chunk of several of them, which may be at different phases.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.layers import exact_convolutions
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

State = TypeVar("State")


class Recognition(Generic[State]):
    """The progress of one stream. Its state is replaced, never changed in place.

    Attributes:
        prompt: Index of the language.
        num_mels: Mel frames so far, those that are encoded included.
        num_waiting: Mel frames whose samples have arrived and that are computed before its step.
        num_frames: Frames that are decoded.
        ended: Whether no features follow.
        state: State of encoder and decoder, of its recogniser's kind.
        tokens: What was recognised.
    """

    def __init__(self, mels: Tensor, state: State, reader: TokenReader, prompt: int) -> None:
        """Begins a stream.

        Args:
            mels: Features before the first.
            state: State of encoder and decoder.
            reader: Converts decoded tokens.
            prompt: Index of the language.
        """
        self.prompt = prompt
        self._mels = (mels,)
        self.num_mels = 0
        self.num_waiting = 0
        self.num_frames = 0
        self.ended = False
        self.state = state
        self.tokens: tuple[Token, ...] = ()
        self._reader = reader

    @property
    def mels(self) -> Tensor:
        """[mel frames, bins], features that are not encoded yet."""
        if len(self._mels) > 1:
            self._mels = (torch.cat(self._mels),)
        return self._mels[0]

    def add(self, mels: Tensor) -> None:
        """Adds features [mel frames, bins], which are copied when `mels` is read."""
        if len(mels):
            self._mels = (*self._mels, mels)
            self.num_mels += len(mels)

    def ending(self, mels: Tensor) -> "Recognition[State]":
        """A fork that ends after some more features [mel frames, bins]."""
        fork = copy.copy(self)
        fork.add(mels)
        fork.ended = True
        return fork

    def advance(
        self, num_mels: int, num_frames: int, state: State, found: Sequence[Emission]
    ) -> None:
        """Moves behind a chunk.

        Args:
            num_mels: Features that it takes.
            num_frames: Its frames.
            state: State after it.
            found: Its tokens.
        """
        self._mels = (self.mels[num_mels:],)
        self.num_frames += num_frames
        self.state = state
        if found:
            self._reader, tokens = self._reader.read(found)
            self.tokens = (*self.tokens, *tokens)


class Recogniser(Protocol):
    """Computes the chunks of streams of one kind."""

    @property
    def chunk_s(self) -> float | None:
        """Seconds of audio of a chunk; None if the recording is one chunk."""

    def start(self, prompt: int) -> Recognition[Any]:
        """A new stream, with the index of its language."""
        ...

    def is_ready(self, recognition: Recognition[Any]) -> bool:
        """Whether a stream has a chunk to compute."""
        ...

    def check_length(self, recognition: Recognition[Any]) -> None:
        """Checks that the model takes as much audio as a stream has.

        Raises:
            AudioError: It is longer than the model's positions.
        """

    def step(self, recognitions: Sequence[Recognition[Any]]) -> None:
        """Computes the next chunk of each stream, all of which are ready.

        No stream is changed if it raises.
        """


@dataclass(frozen=True)
class Chunks:
    """The next chunk of several streams, on the host.

    Attributes:
        mels: float32 [streams, mel frames, bins].
        lengths: Mel frames in all of a stream that ends in the chunk, otherwise `ENDLESS`.
        counts: Frames of every stream.
        firsts: Index of every stream's first frame.
        prompts: Index of every stream's language.
    """

    mels: Tensor
    lengths: list[int]
    counts: list[int]
    firsts: list[int]
    prompts: list[int]


class ChunkRecogniser(ABC, Generic[State]):
    """A cache-aware model with one lookahead, whatever its states are.

    Attributes:
        encoder: Its encoder.
    """

    def __init__(self, model: Model, encoder: StreamingEncoder) -> None:
        """Prepares the tokens.

        Args:
            model: The model.
            encoder: Its encoder.
        """
        self.encoder = encoder
        self._model = model
        self._reader = TokenReader(model.tokenizer, model.config.transducer.durations is not None)

    @abstractmethod
    def start_state(self) -> State:
        """The state of a stream before its first chunk."""

    @abstractmethod
    def compute(
        self, chunks: Chunks, states: list[State]
    ) -> tuple[list[State], list[list[Emission]]]:
        """Computes chunks.

        Args:
            chunks: The next chunk of every stream.
            states: State of every stream, which is not changed.

        Returns:
            The states after the chunks, and their tokens.
        """

    @property
    def chunk_s(self) -> float:
        """Seconds of audio of a chunk."""
        return self.encoder.chunk_size * FRAME_S

    def start(self, prompt: int) -> Recognition[State]:
        """A new stream, with the index of its language."""
        padding = torch.zeros(FIRST_PADDING, self._model.config.encoder.num_mels)
        return Recognition(padding, self.start_state(), self._reader, prompt)

    def is_ready(self, recognition: Recognition[State]) -> bool:
        """Whether a stream has a whole chunk, or its last one."""
        if recognition.ended:
            return _num_left(recognition) > 0
        return len(recognition.mels) + recognition.num_waiting >= self.encoder.num_mels

    def check_length(self, recognition: Recognition[State]) -> None:
        """Does nothing: a stream may have any length."""

    def step(self, recognitions: Sequence[Recognition[State]]) -> None:
        """Computes the next chunk of each stream, all of which are ready."""
        size, chunk_size = self.encoder.num_mels, self.encoder.chunk_size
        mels = [r.mels[:size] for r in recognitions]
        mels = [m if len(m) == size else F.pad(m, (0, 0, 0, size - len(m))) for m in mels]
        chunks = Chunks(
            torch.stack(mels),
            [r.num_mels if r.ended else ENDLESS for r in recognitions],
            [min(_num_left(r), chunk_size) if r.ended else chunk_size for r in recognitions],
            [r.num_frames for r in recognitions],
            [r.prompt for r in recognitions],
        )
        states, found = self.compute(chunks, [r.state for r in recognitions])
        for i, recognition in enumerate(recognitions):
            recognition.advance(size, chunks.counts[i], states[i], found[i])

    def encode(
        self, mels: Tensor, lengths: Tensor, prompts: Tensor, state: EncoderState
    ) -> tuple[Tensor, EncoderState]:
        """Encodes a chunk, the language included; see `StreamingEncoder.encode`."""
        with exact_convolutions(mels.device):
            frames, after = self.encoder.encode(mels, lengths, state)
        return self.with_prompts(frames, prompts), after

    def with_prompts(self, frames: Tensor, prompts: Tensor) -> Tensor:
        """Merges the languages into frames, if the model has a language prompt.

        Args:
            frames: [batch, frames, hidden].
            prompts: [batch] int64, index of every stream's language.
        """
        config, weights = self._model.config.prompt, self._model.weights.prompt
        if weights is None or config is None:
            return frames
        return add_prompt(weights, frames, prompts, config.num_prompts)


class StreamingRecogniser(ChunkRecogniser[tuple[EncoderState, TransducerState]]):
    """A recogniser in torch, whose states are tensors."""

    def __init__(self, model: Model, transducer: Transducer, lookahead: int) -> None:
        """Prepares the encoder.

        Args:
            model: The model.
            transducer: Its decoder.
            lookahead: Frames of a chunk after its first.
        """
        weights, config = model.weights.encoder, model.config.encoder
        super().__init__(model, StreamingEncoder(weights, config, lookahead))
        self._transducer = transducer

    def start_state(self) -> tuple[EncoderState, TransducerState]:
        """The state of a stream before its first chunk."""
        return self.encoder.start(), self._transducer.start()

    def compute(
        self, chunks: Chunks, states: list[tuple[EncoderState, TransducerState]]
    ) -> tuple[list[tuple[EncoderState, TransducerState]], list[list[Emission]]]:
        """Computes chunks; see `ChunkRecogniser.compute`."""
        like = self._model.weights.encoder.subsampling.linear.weight
        encoders, transducers = zip(*states, strict=True)
        frames, encoded = self.encode(
            chunks.mels.to(like),
            torch.tensor(chunks.lengths, device=like.device),
            torch.tensor(chunks.prompts, device=like.device),
            EncoderState.join([*encoders]),
        )
        before = TransducerState.join([*transducers])
        found, decoded = self._transducer.decode(frames, chunks.counts, before)
        return [*zip(encoded.split(), decoded.split(), strict=True)], found


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

    def start(self, prompt: int) -> Recognition[TransducerState]:
        """A new stream; the model has no prompt."""
        nothing = torch.zeros(0, self._model.config.encoder.num_mels)
        return Recognition(nothing, self._transducer.start(), self._reader, prompt)

    def is_ready(self, recognition: Recognition[TransducerState]) -> bool:
        """Whether a stream has ended and has features."""
        return recognition.ended and len(recognition.mels) > 0

    def check_length(self, recognition: Recognition[TransducerState]) -> None:
        """Checks that the model takes as much audio as a recording has.

        Raises:
            AudioError: It is longer than the model's positions.
        """
        limit = self._model.config.encoder.max_frames * MELS_PER_FRAME
        if recognition.num_mels + recognition.num_waiting > limit:
            raise AudioError(
                f"The audio is longer than {limit * HOP_SIZE / SAMPLE_RATE:.0f} s, the longest "
                "that this offline model takes; divide it, or load a streaming model."
            )

    def step(self, recognitions: Sequence[Recognition[TransducerState]]) -> None:
        """Recognises whole recordings, one after the other. No one is changed if it raises.

        Raises:
            AudioError: One is longer than the model's positions.
        """
        for recognition in recognitions:
            self.check_length(recognition)
        results = [self._recognise(recognition) for recognition in recognitions]
        for recognition, (size, after, found) in zip(recognitions, results, strict=True):
            recognition.advance(recognition.num_mels, size, after, found)

    def _recognise(
        self, recognition: Recognition[TransducerState]
    ) -> tuple[int, TransducerState, Sequence[Emission]]:
        """The frames of a recording, the decoder's state after it, and its tokens."""
        like = self._model.weights.encoder.subsampling.linear.weight
        frames = self._encoder.encode(normalized(recognition.mels).to(like))
        counts = [frames.shape[1]]
        found, after = self._transducer.decode(frames, counts, recognition.state)
        return counts[0], after, found[0]


def _num_left(recognition: Recognition[Any]) -> int:
    """Frames of a stream that ends that are not decoded yet."""
    return num_frames(recognition.num_mels) - recognition.num_frames
