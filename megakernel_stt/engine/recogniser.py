"""One step of recognition: the next chunk of several streams, from samples to tokens.

`Recognition` is the progress of one stream, or of a fork of it that ends earlier. A `Recogniser`
computes the next chunk of several of them, which may be at different phases.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.layers import exact_convolutions
from megakernel_stt.engine.samples import Pieces, SampleQueue, copy_to, size_of
from megakernel_stt.errors import AudioError
from megakernel_stt.model.checkpoint import Model
from megakernel_stt.model.config import FRAME_S, HOP_SIZE, MELS_PER_FRAME, SAMPLE_RATE
from megakernel_stt.network.encoder import (
    ENDLESS,
    NUM_MISSING,
    EncoderState,
    OfflineEncoder,
    StreamingEncoder,
    num_frames,
)
from megakernel_stt.network.features import (
    PAST_SIZE,
    LogMel,
    complete_mels_of,
    mels_of,
    normalized,
    samples_of,
    samples_until,
)
from megakernel_stt.network.prompt import add_prompt
from megakernel_stt.network.transducer import Emission, Transducer, TransducerState
from megakernel_stt.text.words import Token, TokenReader

State = TypeVar("State")
Features = Callable[[Tensor, Tensor], Tensor]  # of samples and their counts; see `LogMel`


class Recognition(Generic[State]):
    """The progress of one stream. Its state is replaced, never changed in place.

    Attributes:
        prompt: Index of the language.
        samples: Those that the mel frames of later chunks depend on.
        num_samples: Samples so far.
        num_frames: Frames that are decoded.
        ended: Whether no samples follow.
        state: State of encoder and decoder, of its recogniser's kind.
        tokens: What was recognised.
    """

    def __init__(self, num_before: int, state: State, reader: TokenReader, prompt: int) -> None:
        """Begins a stream.

        Args:
            num_before: Samples of zero before the first.
            state: State of encoder and decoder.
            reader: Converts decoded tokens.
            prompt: Index of the language.
        """
        self.prompt = prompt
        self.samples = SampleQueue(num_before)
        self.num_samples = 0
        self.num_frames = 0
        self.ended = False
        self.state = state
        self.tokens: tuple[Token, ...] = ()
        self._reader = reader

    @property
    def num_mels(self) -> int:
        """Mel frames so far: all if the stream has ended, else those that stay as they are."""
        return mels_of(self.num_samples) if self.ended else complete_mels_of(self.num_samples)

    def add(self, samples: NDArray[np.float32]) -> None:
        """Adds samples [samples] at 16 kHz, which nothing may change."""
        self.samples.add(samples)
        self.num_samples += len(samples)

    def fork_ended(self, samples: NDArray[np.float32]) -> "Recognition[State]":
        """A fork that ends after some more samples [samples]."""
        fork = copy.copy(self)
        fork.samples = self.samples.fork()
        fork.add(samples)
        fork.ended = True
        return fork

    def advance(
        self, num_samples: int, num_frames: int, state: State, found: Sequence[Emission]
    ) -> None:
        """Moves behind a chunk.

        Args:
            num_samples: Samples on which no later chunk depends.
            num_frames: Its frames.
            state: State after it.
            found: Its tokens.
        """
        self.samples.drop(num_samples)
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

    def missing_s(self, recognition: Recognition[Any]) -> float:
        """Seconds of audio that a stream lacks for its next chunk; 0 to get every packet."""
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
        samples: Of every stream; fewer than `samples_of` its mel frames where the stream ends.
        lengths: Mel frames in all of a stream that ends in the chunk, otherwise `ENDLESS`.
        counts: Frames of every stream.
        firsts: Index of every stream's first frame.
        prompts: Index of every stream's language.
    """

    samples: list[Pieces]
    lengths: list[int]
    counts: list[int]
    firsts: list[int]
    prompts: list[int]


class ChunkRecogniser(ABC, Generic[State]):
    """A cache-aware model with one lookahead, whatever its states are.

    Attributes:
        encoder: Its encoder.
        features: Its features.
    """

    def __init__(self, model: Model, encoder: StreamingEncoder, features: Features) -> None:
        """Prepares the tokens.

        Args:
            model: The model.
            encoder: Its encoder.
            features: Its features.
        """
        self.encoder = encoder
        self.features = features
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
        num_before = NUM_MISSING * HOP_SIZE + PAST_SIZE
        return Recognition(num_before, self.start_state(), self._reader, prompt)

    def is_ready(self, recognition: Recognition[State]) -> bool:
        """Whether a stream has a whole chunk, or its last one."""
        if recognition.ended:
            return _num_left(recognition) > 0
        end = recognition.num_frames + self.encoder.chunk_size
        return recognition.num_mels >= end * MELS_PER_FRAME - NUM_MISSING

    def missing_s(self, recognition: Recognition[State]) -> float:
        """Seconds of audio that a stream lacks for its next chunk."""
        end = recognition.num_frames + self.encoder.chunk_size
        needed = samples_until(end * MELS_PER_FRAME - NUM_MISSING)
        return max(needed - recognition.num_samples, 0) / SAMPLE_RATE

    def check_length(self, recognition: Recognition[State]) -> None:
        """Does nothing: a stream may have any length."""

    def step(self, recognitions: Sequence[Recognition[State]]) -> None:
        """Computes the next chunk of each stream, all of which are ready."""
        size, chunk_size = samples_of(self.encoder.num_mels), self.encoder.chunk_size
        chunks = Chunks(
            [r.samples.first(size) for r in recognitions],
            [r.num_mels if r.ended else ENDLESS for r in recognitions],
            [min(_num_left(r), chunk_size) if r.ended else chunk_size for r in recognitions],
            [r.num_frames for r in recognitions],
            [r.prompt for r in recognitions],
        )
        states, found = self.compute(chunks, [r.state for r in recognitions])
        num_samples = self.encoder.num_mels * HOP_SIZE
        for i, recognition in enumerate(recognitions):
            recognition.advance(num_samples, chunks.counts[i], states[i], found[i])

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
        encoder = StreamingEncoder(weights, config, lookahead)
        super().__init__(model, encoder, make_log_mel(model))
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
        rows = np.zeros((len(states), samples_of(self.encoder.num_mels)), np.float32)
        copy_to(rows, chunks.samples)
        counts = torch.tensor([size_of(pieces) for pieces in chunks.samples], device=like.device)
        mels = self.features(torch.from_numpy(rows).to(like.device), counts)
        frames, encoded = self.encode(
            mels.to(like.dtype),
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
        self._log_mel = make_log_mel(model)
        self._transducer = transducer
        self._model = model
        self._reader = TokenReader(model.tokenizer, model.config.transducer.durations is not None)

    @property
    def chunk_s(self) -> None:
        """The recording is one chunk."""

    def start(self, prompt: int) -> Recognition[TransducerState]:
        """A new stream; the model has no prompt."""
        return Recognition(0, self._transducer.start(), self._reader, prompt)

    def is_ready(self, recognition: Recognition[TransducerState]) -> bool:
        """Whether a stream has ended and is not recognised yet."""
        return recognition.ended and recognition.num_mels > 0 and not recognition.num_frames

    def missing_s(self, recognition: Recognition[TransducerState]) -> float:
        """Zero: the length of all audio is checked as it arrives."""
        return 0.0

    def check_length(self, recognition: Recognition[TransducerState]) -> None:
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

    def step(self, recognitions: Sequence[Recognition[TransducerState]]) -> None:
        """Recognises whole recordings, one after the other. No one is changed if it raises.

        Raises:
            AudioError: One is longer than the model's positions.
        """
        for recognition in recognitions:
            self.check_length(recognition)
        results = [self._recognise(recognition) for recognition in recognitions]
        for recognition, (size, after, found) in zip(recognitions, results, strict=True):
            recognition.advance(recognition.num_samples, size, after, found)

    def _recognise(
        self, recognition: Recognition[TransducerState]
    ) -> tuple[int, TransducerState, Sequence[Emission]]:
        """The frames of a recording, the decoder's state after it, and its tokens."""
        like = self._model.weights.encoder.subsampling.linear.weight
        mels = self._log_mel.recording(recognition.samples.all())
        frames = self._encoder.encode(normalized(mels).to(like))
        counts = [frames.shape[1]]
        found, after = self._transducer.decode(frames, counts, recognition.state)
        return counts[0], after, found[0]


def _num_left(recognition: Recognition[Any]) -> int:
    """Frames of a stream that ends that are not decoded yet."""
    return num_frames(recognition.num_mels) - recognition.num_frames


def make_log_mel(model: Model) -> LogMel:
    """The features of a model in torch, on its device."""
    device = model.weights.encoder.subsampling.linear.weight.device
    return LogMel(model.config.encoder.num_mels, device)
