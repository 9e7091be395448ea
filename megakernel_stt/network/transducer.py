"""Greedy decoding of transducers (RNN-T and TDT) for a batch of streams, by label looping.

The prediction network runs once per token. Between two tokens only the joint network runs,
for several frames at a time. An RNN-T is a TDT whose blank lasts one frame and whose tokens last
none. The result is that of decoding frame by frame:

    blank:  the next frame, or with a TDT the one after the predicted duration (1 at least)
    token:  with a TDT the frame after the predicted duration, which may be 0;
            the next frame if `max_symbols` tokens of one frame had duration 0
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.model.weights import LstmLayer, TransducerWeights
from megakernel_stt.network.batched import Batched
from megakernel_stt.network.layers import apply

# Frames that the joint network looks at in one product. The number is constant, because the
# summation order of a product may depend on it.
_WINDOW = 8
_ENTROPY_ORDER = 1 / 3  # of the Tsallis entropy


@dataclass(frozen=True)
class Emission:
    """A decoded token.

    Attributes:
        token: Its id.
        frame: The frame at which it was decoded, from the beginning of the stream.
        duration: Frames that it lasts (TDT), otherwise 1.
        confidence: From 0 to 1; see `confidence`.
    """

    token: int
    frame: int
    duration: int
    confidence: float


@dataclass(frozen=True)
class TransducerState(Batched):
    """What the decoder keeps of the past.

    Attributes:
        hidden: [batch, layers, hidden], of the LSTM.
        cell: As `hidden`.
        output: [batch, hidden], of the prediction network, projected.
        num_frames: [batch] int64, frames so far.
        frame: [batch] int64, the next frame to look at, which is later if a duration says so.
    """

    hidden: Tensor
    cell: Tensor
    output: Tensor
    num_frames: Tensor
    frame: Tensor


class Transducer:
    """Prediction network, joint network and greedy decoding."""

    def __init__(self, weights: TransducerWeights, config: TransducerConfig) -> None:
        self._weights = weights
        self._config = config

    def start(self) -> TransducerState:
        """The state of one stream before its first frame."""
        config, like = self._config, self._weights.embedding
        zeros = like.new_zeros(1, config.num_layers, config.hidden_size)
        nothing = torch.zeros(1, dtype=torch.int64, device=like.device)
        output, hidden, cell = self._predict([config.blank_id], zeros, zeros)
        return TransducerState(hidden, cell, output, nothing, nothing)

    def decode(
        self, frames: Tensor, lengths: list[int], state: TransducerState
    ) -> tuple[list[list[Emission]], TransducerState]:
        """Decodes the next frames of every stream.

        Args:
            frames: [batch, frames, hidden] of the encoder.
            lengths: How many of them a stream has.
            state: State of the streams before these frames.

        Returns:
            The tokens of every stream, and the state after its frames.
        """
        projected = apply(self._weights.encoder_projector, frames)
        hidden, cell, output = state.hidden.clone(), state.cell.clone(), state.output.clone()
        cursors = [
            _Cursor(self._config, first, frame - first, length)
            for first, frame, length in zip(
                state.num_frames.tolist(), state.frame.tolist(), lengths, strict=True
            )
        ]
        while running := [i for i, cursor in enumerate(cursors) if not cursor.at_end]:
            window = torch.stack([projected[i, cursors[i].window()] for i in running])
            logits = apply(self._weights.head, torch.relu(window + output[running, None]))
            tokens = self._next_tokens([cursors[i] for i in running], logits)
            labelled = [i for i, token in zip(running, tokens, strict=True) if token is not None]
            if labelled:
                new = [token for token in tokens if token is not None]
                after = self._predict(new, hidden[labelled], cell[labelled])
                output[labelled], hidden[labelled], cell[labelled] = after
        num_frames = state.num_frames + torch.tensor(lengths, device=frames.device)
        frame = torch.tensor([cursor.frame for cursor in cursors], device=frames.device)
        after = TransducerState(hidden, cell, output, num_frames, frame)
        return [cursor.emissions for cursor in cursors], after

    def _next_tokens(self, cursors: "list[_Cursor]", logits: Tensor) -> list[int | None]:
        """Moves every cursor behind its next token within the window, or to the window's end.

        Args:
            cursors: Of some streams.
            logits: [streams, window, outputs].

        Returns:
            The token of every stream, None if there is none in the window.
        """
        vocab_size, table = self._config.vocab_size, self._config.durations
        # Of equal logits the lowest id is the largest.
        ids = logits[..., :vocab_size].argmax(-1).tolist()
        durations: list[list[int | None]] = [[None] * _WINDOW for _ in cursors]
        if table is not None:
            choices = logits[..., vocab_size:].argmax(-1).tolist()
            durations = [[table[choice] for choice in row] for row in choices]
        tokens: list[int | None] = []
        for i, cursor in enumerate(cursors):
            offset = cursor.skip_blanks(ids[i], durations[i])
            tokens.append(None if offset is None else ids[i][offset])
            if offset is not None:
                certainty = confidence(logits[i, offset, :vocab_size]).item()
                cursor.emit(ids[i][offset], durations[i][offset], certainty)
        return tokens

    def _predict(
        self, tokens: list[int], hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of the prediction network.

        Args:
            tokens: The last token of every stream; blank before the first.
            hidden: [batch, layers, hidden].
            cell: As `hidden`.

        Returns:
            The projected output [batch, hidden], and the new `hidden` and `cell`.
        """
        index = torch.tensor(tokens, device=self._weights.embedding.device)
        x, layers = self._weights.embedding[index], []
        for i, layer in enumerate(self._weights.lstm):
            x, c = _lstm_step(layer, x, hidden[:, i], cell[:, i])
            layers.append((x, c))
        hidden, cell = (torch.stack(part, 1) for part in zip(*layers, strict=True))
        return apply(self._weights.projector, x[:, None])[:, 0], hidden, cell


def _lstm_step(layer: LstmLayer, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """New `hidden` and `cell` [batch, hidden] of one layer."""
    gates = apply(layer.input, x[:, None]) + apply(layer.hidden, hidden[:, None])
    i, f, g, o = gates[:, 0].chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


class _Cursor:
    """The position of one stream within its new frames."""

    def __init__(self, config: TransducerConfig, first: int, position: int, length: int) -> None:
        """Begins at a position.

        Args:
            config: Rules of decoding.
            first: Index of the first new frame in the stream.
            position: Of the next frame to look at, from the first; beyond the last one if a
                duration says so.
            length: Number of new frames.
        """
        self.emissions: list[Emission] = []
        self._config = config
        self._first = first
        self._position = position
        self._length = length
        self._num_symbols = 0  # tokens of the frame at the position

    @property
    def frame(self) -> int:
        """Index of the next frame in the stream."""
        return self._first + self._position

    @property
    def at_end(self) -> bool:
        """Whether no new frame is left."""
        return self._position >= self._length

    def window(self) -> list[int]:
        """The next frames; the last one is repeated where there are no more."""
        last = self._length - 1
        return [min(i, last) for i in range(self._position, self._position + _WINDOW)]

    def skip_blanks(self, tokens: list[int], durations: list[int | None]) -> int | None:
        """Moves to the next token, or to the end of the window.

        Args:
            tokens: The most likely id of every frame of the window.
            durations: Its duration; None for RNN-T.

        Returns:
            The frame of the token within the window, None if there is no token.
        """
        start = self._position
        while not self.at_end and (offset := self._position - start) < _WINDOW:
            if tokens[offset] != self._config.blank_id:
                return offset
            self._advance(durations[offset] or 1)
        return None

    def emit(self, token: int, duration: int | None, certainty: float) -> None:
        """Adds the token at the position.

        Args:
            token: Its id.
            duration: In frames; None for RNN-T.
            certainty: Its confidence.
        """
        num_frames = 1 if duration is None else duration
        self.emissions.append(Emission(token, self.frame, num_frames, certainty))
        self._num_symbols += 1
        is_full = self._num_symbols >= self._config.max_symbols
        self._advance(duration or int(is_full))

    def _advance(self, count: int) -> None:
        if count:
            self._position += count
            self._num_symbols = 0


def confidence(logits: Tensor) -> Tensor:
    """The certainty of a choice: 1 if one id has all the probability, 0 if all ids are equal.

    It is the exponential of the negative Tsallis entropy of order 1/3, scaled to 0..1, as in
    Laptev and Ginsburg, "Fast entropy-based methods of word-level confidence estimation" (2022).

    Args:
        logits: [..., ids].

    Returns:
        [...] float32.
    """
    powers = logits.float().log_softmax(-1).mul(_ENTROPY_ORDER).exp().sum(-1)
    entropy = (powers - 1) / (1 - _ENTROPY_ORDER)
    least = least_certainty(logits.shape[-1])
    return ((torch.exp(-entropy) - least) / (1 - least)).clamp(0, 1)


def least_certainty(num_ids: int) -> float:
    """The exponential of the negative entropy of equal logits."""
    return math.exp(-(num_ids ** (1 - _ENTROPY_ORDER) - 1) / (1 - _ENTROPY_ORDER))
