"""The tensors of a recogniser: a tree of dataclasses, with the names that transformers gives them.

`model_specs` declares the tree with name and shape of every tensor; a checkpoint fills it.
"""

from dataclasses import dataclass

from torch import Tensor

from megakernel_common.checkpoint import spec
from megakernel_stt.model.config import (
    NUM_STAGES,
    EncoderConfig,
    ModelConfig,
    PromptConfig,
    TransducerConfig,
)


@dataclass(frozen=True)
class Linear:
    """A linear layer, or a convolution: weight [out, in, ...] and bias [out]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Norm:
    """A layer normalisation."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class BatchNorm:
    """A batch normalisation with its running statistics."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class Stage:
    """A stage of the subsampling: a strided convolution, then a pointwise one but in the first."""

    strided: Linear
    pointwise: Linear | None


@dataclass(frozen=True)
class Subsampling:
    """Eight mel frames to one encoder frame."""

    stages: tuple[Stage, ...]
    linear: Linear


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward module with its norm."""

    norm: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Attention:
    """Self-attention with relative positions (Transformer-XL), with its norm.

    Attributes:
        norm: Norm of its input.
        query: Query projection.
        key: Key projection.
        value: Value projection.
        output: Output projection.
        position: [hidden, hidden], key projection of the distances.
        content_bias: [heads, head_dim], added to queries for keys (u in the paper).
        position_bias: [heads, head_dim], added to queries for distances (v in the paper).
    """

    norm: Norm
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    position: Tensor
    content_bias: Tensor
    position_bias: Tensor


@dataclass(frozen=True)
class Convolution:
    """A convolution module with the norm of its input.

    Attributes:
        norm: Norm of its input.
        pointwise_in: To twice the width, whose second half gates the first.
        depthwise: Over time.
        inner_norm: After the depthwise convolution: layer norm if causal, else batch norm.
        pointwise_out: Output projection.
    """

    norm: Norm
    pointwise_in: Linear
    depthwise: Linear
    inner_norm: Norm | BatchNorm
    pointwise_out: Linear


@dataclass(frozen=True)
class Block:
    """A Conformer block."""

    feed_forward1: FeedForward
    attention: Attention
    convolution: Convolution
    feed_forward2: FeedForward
    norm: Norm


@dataclass(frozen=True)
class EncoderWeights:
    """The encoder."""

    subsampling: Subsampling
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class LstmLayer:
    """A layer of the prediction network, with gates in the order i, f, g, o."""

    input: Linear
    hidden: Linear


@dataclass(frozen=True)
class TransducerWeights:
    """Prediction network and joint network.

    Attributes:
        encoder_projector: Encoder frames to the joint width.
        embedding: [vocab, hidden]; the row of blank starts a text.
        lstm: Layers of the prediction network.
        projector: Its output to the joint width.
        head: To logits [vocab], then those of the durations (TDT).
    """

    encoder_projector: Linear
    embedding: Tensor
    lstm: tuple[LstmLayer, ...]
    projector: Linear
    head: Linear


@dataclass(frozen=True)
class PromptWeights:
    """The network that merges the language prompt into the encoder's frames."""

    linear1: Linear
    linear2: Linear


@dataclass(frozen=True)
class Weights:
    """All tensors of a recogniser."""

    encoder: EncoderWeights
    prompt: PromptWeights | None
    transducer: TransducerWeights


def model_specs(config: ModelConfig) -> Weights:
    """Declares the tensors of a recogniser as transformers names them."""
    encoder = config.encoder
    blocks = tuple(_block(f"encoder.layers.{i}", encoder) for i in range(encoder.num_layers))
    return Weights(
        EncoderWeights(_subsampling(encoder), blocks),
        _prompt(config.prompt, encoder.hidden_size) if config.prompt else None,
        _transducer(config.transducer, encoder.hidden_size),
    )


def _linear(name: str, *shape: int, bias: bool = True) -> Linear:
    return Linear(spec(f"{name}.weight", *shape), spec(f"{name}.bias", shape[0]) if bias else None)


def _norm(name: str, size: int) -> Norm:
    return Norm(spec(f"{name}.weight", size), spec(f"{name}.bias", size))


def _subsampling(config: EncoderConfig) -> Subsampling:
    channels, root = config.subsampling_channels, "encoder.subsampling"
    # The streaming class names its layers; the offline class numbers them, activations included.
    names = [(f"{root}.conv_in", "")] if config.streaming else [(f"{root}.layers.0", "")]
    for i in range(NUM_STAGES - 1):
        if config.streaming:
            layer = f"{root}.layers.{i}"
            names.append((f"{layer}.depthwise_conv", f"{layer}.pointwise_conv"))
        else:
            names.append((f"{root}.layers.{3 * i + 2}", f"{root}.layers.{3 * i + 3}"))
    stages = tuple(
        Stage(
            _linear(strided, channels, 1, 3, 3),
            _linear(pointwise, channels, channels, 1, 1) if pointwise else None,
        )
        for strided, pointwise in names
    )
    width = channels * config.subsampled_mels
    return Subsampling(stages, _linear(f"{root}.linear", config.hidden_size, width))


def _feed_forward(name: str, norm: str, config: EncoderConfig) -> FeedForward:
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.attention_bias
    return FeedForward(
        _norm(norm, hidden),
        _linear(f"{name}.linear1", inner, hidden, bias=bias),
        _linear(f"{name}.linear2", hidden, inner, bias=bias),
    )


def _block(name: str, config: EncoderConfig) -> Block:
    hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim

    def projection(part: str) -> Linear:
        return _linear(f"{name}.self_attn.{part}", hidden, hidden, bias=config.attention_bias)

    def convolution(part: str, *shape: int) -> Linear:
        return _linear(f"{name}.conv.{part}", *shape, bias=config.convolution_bias)

    inner_norm = f"{name}.conv.norm"
    return Block(
        _feed_forward(f"{name}.feed_forward1", f"{name}.norm_feed_forward1", config),
        Attention(
            _norm(f"{name}.norm_self_att", hidden),
            projection("q_proj"),
            projection("k_proj"),
            projection("v_proj"),
            projection("o_proj"),
            spec(f"{name}.self_attn.relative_k_proj.weight", hidden, hidden),
            spec(f"{name}.self_attn.bias_u", heads, head_dim),
            spec(f"{name}.self_attn.bias_v", heads, head_dim),
        ),
        Convolution(
            _norm(f"{name}.norm_conv", hidden),
            convolution("pointwise_conv1", 2 * hidden, hidden, 1),
            convolution("depthwise_conv", hidden, 1, config.conv_kernel_size),
            _norm(inner_norm, hidden)
            if config.streaming
            else BatchNorm(
                spec(f"{inner_norm}.weight", hidden),
                spec(f"{inner_norm}.bias", hidden),
                spec(f"{inner_norm}.running_mean", hidden),
                spec(f"{inner_norm}.running_var", hidden),
            ),
            convolution("pointwise_conv2", hidden, hidden, 1),
        ),
        _feed_forward(f"{name}.feed_forward2", f"{name}.norm_feed_forward2", config),
        _norm(f"{name}.norm_out", hidden),
    )


def _transducer(config: TransducerConfig, encoder_size: int) -> TransducerWeights:
    hidden = config.hidden_size

    def lstm(kind: str, layer: int) -> Linear:
        weight = spec(f"decoder.lstm.weight_{kind}_l{layer}", 4 * hidden, hidden)
        return Linear(weight, spec(f"decoder.lstm.bias_{kind}_l{layer}", 4 * hidden))

    num_outputs = config.vocab_size + len(config.durations or ())
    return TransducerWeights(
        _linear("encoder_projector", hidden, encoder_size),
        spec("decoder.embedding.weight", config.vocab_size, hidden),
        tuple(LstmLayer(lstm("ih", i), lstm("hh", i)) for i in range(config.num_layers)),
        _linear("decoder.decoder_projector", hidden, hidden),
        _linear("joint.head", num_outputs, hidden),
    )


def _prompt(config: PromptConfig, hidden: int) -> PromptWeights:
    inner, width = config.intermediate_size, hidden + config.num_prompts
    return PromptWeights(
        _linear("prompt_projector.linear_1", inner, width),
        _linear("prompt_projector.linear_2", hidden, inner),
    )
