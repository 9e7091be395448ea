"""A frame of plain torch as one CUDA graph, the baseline of `bench.step`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_tts.model.config import ModelConfig, StackConfig
from megakernel_tts.model.layers import apply_rope, rope_table
from megakernel_tts.model.weights import Layer, Model, Stack

_TOP_K = 50


class _Layer:
    """A decoder layer with fused projections (qkv, gate_up) and fused head norms."""

    def __init__(self, w: Layer, config: StackConfig) -> None:
        self.w, self.heads = w, (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.qkv, self.gate_up = torch.cat([w.q, w.k, w.v]), torch.cat([w.gate, w.up])
        self.head_norms = torch.cat(
            [w.q_norm.expand(config.num_heads, -1), w.k_norm.expand(config.num_kv_heads, -1)]
        )[None, :, None]


class _Network:
    """A decoder stack with its KV cache, for one position at a time."""

    def __init__(self, stack: Stack, config: StackConfig, positions: int) -> None:
        device = stack.norm.device
        shape = (len(stack.layers), 2, 1, config.num_kv_heads, positions, config.head_dim)
        self.norm, self.config = stack.norm, config
        self.layers = [_Layer(w, config) for w in stack.layers]
        self.caches = torch.randn(shape, device=device).bfloat16()
        indices = torch.arange(positions, device=device)[None]
        self.rope_table = rope_table(indices, config.head_dim, config.rope_theta, torch.bfloat16)

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
        heads = F.linear(x, layer.qkv).view(1, -1, 1, width)
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
        return F.linear(mixed.view(1, -1), layer.w.o)


def _sample(logits: Tensor) -> Tensor:
    """Samples an id with top-k 50 and temperature 0.9, by the argmax of score plus Gumbel noise."""
    top = logits.float().topk(_TOP_K, dim=-1)
    noise = -torch.log(-torch.log(torch.rand_like(top.values)))
    return top.indices.gather(-1, (top.values / 0.9 + noise).argmax(-1, keepdim=True))[0]


def frame_graph(model: Model, config: ModelConfig, position: int) -> Callable[[], None]:
    """Records a frame: the talker, sixteen passes of the code predictor, and all sampling.

    Args:
        model: bfloat16 weights on a GPU.
        config: The config of these weights.
        position: Position of the talker.

    Returns:
        A function that replays the graph on the current CUDA stream.
    """
    talker = _Network(model.talker.stack, config.talker.stack, position + 1)
    predictor = _Network(model.predictor.stack, config.predictor.stack, config.talker.num_groups)
    embeddings, project = model.embeddings, model.predictor.project
    x = embeddings.codec[:1].clone()

    def project_input(y: Tensor) -> Tensor:
        return y if project is None else F.linear(y, project.weight, project.bias)

    def frame() -> None:
        hidden = talker(x, position)
        code = _sample(F.linear(hidden, model.talker.head)) % config.talker.num_codes
        rows = [embeddings.codec[code]]
        predictor(project_input(hidden), 0)
        for group, head in enumerate(model.predictor.heads):
            logits = F.linear(predictor(project_input(rows[-1]), group + 1), head)
            rows.append(embeddings.group_tables[group][_sample(logits)])
        x.copy_(torch.stack(rows).sum(0))

    for _ in range(3):
        frame()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        frame()
    return graph.replay
