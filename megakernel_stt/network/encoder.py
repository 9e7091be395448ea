"""The FastConformer encoder: cache-aware and streaming, or offline.

A streaming encoder takes chunks of `lookahead + 1` frames, each of eight mel frames. Attention and
convolutions see nothing after a chunk, so the result does not depend on how the audio arrives. The
first frame needs one mel frame only: seven frames of padding precede it.

A recording may end within a chunk. Its length then sets which frames of every stage are padding,
as for a whole recording in one piece; the output is the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.layers import split_heads
from megakernel_stt.model.config import MELS_PER_FRAME, NUM_STAGES, EncoderConfig
from megakernel_stt.model.weights import Block, EncoderWeights, Stage
from megakernel_stt.network.batched import Batched
from megakernel_stt.network.layers import (
    apply,
    attention,
    depthwise_output,
    feed_forward,
    gated_input,
    layer_norm,
    position_keys,
)

NUM_MISSING = MELS_PER_FRAME - 1  # mel frames of a stream's first chunk that precede the stream
ENDLESS = 1 << 40  # length of a recording that does not end in a chunk


@dataclass(frozen=True)
class EncoderState(Batched):
    """What a streaming encoder keeps of the past.

    Attributes:
        stage1: [batch, mels, 1], the last mel frame, an input of the first subsampling stage.
        stage2: [batch, bins, channels], that of the second stage.
        stage3: [batch, bins, channels], that of the third stage.
        keys: [batch, layers, heads, frames, head_dim], of the last chunks, padded at the front.
        values: As `keys`.
        gated: [batch, layers, hidden, kernel size - 1], last inputs of the depthwise convolutions.
        num_frames: [batch] int64, frames so far.
    """

    stage1: Tensor
    stage2: Tensor
    stage3: Tensor
    keys: Tensor
    values: Tensor
    gated: Tensor
    num_frames: Tensor


class StreamingEncoder:
    """A cache-aware encoder with one lookahead."""

    def __init__(self, weights: EncoderWeights, config: EncoderConfig, lookahead: int) -> None:
        """Computes the keys of all distances.

        Args:
            weights: The tensors.
            config: The sizes.
            lookahead: Frames of a chunk after its first.
        """
        assert config.streaming is not None
        self._weights = weights
        self._config = config
        self.chunk_size = lookahead + 1  # frames
        # Attention sees whole chunks of the past.
        self._num_cached = config.streaming.left_context // self.chunk_size * self.chunk_size
        most = self._num_cached + self.chunk_size - 1
        self._positions = [
            position_keys(block.attention, most, 1 - self.chunk_size) for block in weights.blocks
        ]

    @property
    def num_mels(self) -> int:
        """Mel frames of a chunk."""
        return self.chunk_size * MELS_PER_FRAME

    def start(self) -> EncoderState:
        """The state of one stream before its first chunk."""
        config, like = self._config, self._weights.subsampling.linear.weight
        bins = [config.num_mels]
        for _ in range(NUM_STAGES - 1):
            bins.append(bins[-1] // 2 + 1)
        channels = config.subsampling_channels
        cached = config.num_layers, config.num_heads, self._num_cached, config.head_dim
        return EncoderState(
            like.new_zeros(1, bins[0], 1),
            like.new_zeros(1, bins[1], channels),
            like.new_zeros(1, bins[2], channels),
            like.new_zeros(1, *cached),
            like.new_zeros(1, *cached),
            like.new_zeros(1, config.num_layers, config.hidden_size, config.conv_kernel_size - 1),
            torch.zeros(1, dtype=torch.int64, device=like.device),
        )

    def encode(
        self, mels: Tensor, lengths: Tensor, state: EncoderState
    ) -> tuple[Tensor, EncoderState]:
        """Encodes one chunk of every stream.

        Args:
            mels: [batch, num_mels, bins]. The first chunk of a stream begins `NUM_MISSING` mel
                frames before it. Those before the stream or after its end do not matter.
            lengths: [batch] int64, mel frames in all of a stream that ends in the chunk, otherwise
                `ENDLESS`.
            state: State of the streams before the chunk.

        Returns:
            [batch, chunk_size, hidden]; frames at and beyond `num_frames(length)` of a stream that
            ends have no meaning. Then the state after the chunk, of streams that have not ended.
        """
        before = (state.stage1, state.stage2, state.stage3)
        x, last_inputs, length = self._subsample(mels, lengths, before, state.num_frames)
        first = state.num_frames[:, None]
        new = torch.arange(self.chunk_size, device=x.device)
        is_frame = first + new < length[:, None]
        past = torch.arange(-self._num_cached, 0, device=x.device)
        visible = torch.cat([first + past >= 0, is_frame], 1)
        keys, values, gated = [], [], []
        for i, block in enumerate(self._weights.blocks):
            x = x + 0.5 * feed_forward(block.feed_forward1, x)
            query, key, value = project(block, x, self._config.head_dim)
            key = torch.cat([state.keys[:, i], key], 2)
            value = torch.cat([state.values[:, i], value], 2)
            x = x + attention(block.attention, query, key, value, self._positions[i], visible)
            inputs = gated_input(block.convolution, x) * is_frame[:, None]
            inputs = torch.cat([state.gated[:, i], inputs], 2)
            x = x + depthwise_output(block.convolution, inputs)
            x = layer_norm(block.norm, x + 0.5 * feed_forward(block.feed_forward2, x))
            keys.append(key[:, :, self.chunk_size :])
            values.append(value[:, :, self.chunk_size :])
            gated.append(inputs[:, :, self.chunk_size :])
        stage1, stage2, stage3 = last_inputs
        after = EncoderState(
            stage1,
            stage2,
            stage3,
            torch.stack(keys, 1),
            torch.stack(values, 1),
            torch.stack(gated, 1),
            state.num_frames + self.chunk_size,
        )
        return x, after

    def encode_slots(
        self,
        mels: Tensor,
        lengths: Tensor,
        sources: Tensor,
        targets: Tensor,
        states: EncoderState,
    ) -> Tensor:
        """Encodes one chunk of every stream, with states in slots; see `encode`.

        Args:
            mels: [streams, num_mels, bins].
            lengths: [streams] int64, mel frames in all of a stream that ends in the chunk,
                otherwise `ENDLESS`.
            sources: [streams] int64, slots of the states before the chunk.
            targets: [streams] int64, slots for the states after it. None of them is a source, and
                only one for states that are not needed may occur twice.
            states: [slots, ...], changed in place.

        Returns:
            [streams, chunk_size, hidden].
        """
        frames, after = self.encode(mels, lengths, states.select(sources))
        states.store(targets, after)
        return frames

    def _subsample(
        self, mels: Tensor, lengths: Tensor, before: Sequence[Tensor], num_frames: Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Runs the subsampling.

        Args:
            mels: As in `encode`.
            lengths: As in `encode`.
            before: [batch, bins, channels], the last input of each stage before the chunk.
            num_frames: [batch] int64, frames before the chunk.

        Returns:
            [batch, chunk_size, hidden], the last input of each stage, and the lengths in frames.
        """
        per_frame, last_inputs = MELS_PER_FRAME, []
        x = _masked(mels[:, None], num_frames, lengths, per_frame)
        stages = self._weights.subsampling.stages
        for stage, last in zip(stages, before, strict=True):
            inputs = torch.cat([last.transpose(1, 2)[:, :, None], x], 2)
            last_inputs.append(inputs[:, :, -1].transpose(1, 2))
            x = convolve(stage, F.pad(inputs, (2, 1)))
            per_frame, lengths = per_frame // 2, lengths // 2 + 1
            x = torch.relu(_masked(x, num_frames, lengths, per_frame))
        x = project_bins(self._weights, self._config, x.transpose(1, 2).flatten(2))
        return x, last_inputs, lengths


class OfflineEncoder:
    """An encoder that sees the whole recording, which is encoded solo."""

    def __init__(self, weights: EncoderWeights, config: EncoderConfig) -> None:
        self._weights = weights
        self._config = config

    def encode(self, mels: Tensor) -> Tensor:
        """Encodes a recording.

        Args:
            mels: [mel frames, bins], at least one frame.

        Returns:
            [1, frames, hidden].
        """
        x = mels[None, None]
        for stage in self._weights.subsampling.stages:
            x = torch.relu(convolve(stage, F.pad(x, (1, 1, 1, 1))))
        x = project_bins(self._weights, self._config, x.transpose(1, 2).flatten(2))
        num_frames, margin = x.shape[1], self._config.conv_kernel_size // 2
        for block in self._weights.blocks:
            x = x + 0.5 * feed_forward(block.feed_forward1, x)
            positions = position_keys(block.attention, num_frames - 1, 1 - num_frames)
            query, key, value = project(block, x, self._config.head_dim)
            x = x + attention(block.attention, query, key, value, positions, None)
            inputs = F.pad(gated_input(block.convolution, x), (margin, margin))
            x = x + depthwise_output(block.convolution, inputs)
            x = layer_norm(block.norm, x + 0.5 * feed_forward(block.feed_forward2, x))
        return x


def num_frames(num_mels: int) -> int:
    """Frames of a whole recording of mel frames, with a streaming encoder."""
    return (num_mels + NUM_MISSING - 1) // MELS_PER_FRAME + 1 if num_mels else 0


def _masked(x: Tensor, num_frames: Tensor, lengths: Tensor, per_frame: int) -> Tensor:
    """Sets frames of a stage before the stream's first and after its last to zero.

    Args:
        x: [batch, channels, frames of the stage, bins].
        num_frames: [batch] int64, frames of the encoder before the chunk.
        lengths: [batch] int64, frames of the stage in all.
        per_frame: Frames of the stage for each frame of the encoder.
    """
    first = (num_frames * per_frame - (per_frame - 1))[:, None]
    index = first + torch.arange(x.shape[2], device=x.device)
    is_frame = (index >= 0) & (index < lengths[:, None])
    return x * is_frame[:, None, :, None]


def convolve(stage: Stage, x: Tensor) -> Tensor:
    """The convolutions of a stage of the subsampling.

    Args:
        stage: Its weights.
        x: [batch, channels, frames, bins], padded.
    """
    y = F.conv2d(x, stage.strided.weight, stage.strided.bias, stride=2, groups=x.shape[1])
    if stage.pointwise is not None:
        y = F.conv2d(y, stage.pointwise.weight, stage.pointwise.bias)
    return y


def project_bins(weights: EncoderWeights, config: EncoderConfig, x: Tensor) -> Tensor:
    """Projects the subsampled frames.

    Args:
        weights: The encoder's tensors.
        config: Its sizes.
        x: [batch, frames, channels * bins].

    Returns:
        [batch, frames, hidden].
    """
    y = apply(weights.subsampling.linear, x)
    return y * math.sqrt(config.hidden_size) if config.scale_input else y


def project(block: Block, x: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [batch, heads, frames, head_dim] of a block's attention."""
    weights = block.attention
    y = layer_norm(weights.norm, x)
    parts = (apply(layer, y) for layer in (weights.query, weights.key, weights.value))
    query, key, value = (split_heads(part, head_dim) for part in parts)
    return query, key, value
