"""Tensors of the talker, the code predictor and the speaker encoder: names and shapes.

The codec's tensors are declared in `codec/weights.py`. Shapes are [out, in], as in torch.nn.Linear.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megakernel_common.checkpoint import map_leaves, spec
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
    """Layers and the final norm."""

    layers: tuple[Layer, ...]
    norm: Tensor


@dataclass(frozen=True)
class Projection:
    """A linear map with bias."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Embeddings:
    """Embedding tables of text and codes: the talker's input vectors."""

    text: Tensor  # [text_vocab, text_hidden]
    text_up: Projection  # text_hidden -> text_hidden
    text_down: Projection  # text_hidden -> hidden
    codec: Tensor  # [vocab, hidden]: control ids, speakers, code 0
    group_tables: tuple[Tensor, ...]  # groups - 1 tables [codes, hidden]: codes 1 to groups - 1

    def on_device(self, device: torch.device) -> "Embeddings":
        """A copy on a device, except for the text table: few of its rows are needed there."""
        moved = map_leaves(replace(self, text=self.text[:0]), lambda tensor: tensor.to(device))
        return replace(moved, text=self.text)

    def embed_frames(self, codes: Tensor) -> Tensor:
        """Sums the embeddings of each frame's codes.

        Args:
            codes: [frames, num_groups], int64.

        Returns:
            [frames, hidden], rounded once.
        """
        tables = (self.codec, *self.group_tables)
        return torch.stack([table[codes[:, i]] for i, table in enumerate(tables)]).sum(dim=0)


@dataclass(frozen=True)
class Talker:
    """The talker: layers and head."""

    stack: Stack
    head: Tensor  # [vocab, hidden]


@dataclass(frozen=True)
class Predictor:
    """The code predictor: input projection, layers and one head per code."""

    project: Projection | None  # talker's hidden size -> predictor's; None if they are equal
    stack: Stack
    heads: tuple[Tensor, ...]  # groups - 1 of [codes, hidden]


@dataclass(frozen=True)
class Model:
    """The tensors of `model.safetensors` that synthesis needs."""

    embeddings: Embeddings
    talker: Talker
    predictor: Predictor


def _stack(prefix: str, config: StackConfig) -> Stack:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim

    def layer(name: str) -> Layer:
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        return Layer(
            input_norm=spec(f"{name}.input_layernorm.weight", hidden),
            q=spec(f"{attention}.q_proj.weight", q_size, hidden),
            k=spec(f"{attention}.k_proj.weight", kv_size, hidden),
            v=spec(f"{attention}.v_proj.weight", kv_size, hidden),
            q_norm=spec(f"{attention}.q_norm.weight", config.head_dim),
            k_norm=spec(f"{attention}.k_norm.weight", config.head_dim),
            o=spec(f"{attention}.o_proj.weight", hidden, q_size),
            post_norm=spec(f"{name}.post_attention_layernorm.weight", hidden),
            gate=spec(f"{mlp}.gate_proj.weight", intermediate, hidden),
            up=spec(f"{mlp}.up_proj.weight", intermediate, hidden),
            down=spec(f"{mlp}.down_proj.weight", hidden, intermediate),
        )

    layers = tuple(layer(f"{prefix}.layers.{i}") for i in range(config.num_layers))
    return Stack(layers, spec(f"{prefix}.norm.weight", hidden))


def _projection(name: str, out_size: int, in_size: int) -> Projection:
    return Projection(spec(f"{name}.weight", out_size, in_size), spec(f"{name}.bias", out_size))


def model_specs(config: ModelConfig) -> Model:
    """Specs of the embeddings, the talker and the code predictor."""
    return Model(_embedding_specs(config), _talker_specs(config), _predictor_specs(config))


def _embedding_specs(config: ModelConfig) -> Embeddings:
    talker, codes = config.talker, config.predictor.vocab_size
    hidden, text_hidden = talker.stack.hidden_size, talker.text_hidden_size
    table = "talker.code_predictor.model.codec_embedding.{}.weight"
    return Embeddings(
        text=spec("talker.model.text_embedding.weight", talker.text_vocab_size, text_hidden),
        text_up=_projection("talker.text_projection.linear_fc1", text_hidden, text_hidden),
        text_down=_projection("talker.text_projection.linear_fc2", hidden, text_hidden),
        codec=spec("talker.model.codec_embedding.weight", talker.vocab_size, hidden),
        group_tables=tuple(
            spec(table.format(i), codes, hidden) for i in range(talker.num_groups - 1)
        ),
    )


def _talker_specs(config: ModelConfig) -> Talker:
    stack, vocab_size = config.talker.stack, config.talker.vocab_size
    head = spec("talker.codec_head.weight", vocab_size, stack.hidden_size)
    return Talker(_stack("talker.model", stack), head)


def _predictor_specs(config: ModelConfig) -> Predictor:
    prefix, predictor = "talker.code_predictor", config.predictor
    in_size, out_size = config.talker.stack.hidden_size, predictor.stack.hidden_size
    project = None
    if in_size != out_size:
        project = _projection(f"{prefix}.small_to_mtp_projection", out_size, in_size)
    heads = (
        spec(f"{prefix}.lm_head.{i}.weight", predictor.vocab_size, out_size)
        for i in range(config.talker.num_groups - 1)
    )
    return Predictor(project, _stack(f"{prefix}.model", predictor.stack), tuple(heads))


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


def speaker_specs(config: SpeakerConfig) -> Speaker:
    """Specs of the speaker encoder."""
    channels, squeeze = config.channels, config.squeeze_channels

    def tdnn(name: str, out_size: int, in_size: int, kernel: int = 1) -> Tdnn:
        name = f"speaker_encoder.{name}"
        weight = spec(f"{name}.weight", out_size, in_size, kernel)
        return Tdnn(weight, spec(f"{name}.bias", out_size))

    def block(i: int) -> SpeakerBlock:
        name, in_size, out_size = f"blocks.{i}", channels[i - 1], channels[i]
        split = out_size // config.res2net_scale
        return SpeakerBlock(
            tdnn1=tdnn(f"{name}.tdnn1.conv", out_size, in_size),
            res2net=tuple(
                tdnn(f"{name}.res2net_block.blocks.{j}.conv", split, split, config.kernels[i])
                for j in range(config.res2net_scale - 1)
            ),
            tdnn2=tdnn(f"{name}.tdnn2.conv", out_size, out_size),
            squeeze=tdnn(f"{name}.se_block.conv1", squeeze, out_size),
            excite=tdnn(f"{name}.se_block.conv2", out_size, squeeze),
        )

    inner = range(1, len(channels) - 1)
    last = channels[-1]
    return Speaker(
        first=tdnn("blocks.0.conv", channels[0], config.num_mels, config.kernels[0]),
        blocks=tuple(block(i) for i in inner),
        aggregate=tdnn("mfa.conv", last, sum(channels[i] for i in inner), config.kernels[-1]),
        attention_tdnn=tdnn("asp.tdnn.conv", config.attention_channels, 3 * last),
        attention_conv=tdnn("asp.conv", last, config.attention_channels),
        fc=tdnn("fc", config.dim, 2 * last),
    )
