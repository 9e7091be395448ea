"""Tensors of the codec: names in the checkpoint, shapes, and the structure of the network."""

from dataclasses import dataclass

from torch import Tensor

from megakernel_common.checkpoint import spec
from megakernel_tts.model.config import CodecDecoderConfig, CodecEncoderConfig


@dataclass(frozen=True)
class Conv:
    """A convolution: weight [out, in / groups, kernel]; transposed: [in, out, kernel]."""

    weight: Tensor
    bias: Tensor | None
    stride: int = 1
    dilation: int = 1
    groups: int = 1


@dataclass(frozen=True)
class Norm:
    """A layer norm."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Codebook:
    """Running sums of a codebook's vectors, and the usage counts to divide them by."""

    total: Tensor  # [codes, dim]
    usage: Tensor  # [codes]


@dataclass(frozen=True)
class Snake:
    """Per-channel parameters of the SnakeBeta activation, as logarithms."""

    alpha: Tensor
    beta: Tensor


@dataclass(frozen=True)
class DecoderLayer:
    """One transformer layer of the decoder."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    scale: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    mlp_scale: Tensor


@dataclass(frozen=True)
class ConvNext:
    """ConvNeXt block: depthwise convolution, layer norm, pointwise MLP."""

    depthwise: Conv
    norm: Norm
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    gamma: Tensor


@dataclass(frozen=True)
class Upsample:
    """Upsampling by a transposed convolution, followed by a ConvNeXt block."""

    transposed: Conv
    convnext: ConvNext


@dataclass(frozen=True)
class Residual:
    """A residual unit: two snakes, a dilated and a pointwise convolution."""

    snake1: Snake
    conv1: Conv
    snake2: Snake
    conv2: Conv


@dataclass(frozen=True)
class DecoderBlock:
    """A transposed convolution and its residual units."""

    snake: Snake
    transposed: Conv
    residuals: tuple[Residual, ...]


@dataclass(frozen=True)
class DecoderWeights:
    """The decoder: codes to waveform."""

    first: Codebook
    first_out: Tensor  # [dim, dim / 2, 1]
    rest: tuple[Codebook, ...]
    rest_out: Tensor
    pre_conv: Conv
    input: Tensor
    input_bias: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    output: Tensor
    output_bias: Tensor
    upsample: tuple[Upsample, ...]
    conv_in: Conv
    blocks: tuple[DecoderBlock, ...]
    snake: Snake
    conv_out: Conv


def _conv(name: str, *shape: int, bias: int | None = None, **options: int) -> Conv:
    out = shape[0] if bias is None else bias
    return Conv(
        spec(f"{name}.weight", *shape), spec(f"{name}.bias", out) if out else None, **options
    )


def decoder_specs(config: CodecDecoderConfig) -> DecoderWeights:
    """Specs of the decoder's tensors."""
    stack, latent = config.stack, config.latent_dim
    q, kv = stack.num_heads * stack.head_dim, stack.num_kv_heads * stack.head_dim

    def codebook(name: str, i: int) -> Codebook:
        p = f"decoder.quantizer.{name}.vq.layers.{i}._codebook"
        return Codebook(
            spec(f"{p}.embedding_sum", config.codebook_size, config.codebook_dim // 2),
            spec(f"{p}.cluster_usage", config.codebook_size),
        )

    def layer(p: str) -> DecoderLayer:
        return DecoderLayer(
            input_norm=spec(f"{p}.input_layernorm.weight", stack.hidden_size),
            q=spec(f"{p}.self_attn.q_proj.weight", q, stack.hidden_size),
            k=spec(f"{p}.self_attn.k_proj.weight", kv, stack.hidden_size),
            v=spec(f"{p}.self_attn.v_proj.weight", kv, stack.hidden_size),
            o=spec(f"{p}.self_attn.o_proj.weight", stack.hidden_size, q),
            scale=spec(f"{p}.self_attn_layer_scale.scale", stack.hidden_size),
            post_norm=spec(f"{p}.post_attention_layernorm.weight", stack.hidden_size),
            gate=spec(f"{p}.mlp.gate_proj.weight", stack.intermediate_size, stack.hidden_size),
            up=spec(f"{p}.mlp.up_proj.weight", stack.intermediate_size, stack.hidden_size),
            down=spec(f"{p}.mlp.down_proj.weight", stack.hidden_size, stack.intermediate_size),
            mlp_scale=spec(f"{p}.mlp_layer_scale.scale", stack.hidden_size),
        )

    def upsample(i: int, ratio: int) -> Upsample:
        p = f"decoder.upsample.{i}"
        return Upsample(
            _conv(f"{p}.0.conv", latent, latent, ratio, stride=ratio),
            ConvNext(
                depthwise=_conv(f"{p}.1.dwconv.conv", latent, 1, 7, groups=latent),
                norm=Norm(spec(f"{p}.1.norm.weight", latent), spec(f"{p}.1.norm.bias", latent)),
                up=spec(f"{p}.1.pwconv1.weight", 4 * latent, latent),
                up_bias=spec(f"{p}.1.pwconv1.bias", 4 * latent),
                down=spec(f"{p}.1.pwconv2.weight", latent, 4 * latent),
                down_bias=spec(f"{p}.1.pwconv2.bias", latent),
                gamma=spec(f"{p}.1.gamma", latent),
            ),
        )

    def snake(p: str, channels: int) -> Snake:
        return Snake(spec(f"{p}.alpha", channels), spec(f"{p}.beta", channels))

    def residual(p: str, n: int, dilation: int) -> Residual:
        return Residual(
            snake(f"{p}.act1", n),
            _conv(f"{p}.conv1.conv", n, n, 7, dilation=dilation),
            snake(f"{p}.act2", n),
            _conv(f"{p}.conv2.conv", n, n, 1),
        )

    def block(i: int, rate: int) -> DecoderBlock:
        p = f"decoder.decoder.{i + 1}.block"
        into, out = config.decoder_dim >> i, config.decoder_dim >> (i + 1)
        return DecoderBlock(
            snake(f"{p}.0", into),
            _conv(f"{p}.1.conv", into, out, 2 * rate, bias=out, stride=rate),
            tuple(residual(f"{p}.{j + 2}", out, 3**j) for j in range(3)),
        )

    dim, num_blocks = config.codebook_dim, len(config.upsample_rates)
    end, last = num_blocks + 1, config.decoder_dim >> num_blocks
    return DecoderWeights(
        first=codebook("rvq_first", 0),
        first_out=spec("decoder.quantizer.rvq_first.output_proj.weight", dim, dim // 2, 1),
        rest=tuple(codebook("rvq_rest", i) for i in range(config.num_groups - 1)),
        rest_out=spec("decoder.quantizer.rvq_rest.output_proj.weight", dim, dim // 2, 1),
        pre_conv=_conv("decoder.pre_conv.conv", latent, dim, 3),
        input=spec("decoder.pre_transformer.input_proj.weight", stack.hidden_size, latent),
        input_bias=spec("decoder.pre_transformer.input_proj.bias", stack.hidden_size),
        layers=tuple(layer(f"decoder.pre_transformer.layers.{i}") for i in range(stack.num_layers)),
        norm=spec("decoder.pre_transformer.norm.weight", stack.hidden_size),
        output=spec("decoder.pre_transformer.output_proj.weight", latent, stack.hidden_size),
        output_bias=spec("decoder.pre_transformer.output_proj.bias", latent),
        upsample=tuple(upsample(i, ratio) for i, ratio in enumerate(config.upsampling_ratios)),
        conv_in=_conv("decoder.decoder.0.conv", config.decoder_dim, latent, 7),
        blocks=tuple(block(i, rate) for i, rate in enumerate(config.upsample_rates)),
        snake=snake(f"decoder.decoder.{end}", last),
        conv_out=_conv(f"decoder.decoder.{end + 1}.conv", 1, last, 7),
    )


@dataclass(frozen=True)
class EncoderStage:
    """A residual unit and the strided convolution after it."""

    conv1: Conv
    conv2: Conv
    down: Conv


@dataclass(frozen=True)
class EncoderLayer:
    """One transformer layer of the encoder."""

    input_norm: Norm
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    scale: Tensor
    post_norm: Norm
    fc1: Tensor
    fc2: Tensor
    mlp_scale: Tensor


@dataclass(frozen=True)
class Quantizer:
    """A projection followed by residual codebooks."""

    input: Tensor  # [codebook_dim, hidden, 1]
    codebooks: tuple[Codebook, ...]


@dataclass(frozen=True)
class EncoderWeights:
    """The encoder: waveform to codes."""

    conv_in: Conv
    stages: tuple[EncoderStage, ...]
    conv_out: Conv
    layers: tuple[EncoderLayer, ...]
    downsample: Conv
    semantic: Quantizer
    acoustic: Quantizer


def encoder_specs(config: CodecEncoderConfig, groups: int) -> EncoderWeights:
    """Specs of the encoder's tensors; quantisers of the first `groups` codes only."""
    stack = config.stack
    width = stack.num_heads * stack.head_dim

    def stage(i: int, ratio: int) -> EncoderStage:
        n, p = config.num_filters << i, 1 + 3 * i
        block = f"encoder.encoder.layers.{p}.block"
        return EncoderStage(
            _conv(f"{block}.1.conv", n // config.compress, n, config.residual_kernel_size),
            _conv(f"{block}.3.conv", n, n // config.compress, 1),
            _conv(f"encoder.encoder.layers.{p + 2}.conv", 2 * n, n, 2 * ratio, stride=ratio),
        )

    def norm(p: str) -> Norm:
        return Norm(spec(f"{p}.weight", stack.hidden_size), spec(f"{p}.bias", stack.hidden_size))

    def layer(p: str) -> EncoderLayer:
        return EncoderLayer(
            input_norm=norm(f"{p}.input_layernorm"),
            q=spec(f"{p}.self_attn.q_proj.weight", width, stack.hidden_size),
            k=spec(f"{p}.self_attn.k_proj.weight", width, stack.hidden_size),
            v=spec(f"{p}.self_attn.v_proj.weight", width, stack.hidden_size),
            o=spec(f"{p}.self_attn.o_proj.weight", stack.hidden_size, width),
            scale=spec(f"{p}.self_attn_layer_scale.scale", stack.hidden_size),
            post_norm=norm(f"{p}.post_attention_layernorm"),
            fc1=spec(f"{p}.mlp.fc1.weight", stack.intermediate_size, stack.hidden_size),
            fc2=spec(f"{p}.mlp.fc2.weight", stack.hidden_size, stack.intermediate_size),
            mlp_scale=spec(f"{p}.mlp_layer_scale.scale", stack.hidden_size),
        )

    def quantizer(name: str, count: int) -> Quantizer:
        p = f"encoder.quantizer.{name}_residual_vector_quantizer"
        return Quantizer(
            spec(f"{p}.input_proj.weight", config.codebook_dim, stack.hidden_size, 1),
            tuple(
                Codebook(
                    spec(f"{book}.embed_sum", config.codebook_size, config.codebook_dim),
                    spec(f"{book}.cluster_usage", config.codebook_size),
                )
                for book in (f"{p}.layers.{i}.codebook" for i in range(count))
            ),
        )

    ratios = tuple(reversed(config.downsampling_ratios))
    hidden, end = stack.hidden_size, 3 * len(ratios) + 2
    return EncoderWeights(
        conv_in=_conv("encoder.encoder.layers.0.conv", config.num_filters, 1, config.kernel_size),
        stages=tuple(stage(i, ratio) for i, ratio in enumerate(ratios)),
        conv_out=_conv(
            f"encoder.encoder.layers.{end}.conv",
            hidden,
            config.num_filters << len(ratios),
            config.last_kernel_size,
        ),
        layers=tuple(
            layer(f"encoder.encoder_transformer.layers.{i}") for i in range(stack.num_layers)
        ),
        downsample=_conv("encoder.downsample.conv", hidden, hidden, 4, bias=0, stride=2),
        semantic=quantizer("semantic", 1),
        acoustic=quantizer("acoustic", groups - 1),
    )
