"""Every tensor of the talker, the code predictor and the speaker encoder: name, shape, place.

The one table that knows a checkpoint's names for these networks (the codec's is in
`codec/weights.py`). Shapes are [out, in], as torch's linear layers store them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megakernel_tts.model.checkpoint import map_leaves, spec
from megakernel_tts.model.config import ModelConfig, SpeakerConfig, StackConfig


@dataclass(frozen=True)
class Layer:
    """One Qwen3 decoder layer."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Stack:
    """Layers and the norm after the last."""

    layers: tuple[Layer, ...]
    norm: Tensor


@dataclass(frozen=True)
class Projection:
    """A linear map with bias."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Embeddings:
    """What turns ids into the talker's input vectors."""

    text: Tensor  # [text_vocab, text_hidden]
    text_up: Projection  # text_hidden -> text_hidden
    text_down: Projection  # text_hidden -> hidden
    codec: Tensor  # [vocab, hidden]: control ids, speakers, code 0
    group_tables: tuple[Tensor, ...]  # groups - 1 tables [codes, hidden]: codes 1 to groups - 1

    def on_device(self, device: torch.device) -> "Embeddings":
        """Everything on a device but the text's table, of which few rows are ever wanted there."""
        there = map_leaves(replace(self, text=self.text[:0]), lambda tensor: tensor.to(device))
        return replace(there, text=self.text)

    def embed_frames(self, codes: Tensor) -> Tensor:
        """The sum of the embeddings of frames [n, groups]: [n, hidden], rounded once."""
        tables = (self.codec, *self.group_tables)
        return torch.stack([table[codes[:, i]] for i, table in enumerate(tables)]).sum(dim=0)


@dataclass(frozen=True)
class Talker:
    """Layers and head of the first network."""

    stack: Stack
    head: Tensor  # [vocab, hidden]


@dataclass(frozen=True)
class Predictor:
    """Layers and heads of the second network."""

    project: Projection | None  # talker's width -> predictor's; None where they are equal
    stack: Stack
    heads: tuple[Tensor, ...]  # groups - 1 of [codes, hidden]


@dataclass(frozen=True)
class Model:
    """The tensors of `model.safetensors` that speaking needs."""

    embeddings: Embeddings
    talker: Talker
    predictor: Predictor


def _stack(prefix: str, c: StackConfig) -> Stack:
    h, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def layer(p: str) -> Layer:
        return Layer(
            input_norm=spec(f"{p}.input_layernorm.weight", h),
            q=spec(f"{p}.self_attn.q_proj.weight", q, h),
            k=spec(f"{p}.self_attn.k_proj.weight", kv, h),
            v=spec(f"{p}.self_attn.v_proj.weight", kv, h),
            q_norm=spec(f"{p}.self_attn.q_norm.weight", c.head_dim),
            k_norm=spec(f"{p}.self_attn.k_norm.weight", c.head_dim),
            o=spec(f"{p}.self_attn.o_proj.weight", h, q),
            post_norm=spec(f"{p}.post_attention_layernorm.weight", h),
            gate=spec(f"{p}.mlp.gate_proj.weight", c.intermediate_size, h),
            up=spec(f"{p}.mlp.up_proj.weight", c.intermediate_size, h),
            down=spec(f"{p}.mlp.down_proj.weight", h, c.intermediate_size),
        )

    layers = tuple(layer(f"{prefix}.layers.{i}") for i in range(c.num_layers))
    return Stack(layers, spec(f"{prefix}.norm.weight", h))


def _projection(name: str, out: int, into: int) -> Projection:
    return Projection(spec(f"{name}.weight", out, into), spec(f"{name}.bias", out))


def model_specs(c: ModelConfig) -> Model:
    """The talker's and the predictor's tensors, as specs."""
    t, p = c.talker, c.predictor
    h, wide = t.stack.hidden_size, t.text_hidden_size
    rest = range(t.num_groups - 1)
    predictor = "talker.code_predictor"
    same_width = p.stack.hidden_size == h
    return Model(
        embeddings=Embeddings(
            text=spec("talker.model.text_embedding.weight", t.text_vocab_size, wide),
            text_up=_projection("talker.text_projection.linear_fc1", wide, wide),
            text_down=_projection("talker.text_projection.linear_fc2", h, wide),
            codec=spec("talker.model.codec_embedding.weight", t.vocab_size, h),
            group_tables=tuple(
                spec(f"{predictor}.model.codec_embedding.{i}.weight", p.vocab_size, h) for i in rest
            ),
        ),
        talker=Talker(
            _stack("talker.model", t.stack), spec("talker.codec_head.weight", t.vocab_size, h)
        ),
        predictor=Predictor(
            project=None
            if same_width
            else _projection(f"{predictor}.small_to_mtp_projection", p.stack.hidden_size, h),
            stack=_stack(f"{predictor}.model", p.stack),
            heads=tuple(
                spec(f"{predictor}.lm_head.{i}.weight", p.vocab_size, p.stack.hidden_size)
                for i in rest
            ),
        ),
    )


@dataclass(frozen=True)
class Tdnn:
    """A one-dimensional convolution with bias: weight [out, in, kernel]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class SpeakerBlock:
    """One SE-Res2Net block."""

    tdnn1: Tdnn
    res2net: tuple[Tdnn, ...]
    tdnn2: Tdnn
    squeeze: Tdnn
    excite: Tdnn


@dataclass(frozen=True)
class Speaker:
    """The speaker encoder (Base checkpoints)."""

    first: Tdnn
    blocks: tuple[SpeakerBlock, ...]
    aggregate: Tdnn
    attention_tdnn: Tdnn
    attention_conv: Tdnn
    fc: Tdnn


def speaker_specs(c: SpeakerConfig) -> Speaker:
    """The speaker encoder's tensors, as specs."""

    def tdnn(name: str, out: int, into: int, kernel: int = 1) -> Tdnn:
        name = f"speaker_encoder.{name}"
        return Tdnn(spec(f"{name}.weight", out, into, kernel), spec(f"{name}.bias", out))

    def block(i: int) -> SpeakerBlock:
        into, out, part = c.channels[i - 1], c.channels[i], c.channels[i] // c.res2net_scale
        p = f"blocks.{i}"
        return SpeakerBlock(
            tdnn1=tdnn(f"{p}.tdnn1.conv", out, into),
            res2net=tuple(
                tdnn(f"{p}.res2net_block.blocks.{j}.conv", part, part, c.kernels[i])
                for j in range(c.res2net_scale - 1)
            ),
            tdnn2=tdnn(f"{p}.tdnn2.conv", out, out),
            squeeze=tdnn(f"{p}.se_block.conv1", c.squeeze_channels, out),
            excite=tdnn(f"{p}.se_block.conv2", out, c.squeeze_channels),
        )

    inner = range(1, len(c.channels) - 1)
    last = c.channels[-1]
    return Speaker(
        first=tdnn("blocks.0.conv", c.channels[0], c.num_mels, c.kernels[0]),
        blocks=tuple(block(i) for i in inner),
        aggregate=tdnn("mfa.conv", last, sum(c.channels[i] for i in inner), c.kernels[-1]),
        attention_tdnn=tdnn("asp.tdnn.conv", c.attention_channels, 3 * last),
        attention_conv=tdnn("asp.conv", last, c.attention_channels),
        fc=tdnn("fc", c.dim, 2 * last),
    )
