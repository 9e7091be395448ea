"""The streaming encoder on a GPU: kernels of csrc/conformer, and cuBLAS for products of many rows.

The subsampling takes six launches, and one more projects its frames. With few rows a Conformer
block takes ten: eight linear layers, with their norms, residuals and activations, attention and
convolution. With more rows the products are those of cuBLAS, and the norms and residuals between
them launches of their own.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_stt.kernels.conformer import ConformerKernels
from megakernel_stt.kernels.conformer_structs import MAX_FEW_ROWS, Streams
from megakernel_stt.network.encoder import EncoderState, StreamingEncoder, project_bins
from megakernel_stt.network.layers import apply

if TYPE_CHECKING:
    from megakernel_stt.model.weights import FeedForward


class KernelEncoder(StreamingEncoder):
    """A streaming encoder whose states are in slots."""

    def __init__(self, kernels: ConformerKernels, lookahead: int) -> None:
        """Computes the keys of all distances.

        Args:
            kernels: Of the model.
            lookahead: Frames of a chunk after its first.
        """
        super().__init__(kernels.weights, kernels.config, lookahead)
        self._kernels = kernels
        self._positions = [positions.contiguous() for positions in self._positions]

    def encode_slots(
        self,
        mels: Tensor,
        lengths: Tensor,
        sources: Tensor,
        targets: Tensor,
        states: EncoderState,
    ) -> Tensor:
        """Encodes one chunk of every stream; see `StreamingEncoder.encode_slots`."""
        streams = self._kernels.launcher.streams(
            sources, targets, lengths, states.num_frames, self.chunk_size
        )
        bins = self._kernels.subsampling.run(mels, streams, states)
        x = project_bins(self._weights, self._config, bins)
        few = x.shape[0] * x.shape[1] <= MAX_FEW_ROWS
        (self._run_few_rows if few else self._run_many_rows)(x, streams, states)
        return x

    def _run_few_rows(self, x: Tensor, streams: Streams, states: EncoderState) -> None:
        """Runs the blocks on frames [streams, chunk_size, hidden] in place."""
        kernels, blocks, config = self._kernels, self._weights.blocks, self._config
        size, inner = config.hidden_size, config.intermediate_size
        up, qkv, gate = (x.new_empty(*x.shape[:2], n) for n in (inner, 3 * size, 2 * size))
        begun = torch.empty_like(x)  # a block's input, which the norm of the one before returns
        for i, block in enumerate(blocks):
            weights, before = block.feed_forward1, blocks[i - 1].norm if i else None
            kernels.project(
                "up", weights.up, x, up, norm=weights.norm, norm_out=before, normed_out=begun
            )
            residual = begun if i else x
            kernels.project("down", weights.down, up, x, residual=residual, scale=0.5)
            kernels.project("qkv", kernels.qkv[i], x, qkv, norm=block.attention.norm)
            attended = kernels.attend(i, streams, qkv, self._positions[i], states)
            kernels.project("add", block.attention.output, attended, x, residual=x)
            weights = block.convolution
            kernels.project("gate", weights.pointwise_in, x, gate, norm=weights.norm)
            convolved = kernels.convolve(i, streams, gate, states)
            kernels.project("add", weights.pointwise_out, convolved, x, residual=x)
            weights = block.feed_forward2
            kernels.project("up", weights.up, x, up, norm=weights.norm)
            kernels.project("down", weights.down, up, x, residual=x, scale=0.5)
        kernels.add_norm(x, None, x, norm_out=blocks[-1].norm)

    def _run_many_rows(self, x: Tensor, streams: Streams, states: EncoderState) -> None:
        """The same with products of cuBLAS."""
        kernels, blocks = self._kernels, self._weights.blocks
        h = torch.empty_like(x)
        kernels.add_norm(x, None, h, norm_next=blocks[0].feed_forward1.norm)
        for i, block in enumerate(blocks):
            y = _feed_forward(block.feed_forward1, h)
            kernels.add_norm(x, y, h, scale=0.5, norm_next=block.attention.norm)
            attended = kernels.attend(
                i, streams, apply(kernels.qkv[i], h), self._positions[i], states
            )
            y = apply(block.attention.output, attended)
            kernels.add_norm(x, y, h, norm_next=block.convolution.norm)
            convolved = kernels.convolve(
                i, streams, apply(block.convolution.pointwise_in, h), states
            )
            y = apply(block.convolution.pointwise_out, convolved)
            kernels.add_norm(x, y, h, norm_next=block.feed_forward2.norm)
            y = _feed_forward(block.feed_forward2, h)
            following = blocks[i + 1].feed_forward1.norm if i + 1 < len(blocks) else None
            kernels.add_norm(x, y, h, scale=0.5, norm_out=block.norm, norm_next=following)


def _feed_forward(weights: "FeedForward", normed: Tensor) -> Tensor:
    """A feed-forward module of what its norm returned."""
    return apply(weights.down, F.silu(apply(weights.up, normed), inplace=True))
