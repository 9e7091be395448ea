"""Talker and code predictor for training: whole sequences with teacher forcing."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_voice.dialogue import NOTHING, Batch
from examples.train_voice.phonemes import PHONES
from examples.train_voice.training import bind
from megakernel_common.checkpoint import TensorSpec, leaves
from megakernel_common.layers import apply_rope, merge_heads, rms_norm, rope_table, split_heads
from megakernel_tts.model.config import ModelConfig, StackConfig
from megakernel_tts.model.weights import Layer, model_specs

GUIDED_LAYERS = 2, 3  # whose first head is trained to attend to the word being spoken
_DROPOUT = 0.05


def _run_layer(
    x: Tensor, layer: Layer, c: StackConfig, rope: Tensor, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A transformer layer on x [batch, positions, hidden]; gives also its queries and keys."""
    n = rms_norm(x, layer.input_norm, c.norm_eps)
    q, k, v = (split_heads(F.linear(n, p), c.head_dim) for p in (layer.q, layer.k, layer.v))
    q = apply_rope(rms_norm(q.float(), layer.q_norm, c.norm_eps), rope).to(v.dtype)
    k = apply_rope(rms_norm(k.float(), layer.k_norm, c.norm_eps), rope).to(v.dtype)
    keys, values = (t.repeat_interleave(c.num_heads // c.num_kv_heads, 1) for t in (k, v))
    y = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    x = x + F.dropout(F.linear(merge_heads(y), layer.o), dropout)
    n = rms_norm(x, layer.post_norm, c.norm_eps)
    y = F.linear(F.silu(F.linear(n, layer.gate)) * F.linear(n, layer.up), layer.down)
    return x + F.dropout(y, dropout), q, k


@cache
def _fused_layer() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`_run_layer` with fused kernels, for a GPU.

    The layers are narrow: unfused, most of a step's time is memory traffic of norms, rotations and
    activations in float32.
    """
    return torch.compile(_run_layer)


class TalkerNet:
    """Both networks over one tree of parameters.

    Attributes:
        config: Configuration of the checkpoint.
        parameters: Parameters by their names in the checkpoint, with an auxiliary output layer.
        dropout: Whether dropout is applied.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        specs = model_specs(config)
        head = TensorSpec("phone_head", (2 * len(PHONES), config.talker.stack.hidden_size))
        layers = config.talker.stack.num_layers
        self.parameters = {
            s.name: nn.Parameter(_initial(s, layers).to(device)) for s in (*leaves(specs), head)
        }
        self._tree = bind(specs, self.parameters)
        self.dropout = False

    def load(self, state: dict[str, Any]) -> None:
        """Loads the parameters of a stage's state."""
        with torch.no_grad():
            for name, value in state["parameters"].items():
                self.parameters[name].copy_(value)

    def text(self, ids: Tensor) -> Tensor:
        """Embeds text ids."""
        e = self._tree.embeddings
        x = F.linear(F.embedding(ids, e.text), e.text_up.weight, e.text_up.bias)
        return F.linear(F.silu(x), e.text_down.weight, e.text_down.bias)

    def control(self, ids: Tensor) -> Tensor:
        """Embeds ids of the codec embedding."""
        return F.embedding(ids, self._tree.embeddings.codec)

    def frames(self, codes: Tensor) -> Tensor:
        """Sums the embeddings of the codes of frames [..., groups]."""
        tables = self._tables()
        count, rows, _ = tables.shape
        rest = codes[..., 1:] + rows * torch.arange(count, device=codes.device)
        bags = F.embedding_bag(rest.reshape(-1, count), tables.flatten(0, 1), mode="sum")
        return self.control(codes[..., 0]) + bags.view(*codes.shape[:-1], -1)

    def inputs(self, batch: Batch, codes: Tensor) -> Tensor:
        """Inputs of the talker [batch, positions, hidden], with these codes as input frames."""
        fed = batch.previous != NOTHING
        x = self.text(batch.text) + self.frames(codes) * fed[..., None]
        control = self.control(batch.control.clamp(min=0))
        return x + control * (batch.control != NOTHING)[..., None]

    def _tables(self) -> Tensor:
        return torch.stack(self._tree.embeddings.group_tables)

    def talker(self, x: Tensor) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Runs the talker on x [batch, positions, hidden].

        Returns:
            Its output, the input of its last layer, and query and key of the first head of each
            guided layer.
        """
        stack, c = self._tree.talker.stack, self.config.talker.stack
        rope = self._rope(x, c)
        middle, guided = x, list[tuple[Tensor, Tensor]]()
        for i, layer in enumerate(stack.layers):
            middle = x
            x, q, k = self._layer(x, layer, c, rope)
            if i in GUIDED_LAYERS or i == len(stack.layers) - 1 < GUIDED_LAYERS[0]:
                guided.append((q[:, 0], k[:, 0]))
        return rms_norm(x, stack.norm, c.norm_eps), middle, guided

    def first_logits(self, hidden: Tensor) -> Tensor:
        """Logits of code 0 and of the end of speech."""
        return F.linear(hidden, self._tree.talker.head)

    def phones(self, middle: Tensor) -> Tensor:
        """Logits [..., 2, phones] of the phones of the next frame."""
        return F.linear(middle, self.parameters["phone_head"]).unflatten(-1, (2, len(PHONES)))

    def rest_logits(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Logits of codes 1 to groups - 1, from hidden [n, hidden] and codes [n, groups]."""
        predictor, c = self._tree.predictor, self.config.predictor.stack
        tables = self._tables()
        count, rows, _ = tables.shape
        inner = codes[:, 1:-1] + rows * torch.arange(count - 1, device=codes.device)
        previous = F.embedding(inner, tables.flatten(0, 1))
        x = torch.cat([hidden.float()[:, None], self.control(codes[:, :1]), previous], 1)
        rope = self._rope(x, c)
        for layer in predictor.stack.layers:
            x, _, _ = self._layer(x, layer, c, rope)
        x = rms_norm(x, predictor.stack.norm, c.norm_eps)[:, 1:]
        return torch.einsum("nkd,kvd->nkv", x, torch.stack(predictor.heads))

    def _rope(self, x: Tensor, c: StackConfig) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        return rope_table(positions, c.head_dim, c.rope_theta, torch.float32)

    def _layer(
        self, x: Tensor, layer: Layer, c: StackConfig, rope: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.dropout and x.is_cuda:
            torch._dynamo.maybe_mark_dynamic(x, (0, 1))
            torch._dynamo.maybe_mark_dynamic(rope, 3)
            return _fused_layer()(x, layer, c, rope, _DROPOUT)
        return _run_layer(x, layer, c, rope, _DROPOUT if self.dropout else 0.0)


def _initial(spec: TensorSpec, layers: int) -> Tensor:
    if len(spec.shape) == 1:
        return torch.ones(spec.shape) if spec.name.endswith("weight") else torch.zeros(spec.shape)
    if "text_embedding" in spec.name:
        deviation = 0.5
    elif "embedding" in spec.name:
        deviation = 0.05
    elif "head" in spec.name:
        deviation = 0.02
    else:
        deviation = spec.shape[1] ** -0.5
        if spec.name.endswith(("o_proj.weight", "down_proj.weight")):
            deviation *= (2 * layers) ** -0.5
    return torch.randn(spec.shape) * deviation
