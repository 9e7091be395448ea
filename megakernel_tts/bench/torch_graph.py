"""A frame of plain torch as one CUDA graph: the baseline for the kernel at the same batch size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.checkpoint import Checkpoint
from megakernel_common.layers import apply_rope, rope_table
from megakernel_tts.model.config import ModelConfig, StackConfig, read_model_config
from megakernel_tts.model.weights import Layer, Model, Stack, model_specs

_TOP_K = 50
_POSITION = 100  # of the talker
_NUM_WARMUP_FRAMES = 3
_NUM_FRAMES = 50


@dataclass(frozen=True)
class TorchGraph:
    """Time of a frame of plain torch, recorded as a CUDA graph, without the codec.

    Attributes:
        streams: Number of streams.
        ms_per_frame: Mean time of a frame of all streams.
    """

    streams: int
    ms_per_frame: float


class _Layer:
    """A decoder layer with fused projections (qkv, gate_up) and fused head norms."""

    def __init__(self, w: Layer, config: StackConfig) -> None:
        self.w, self.heads = w, (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.qkv, self.gate_up = torch.cat([w.q, w.k, w.v]), torch.cat([w.gate, w.up])
        self.head_norms = torch.cat(
            [w.q_norm.expand(config.num_heads, -1), w.k_norm.expand(config.num_kv_heads, -1)]
        )[None, :, None]


class _Network:
    """A decoder stack with its KV cache, for one position of every stream at a time."""

    def __init__(self, stack: Stack, config: StackConfig, positions: int, num_streams: int) -> None:
        device, dtype, heads = stack.norm.device, stack.norm.dtype, config.num_kv_heads
        shape = (len(stack.layers), 2, num_streams, heads, positions, config.head_dim)
        self.norm, self.config = stack.norm, config
        self.layers = [_Layer(w, config) for w in stack.layers]
        self.caches = torch.randn(shape, device=device).to(dtype)
        indices = torch.arange(positions, device=device)[None]
        self.rope_table = rope_table(indices, config.head_dim, config.rope_theta, dtype)

    def __call__(self, x: Tensor, position: int) -> Tensor:
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = x + self._attention(self._norm(x, layer.w.input_norm), layer, cache, position)
            gate, up = F.linear(self._norm(x, layer.w.post_norm), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.w.down)
        return self._norm(x, self.norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _attention(self, x: Tensor, layer: _Layer, cache: Tensor, position: int) -> Tensor:
        end, width = position + 1, self.config.head_dim
        heads = F.linear(x, layer.qkv).view(len(x), -1, 1, width)
        queries_keys = heads[:, : -layer.heads[2]]
        normed = F.rms_norm(queries_keys, (width,), eps=self.config.norm_eps) * layer.head_norms
        query, key = apply_rope(normed, self.rope_table[..., position:end, :]).split(
            layer.heads[:2], 1
        )
        keys, values = cache
        keys[:, :, position:end] = key
        values[:, :, position:end] = heads[:, -layer.heads[2] :]
        mixed = F.scaled_dot_product_attention(
            query, keys[:, :, :end], values[:, :, :end], enable_gqa=True
        )
        return F.linear(mixed.reshape(len(x), -1), layer.w.o)


def _sample(logits: Tensor) -> Tensor:
    """Samples ids with top-k 50 and temperature 0.9, by the argmax of score plus Gumbel noise."""
    top = logits.float().topk(_TOP_K, dim=-1)
    noise = -torch.log(-torch.log(torch.rand_like(top.values)))
    return top.indices.gather(-1, (top.values / 0.9 + noise).argmax(-1, keepdim=True))[:, 0]


def torch_frame(
    model: Model, config: ModelConfig, position: int, num_streams: int = 1
) -> Callable[[], Tensor]:
    """Prepares a frame: the talker, sixteen passes of the code predictor, and all sampling.

    Args:
        model: Weights on any device.
        config: The config of these weights.
        position: Position of the talker.
        num_streams: Streams of the frame.

    Returns:
        A function that makes the frame and returns the next input vectors [streams, hidden].
    """
    dtype = model.talker.stack.norm.dtype
    talker = _Network(model.talker.stack, config.talker.stack, position + 1, num_streams)
    num_groups = config.talker.num_groups
    predictor = _Network(model.predictor.stack, config.predictor.stack, num_groups, num_streams)
    embeddings, project = model.embeddings, model.predictor.project
    x = embeddings.codec[:num_streams].to(dtype, copy=True)

    def project_input(y: Tensor) -> Tensor:
        return y if project is None else F.linear(y, project.weight, project.bias)

    def frame() -> Tensor:
        hidden = talker(x, position)
        code = _sample(F.linear(hidden, model.talker.head)) % config.talker.num_codes
        rows = [embeddings.codec[code]]
        predictor(project_input(hidden), 0)
        for group, head in enumerate(model.predictor.heads):
            logits = F.linear(predictor(project_input(rows[-1]), group + 1), head)
            rows.append(embeddings.group_tables[group][_sample(logits)])
        return x.copy_(torch.stack(rows).sum(0))

    return frame


def frame_graph(
    model: Model, config: ModelConfig, position: int, num_streams: int = 1
) -> Callable[[], None]:
    """Records `torch_frame` of bfloat16 weights on a GPU.

    Returns:
        A function that replays the graph on the current CUDA stream.
    """
    frame = torch_frame(model, config, position, num_streams)
    for _ in range(_NUM_WARMUP_FRAMES):
        frame()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        frame()
    return graph.replay


@torch.inference_mode()
def measure_torch_graphs(
    folder: Path, device: torch.device, stream_counts: Sequence[int]
) -> tuple[TorchGraph, ...]:
    """Times graphs of a checkpoint's frames at several batch sizes.

    Args:
        folder: Of the checkpoint.
        device: A GPU.
        stream_counts: Batch sizes.
    """
    config = read_model_config(folder / "config.json")
    model = Checkpoint(folder).load(model_specs(config), device, torch.bfloat16)
    measured: list[TorchGraph] = []
    with torch.cuda.device(device):
        for num_streams in stream_counts:
            replay = frame_graph(model, config, _POSITION, num_streams)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(_NUM_WARMUP_FRAMES):
                replay()
            begin.record()
            for _ in range(_NUM_FRAMES):
                replay()
            end.record()
            end.synchronize()
            ms_per_frame = begin.elapsed_time(end) / _NUM_FRAMES
            measured.append(TorchGraph(num_streams, round(ms_per_frame, 3)))
    return tuple(measured)
