"""Model configuration: frozen dataclasses that are read from a checkpoint's `config.json`.

A missing field, a wrong type or an impossible value raises a `CheckpointError` that names file and
field. Fields that would change the computation must have the implemented value. All other fields
of the file are ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megakernel_common.fields import Fields, read_json

Kind = Literal["base", "custom_voice", "voice_design"]

_NUM_CONTROL_IDS = 1024  # ids at the top of the talker's vocabulary
_MAX_LAYERS, _MAX_GROUPS, _MAX_WINDOW = 256, 128, 4096  # bounds on untrusted files


@dataclass(frozen=True)
class StackConfig:
    """A stack of transformer layers, with the names of `config.json`.

    The talker, the code predictor, the codec's decoder and its encoder have one each.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float


@dataclass(frozen=True)
class ControlIds:
    """Rows of the codec embedding that are control tokens, not codes."""

    pad: int
    bos: int
    eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int


@dataclass(frozen=True)
class TalkerConfig:
    """The network that produces code 0 of every frame from text and earlier frames.

    Attributes:
        stack: Its layers.
        vocab_size: Ids of code 0: codes, then `_NUM_CONTROL_IDS` control ids.
        text_vocab_size: Rows of the text embedding.
        text_hidden_size: Width of the text embedding.
        num_groups: Codes of a frame.
        control: Control ids.
        languages: Language name -> id.
        speakers: Speaker name -> id.
        dialects: Speaker name -> the name of its dialect in `languages`.
    """

    stack: StackConfig
    vocab_size: int
    text_vocab_size: int
    text_hidden_size: int
    num_groups: int
    control: ControlIds
    languages: Mapping[str, int] = field(repr=False)
    speakers: Mapping[str, int] = field(repr=False)
    dialects: Mapping[str, str] = field(repr=False)

    @property
    def num_codes(self) -> int:
        """Number of codes: ids from 0; the top 1,024 ids of the vocabulary are control ids."""
        return self.vocab_size - _NUM_CONTROL_IDS

    @property
    def spoken_languages(self) -> tuple[str, ...]:
        """The languages that a caller can select. A dialect is selected by its speaker."""
        return tuple(name for name in self.languages if not name.endswith("dialect"))


@dataclass(frozen=True)
class PredictorConfig:
    """The code predictor: codes 1 to num_groups - 1 of a frame."""

    stack: StackConfig
    vocab_size: int


@dataclass(frozen=True)
class SpeakerConfig:
    """The ECAPA-TDNN that computes an x-vector from a recording (Base checkpoints only).

    `channels`, `kernels` and `dilations` have one entry per block; the last is the aggregation.
    """

    dim: int
    num_mels: int
    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    dilations: tuple[int, ...]
    attention_channels: int
    res2net_scale: int
    squeeze_channels: int


@dataclass(frozen=True)
class TextIds:
    """Special text token ids of a prompt. They are taken from the config, never from user text."""

    assistant: int
    im_start: int
    im_end: int
    pad: int
    bos: int
    eos: int


@dataclass(frozen=True)
class ModelConfig:
    """The contents of `config.json`."""

    kind: Kind
    size: str
    text: TextIds
    talker: TalkerConfig
    predictor: PredictorConfig
    speaker: SpeakerConfig | None

    @property
    def takes_instruct(self) -> bool:
        """Whether the model was trained with instructions (the 0.6B models were not)."""
        return self.kind == "voice_design" or (self.kind == "custom_voice" and self.size != "0b6")


@dataclass(frozen=True)
class CodecDecoderConfig:
    """The codec's decoder: codes to waveform."""

    num_groups: int
    codebook_size: int
    codebook_dim: int
    latent_dim: int
    stack: StackConfig
    sliding_window: int
    upsampling_ratios: tuple[int, ...]
    decoder_dim: int
    upsample_rates: tuple[int, ...]


@dataclass(frozen=True)
class CodecEncoderConfig:
    """The codec's encoder: waveform to codes (the encoder of Mimi)."""

    num_filters: int
    kernel_size: int
    residual_kernel_size: int
    last_kernel_size: int
    compress: int
    downsampling_ratios: tuple[int, ...]
    stack: StackConfig
    codebook_size: int
    codebook_dim: int
    num_quantizers: int


@dataclass(frozen=True)
class CodecConfig:
    """The contents of `speech_tokenizer/config.json`."""

    sample_rate: int  # Hz
    samples_per_frame: int
    decoder: CodecDecoderConfig
    encoder: CodecEncoderConfig


def _stack(fields: Fields) -> StackConfig:
    fields.require(hidden_act="silu", attention_bias=False, use_sliding_window=False)
    if fields.values.get("rope_scaling") is not None:
        fields.section("rope_scaling").require(rope_type="default", type="default")
    stack = StackConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", maximum=_MAX_LAYERS),
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim"),
        norm_eps=fields.number("rms_norm_eps"),
        rope_theta=fields.number("rope_theta"),
    )
    if stack.num_heads % stack.num_kv_heads:
        raise fields.invalid(
            "num_key_value_heads", f"a divisor of {stack.num_heads} attention heads"
        )
    if stack.head_dim % 2:
        raise fields.invalid("head_dim", "an even number")
    types = fields.values.get("layer_types")
    is_list = types is None or isinstance(types, list)
    if not is_list or any(kind != "full_attention" for kind in types or ()):
        raise fields.invalid("layer_types", "full_attention everywhere, the only one implemented")
    return stack


def _talker(fields: Fields) -> TalkerConfig:
    vocab_size = fields.integer("vocab_size", minimum=_NUM_CONTROL_IDS + 1)
    num_codes = vocab_size - _NUM_CONTROL_IDS
    control = {
        name: fields.integer(key, minimum=0)
        for name, key in {
            "pad": "codec_pad_id",
            "bos": "codec_bos_id",
            "eos": "codec_eos_token_id",
            "think": "codec_think_id",
            "nothink": "codec_nothink_id",
            "think_bos": "codec_think_bos_id",
            "think_eos": "codec_think_eos_id",
        }.items()
    }
    if not num_codes <= control["eos"] < vocab_size:
        expected = f"one of the ids {num_codes} to {vocab_size - 1}"
        raise fields.invalid("codec_eos_token_id", expected)
    ids = control.values()
    if max(ids) >= vocab_size or min(ids) < num_codes or len(set(ids)) < len(ids):
        raise fields.invalid(
            "vocab_size", f"a size whose top 1,024 ids include all control ids, distinct: {control}"
        )
    languages = fields.ids("codec_language_id", vocab_size)
    speakers = fields.ids("spk_id", vocab_size)
    dialects = {
        name.lower(): dialect
        for name, dialect in fields.section("spk_is_dialect").values.items()
        if dialect is not None and dialect is not False
    }
    for name, dialect in dialects.items():
        if name not in speakers or not isinstance(dialect, str) or dialect not in languages:
            raise fields.invalid(
                "spk_is_dialect", "speakers of spk_id and names of codec_language_id"
            )
    return TalkerConfig(
        stack=_stack(fields),
        vocab_size=vocab_size,
        text_vocab_size=fields.integer("text_vocab_size"),
        text_hidden_size=fields.integer("text_hidden_size"),
        num_groups=fields.integer("num_code_groups", minimum=2, maximum=_MAX_GROUPS),
        control=ControlIds(**control),
        languages=languages,
        speakers=speakers,
        dialects=dialects,
    )


def _speaker(fields: Fields) -> SpeakerConfig:
    # A released file has only enc_dim and sample_rate; the defaults are those of the architecture.
    fields.require(sample_rate=24000)
    config = SpeakerConfig(
        dim=fields.integer("enc_dim"),
        num_mels=fields.integer("mel_dim", 128),
        channels=fields.integers("enc_channels", (512, 512, 512, 512, 1536)),
        kernels=fields.integers("enc_kernel_sizes", (5, 3, 3, 3, 1)),
        dilations=fields.integers("enc_dilations", (1, 2, 3, 4, 1)),
        attention_channels=fields.integer("enc_attention_channels", 128),
        res2net_scale=fields.integer("enc_res2net_scale", 8, maximum=64),
        squeeze_channels=fields.integer("enc_se_channels", 128),
    )
    if not len(config.channels) == len(config.kernels) == len(config.dilations) >= 3:
        raise fields.invalid(
            "enc_channels", "as many entries as kernel sizes and dilations, 3 or more"
        )
    if any(channels % config.res2net_scale for channels in config.channels[1:-1]):
        raise fields.invalid("enc_res2net_scale", "a divisor of the inner channels")
    if len(set(config.channels[:-1])) > 1:
        raise fields.invalid("enc_channels", "equal widths except for the last")
    if any(n % 2 == 0 or n > 63 for n in config.kernels) or max(config.dilations) > 64:
        raise fields.invalid("enc_kernel_sizes", "odd kernels below 64, and dilations up to 64")
    return config


def read_model_config(file: Path) -> ModelConfig:
    """Reads a checkpoint's `config.json`.

    Raises:
        CheckpointError: A field is missing, has a wrong type, or has an unsupported value.
    """
    fields = Fields(read_json(file), file)
    fields.choice("model_type", ("qwen3_tts",))
    fields.choice("tokenizer_type", ("qwen3_tts_tokenizer_12hz",))
    kind = fields.choice("tts_model_type", ("base", "custom_voice", "voice_design"))
    talker_fields = fields.section("talker_config")
    predictor_fields = talker_fields.section("code_predictor_config")
    talker = _talker(talker_fields)
    predictor = PredictorConfig(_stack(predictor_fields), predictor_fields.integer("vocab_size"))
    if predictor_fields.integer("num_code_groups") != talker.num_groups:
        raise predictor_fields.invalid(
            "num_code_groups", f"{talker.num_groups}, as in talker_config"
        )
    text = TextIds(
        **{
            name: fields.integer(f"{name}_token_id", minimum=0)
            for name in ("assistant", "im_start", "im_end")
        },
        **{
            name: fields.integer(f"tts_{name}_token_id", minimum=0)
            for name in ("pad", "bos", "eos")
        },
    )
    for name, index in vars(text).items():
        if index >= talker.text_vocab_size:
            raise talker_fields.invalid(
                "text_vocab_size", f"more than the {name} token's id {index}"
            )
    return ModelConfig(
        kind=kind,  # pyright: ignore[reportArgumentType]  # checked by `choice`
        size=fields.choice("tts_model_size", ("0b6", "1b7")),
        text=text,
        talker=talker,
        predictor=predictor,
        speaker=_speaker(fields.section("speaker_encoder_config")) if kind == "base" else None,
    )


def _codec_decoder(fields: Fields) -> CodecDecoderConfig:
    return CodecDecoderConfig(
        num_groups=fields.integer("num_quantizers", minimum=2, maximum=_MAX_GROUPS),
        codebook_size=fields.integer("codebook_size"),
        codebook_dim=fields.integer("codebook_dim", minimum=2),
        latent_dim=fields.integer("latent_dim"),
        stack=_stack(fields),
        sliding_window=fields.integer("sliding_window", minimum=2, maximum=_MAX_WINDOW),
        upsampling_ratios=fields.integers("upsampling_ratios"),
        decoder_dim=fields.integer("decoder_dim"),
        upsample_rates=fields.integers("upsample_rates"),
    )


def _codec_encoder(fields: Fields) -> CodecEncoderConfig:
    fields.require(
        audio_channels=1,
        hidden_act="gelu",
        num_residual_layers=1,
        num_semantic_quantizers=1,
        pad_mode="constant",
        use_causal_conv=True,
        use_conv_shortcut=False,
        attention_bias=False,
    )
    heads = fields.integer("num_attention_heads")
    if fields.integer("head_dim") % 2:
        raise fields.invalid("head_dim", "an even number")
    if fields.integer("num_key_value_heads") != heads:
        raise fields.invalid("num_key_value_heads", f"{heads}, as many as attention heads")
    return CodecEncoderConfig(
        num_filters=fields.integer("num_filters"),
        kernel_size=fields.integer("kernel_size"),
        residual_kernel_size=fields.integer("residual_kernel_size"),
        last_kernel_size=fields.integer("last_kernel_size"),
        compress=fields.integer("compress"),
        downsampling_ratios=fields.integers("upsampling_ratios"),
        stack=StackConfig(
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers", maximum=_MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=fields.integer("head_dim"),
            norm_eps=fields.number("norm_eps"),
            rope_theta=fields.number("rope_theta"),
        ),
        codebook_size=fields.integer("codebook_size"),
        codebook_dim=fields.integer("codebook_dim"),
        num_quantizers=fields.integer("num_quantizers", minimum=2),
    )


def read_codec_config(file: Path) -> CodecConfig:
    """Reads a checkpoint's `speech_tokenizer/config.json`.

    Raises:
        CheckpointError: A field is missing, has a wrong type, or has an unsupported value.
    """
    fields = Fields(read_json(file), file)
    fields.choice("model_type", ("qwen3_tts_tokenizer_12hz",))
    fields.require(input_sample_rate=24000, output_sample_rate=24000)
    samples_per_frame = fields.integer("decode_upsample_rate")
    decoder = _codec_decoder(fields.section("decoder_config"))
    encoder = _codec_encoder(fields.section("encoder_config"))
    upsampling = math.prod(decoder.upsample_rates) * math.prod(decoder.upsampling_ratios)
    if upsampling != samples_per_frame:
        raise fields.invalid("decode_upsample_rate", "the product of all of the decoder's rates")
    if 2 * math.prod(encoder.downsampling_ratios) != fields.integer("encode_downsample_rate"):
        raise fields.invalid("encode_downsample_rate", "twice the product of the encoder's ratios")
    if fields.integer("encode_downsample_rate") != samples_per_frame:
        expected = f"{samples_per_frame}, as decode_upsample_rate"
        raise fields.invalid("encode_downsample_rate", expected)
    if encoder.codebook_size != decoder.codebook_size:
        raise fields.invalid("encoder_config", f"a codebook_size of {decoder.codebook_size}")
    if fields.integer("encoder_valid_num_quantizers") != decoder.num_groups:
        expected = f"{decoder.num_groups}, as num_quantizers"
        raise fields.invalid("encoder_valid_num_quantizers", expected)
    if encoder.num_quantizers < decoder.num_groups:
        raise fields.invalid("encoder_config", f"at least {decoder.num_groups} quantizers")
    return CodecConfig(
        sample_rate=24000, samples_per_frame=samples_per_frame, decoder=decoder, encoder=encoder
    )
