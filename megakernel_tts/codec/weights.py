"""Every tensor of the codec: name, shape, place. The one table that knows the codec's names."""

from dataclasses import dataclass

from torch import Tensor

from megakernel_tts.model.checkpoint import spec
from megakernel_tts.model.config import CodecDecoderConfig, CodecEncoderConfig


@dataclass(frozen=True)
class Conv:
    """A convolution: weight [out, in / groups, kernel], or [in, out, kernel] when transposed."""

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
    """Running sums of a codebook's vectors and how often each was used."""

    total: Tensor  # [codes, dim]
    usage: Tensor  # [codes]


@dataclass(frozen=True)
class Snake:
    """Per-channel parameters of the periodic activation, both as logarithms."""

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
    """Depthwise convolution and pointwise MLP."""

    depthwise: Conv
    norm: Norm
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    gamma: Tensor


@dataclass(frozen=True)
class Upsample:
    """Twice the rate."""

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
class Block:
    """A transposed convolution and its residual units."""

    snake: Snake
    transposed: Conv
    residuals: tuple[Residual, ...]


@dataclass(frozen=True)
class Decoder:
    """Codes to waveform."""

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
    blocks: tuple[Block, ...]
    snake: Snake
    conv_out: Conv


def _conv(name: str, *shape: int, bias: int | None = None, **how: int) -> Conv:
    out = shape[0] if bias is None else bias
    return Conv(spec(f"{name}.weight", *shape), spec(f"{name}.bias", out) if out else None, **how)


def decoder_specs(c: CodecDecoderConfig) -> Decoder:
    """The decoder's tensors, as specs."""
    s, latent = c.stack, c.latent_dim
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim

    def codebook(name: str, i: int) -> Codebook:
        p = f"decoder.quantizer.{name}.vq.layers.{i}._codebook"
        return Codebook(
            spec(f"{p}.embedding_sum", c.codebook_size, c.codebook_dim // 2),
            spec(f"{p}.cluster_usage", c.codebook_size),
        )

    def layer(p: str) -> DecoderLayer:
        return DecoderLayer(
            input_norm=spec(f"{p}.input_layernorm.weight", s.hidden_size),
            q=spec(f"{p}.self_attn.q_proj.weight", q, s.hidden_size),
            k=spec(f"{p}.self_attn.k_proj.weight", kv, s.hidden_size),
            v=spec(f"{p}.self_attn.v_proj.weight", kv, s.hidden_size),
            o=spec(f"{p}.self_attn.o_proj.weight", s.hidden_size, q),
            scale=spec(f"{p}.self_attn_layer_scale.scale", s.hidden_size),
            post_norm=spec(f"{p}.post_attention_layernorm.weight", s.hidden_size),
            gate=spec(f"{p}.mlp.gate_proj.weight", s.intermediate_size, s.hidden_size),
            up=spec(f"{p}.mlp.up_proj.weight", s.intermediate_size, s.hidden_size),
            down=spec(f"{p}.mlp.down_proj.weight", s.hidden_size, s.intermediate_size),
            mlp_scale=spec(f"{p}.mlp_layer_scale.scale", s.hidden_size),
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

    def block(i: int, rate: int) -> Block:
        p, into, out = (
            f"decoder.decoder.{i + 1}.block",
            c.decoder_dim >> i,
            c.decoder_dim >> (i + 1),
        )
        return Block(
            snake(f"{p}.0", into),
            _conv(f"{p}.1.conv", into, out, 2 * rate, bias=out, stride=rate),
            tuple(residual(f"{p}.{j + 2}", out, 3**j) for j in range(3)),
        )

    dim, end, last = (
        c.codebook_dim,
        len(c.upsample_rates) + 1,
        c.decoder_dim >> len(c.upsample_rates),
    )
    return Decoder(
        first=codebook("rvq_first", 0),
        first_out=spec("decoder.quantizer.rvq_first.output_proj.weight", dim, dim // 2, 1),
        rest=tuple(codebook("rvq_rest", i) for i in range(c.num_groups - 1)),
        rest_out=spec("decoder.quantizer.rvq_rest.output_proj.weight", dim, dim // 2, 1),
        pre_conv=_conv("decoder.pre_conv.conv", latent, dim, 3),
        input=spec("decoder.pre_transformer.input_proj.weight", s.hidden_size, latent),
        input_bias=spec("decoder.pre_transformer.input_proj.bias", s.hidden_size),
        layers=tuple(layer(f"decoder.pre_transformer.layers.{i}") for i in range(s.num_layers)),
        norm=spec("decoder.pre_transformer.norm.weight", s.hidden_size),
        output=spec("decoder.pre_transformer.output_proj.weight", latent, s.hidden_size),
        output_bias=spec("decoder.pre_transformer.output_proj.bias", latent),
        upsample=tuple(upsample(i, ratio) for i, ratio in enumerate(c.upsampling_ratios)),
        conv_in=_conv("decoder.decoder.0.conv", c.decoder_dim, latent, 7),
        blocks=tuple(block(i, rate) for i, rate in enumerate(c.upsample_rates)),
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
    """A chain of codebooks behind one projection."""

    input: Tensor  # [codebook_dim, hidden, 1]
    codebooks: tuple[Codebook, ...]


@dataclass(frozen=True)
class Encoder:
    """Waveform to codes."""

    conv_in: Conv
    stages: tuple[EncoderStage, ...]
    conv_out: Conv
    layers: tuple[EncoderLayer, ...]
    downsample: Conv
    semantic: Quantizer
    acoustic: Quantizer


def encoder_specs(c: CodecEncoderConfig, groups: int) -> Encoder:
    """The encoder's tensors, as specs; of its quantisers only those of the first `groups` codes."""
    s = c.stack
    wide = s.num_heads * s.head_dim

    def stage(i: int, ratio: int) -> EncoderStage:
        n, p = c.num_filters << i, 1 + 3 * i
        block = f"encoder.encoder.layers.{p}.block"
        return EncoderStage(
            _conv(f"{block}.1.conv", n // c.compress, n, c.residual_kernel_size),
            _conv(f"{block}.3.conv", n, n // c.compress, 1),
            _conv(f"encoder.encoder.layers.{p + 2}.conv", 2 * n, n, 2 * ratio, stride=ratio),
        )

    def norm(p: str) -> Norm:
        return Norm(spec(f"{p}.weight", s.hidden_size), spec(f"{p}.bias", s.hidden_size))

    def layer(p: str) -> EncoderLayer:
        return EncoderLayer(
            input_norm=norm(f"{p}.input_layernorm"),
            q=spec(f"{p}.self_attn.q_proj.weight", wide, s.hidden_size),
            k=spec(f"{p}.self_attn.k_proj.weight", wide, s.hidden_size),
            v=spec(f"{p}.self_attn.v_proj.weight", wide, s.hidden_size),
            o=spec(f"{p}.self_attn.o_proj.weight", s.hidden_size, wide),
            scale=spec(f"{p}.self_attn_layer_scale.scale", s.hidden_size),
            post_norm=norm(f"{p}.post_attention_layernorm"),
            fc1=spec(f"{p}.mlp.fc1.weight", s.intermediate_size, s.hidden_size),
            fc2=spec(f"{p}.mlp.fc2.weight", s.hidden_size, s.intermediate_size),
            mlp_scale=spec(f"{p}.mlp_layer_scale.scale", s.hidden_size),
        )

    def quantizer(name: str, count: int) -> Quantizer:
        p = f"encoder.quantizer.{name}_residual_vector_quantizer"
        return Quantizer(
            spec(f"{p}.input_proj.weight", c.codebook_dim, s.hidden_size, 1),
            tuple(
                Codebook(
                    spec(f"{p}.layers.{i}.codebook.embed_sum", c.codebook_size, c.codebook_dim),
                    spec(f"{p}.layers.{i}.codebook.cluster_usage", c.codebook_size),
                )
                for i in range(count)
            ),
        )

    ratios = tuple(reversed(c.downsampling_ratios))
    end = 3 * len(ratios) + 2
    return Encoder(
        conv_in=_conv("encoder.encoder.layers.0.conv", c.num_filters, 1, c.kernel_size),
        stages=tuple(stage(i, ratio) for i, ratio in enumerate(ratios)),
        conv_out=_conv(
            f"encoder.encoder.layers.{end}.conv",
            s.hidden_size,
            c.num_filters << len(ratios),
            c.last_kernel_size,
        ),
        layers=tuple(layer(f"encoder.encoder_transformer.layers.{i}") for i in range(s.num_layers)),
        downsample=_conv(
            "encoder.downsample.conv", s.hidden_size, s.hidden_size, 4, bias=0, stride=2
        ),
        semantic=quantizer("semantic", 1),
        acoustic=quantizer("acoustic", groups - 1),
    )
