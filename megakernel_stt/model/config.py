"""Configuration of a recogniser: frozen dataclasses, read from a transformers folder.

A missing field, a wrong type or an impossible value raises a `CheckpointError` that names file and
field. Fields that would change the computation must have the implemented value. All other fields
are ignored. `megakernel_stt.model.nemo` reads the same dataclasses from a NeMo archive.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megakernel_common.fields import Fields, read_json

SAMPLE_RATE = 16_000  # Hz
HOP_SIZE = 160  # samples between two mel frames
MELS_PER_FRAME = 8  # mel frames of an encoder frame
FRAME_S = HOP_SIZE * MELS_PER_FRAME / SAMPLE_RATE  # of an encoder frame: 80 ms
NUM_STAGES = 3  # of the subsampling, each with stride 2

AUTO = "auto"  # the language that the model detects

# What an old file leaves out: the class defaults of transformers.
_LOOKAHEADS = (13, 6, 1, 0)
_PROMPT_IDS = {AUTO: 101}
_STREAMING_TYPES = ("nemotron_asr_streaming", "nemotron3_5_asr")
_OFFLINE_TYPES = ("parakeet_rnnt", "parakeet_tdt")
_MAX_LAYERS, _MAX_LOOKAHEAD, _MAX_DURATION = 256, 255, 255  # bounds on untrusted files


@dataclass(frozen=True)
class EncoderConfig:
    """The FastConformer encoder.

    Attributes:
        num_mels: Mel bins of its input.
        hidden_size: Width of its frames.
        intermediate_size: Width inside the feed-forward modules.
        num_layers: Conformer blocks.
        num_heads: Attention heads.
        conv_kernel_size: Of the depthwise convolution, odd.
        subsampling_channels: Channels of the subsampling.
        attention_bias: Whether attention and feed-forward have biases.
        convolution_bias: Whether the convolution modules have biases.
        scale_input: Whether the frames are multiplied by sqrt(hidden_size) after the subsampling.
        max_frames: Longest input of an offline encoder, in frames of 80 ms.
        streaming: None for an offline encoder.
    """

    num_mels: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    conv_kernel_size: int
    subsampling_channels: int
    attention_bias: bool
    convolution_bias: bool
    scale_input: bool
    max_frames: int
    streaming: "StreamingConfig | None"

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def subsampled_mels(self) -> int:
        """Mel bins that remain after the subsampling."""
        num_mels = self.num_mels
        for _ in range(NUM_STAGES):
            # A causal stage pads a bin more at the front and one at the back.
            num_mels = num_mels // 2 + 1 if self.streaming else (num_mels - 1) // 2 + 1
        return num_mels


@dataclass(frozen=True)
class StreamingConfig:
    """The context of a cache-aware encoder, in frames of 80 ms.

    Attributes:
        left_context: Frames before a chunk that its attention may see; whole chunks of them.
        lookaheads: Numbers of frames after the first of a chunk with which the model was trained.
    """

    left_context: int
    lookaheads: tuple[int, ...]


@dataclass(frozen=True)
class TransducerConfig:
    """Prediction network, joint network and greedy decoding.

    Attributes:
        vocab_size: Token ids, blank included.
        blank_id: The id that is no token.
        hidden_size: Width of the LSTM and of the joint network.
        num_layers: LSTM layers.
        max_symbols: Tokens of one frame, after which the next frame follows.
        durations: Frames that a token may last (TDT); None for RNN-T.
    """

    vocab_size: int
    blank_id: int
    hidden_size: int
    num_layers: int
    max_symbols: int
    durations: tuple[int, ...] | None


@dataclass(frozen=True)
class PromptConfig:
    """The language prompt of a multilingual model.

    Attributes:
        num_prompts: Width of the one-hot vector that is appended to every frame.
        intermediate_size: Width inside the network that merges it.
        ids: Language -> its index.
    """

    num_prompts: int
    intermediate_size: int
    ids: Mapping[str, int] = field(repr=False)


@dataclass(frozen=True)
class ModelConfig:
    """A recogniser.

    Attributes:
        encoder: The encoder.
        transducer: The decoder.
        prompt: None if the model has one language, or selects it itself.
        normalize: Whether every mel bin is normalised over the whole recording, which only an
            offline model can do.
    """

    encoder: EncoderConfig
    transducer: TransducerConfig
    prompt: PromptConfig | None
    normalize: bool

    @property
    def languages(self) -> tuple[str, ...]:
        """Values of `language` besides `auto`."""
        return tuple(name for name in self.prompt.ids if name != AUTO) if self.prompt else ()


def read_model_config(folder: Path) -> ModelConfig:
    """Reads `config.json` and the preprocessor's config of a folder that transformers saved.

    Raises:
        CheckpointError: A file is missing, or a value is not supported.
    """
    fields = Fields(read_json(folder / "config.json"), folder / "config.json")
    model_type = fields.choice("model_type", (*_STREAMING_TYPES, *_OFFLINE_TYPES))
    is_streaming = model_type in _STREAMING_TYPES
    processor = _read_processor(folder)
    streaming = _streaming(fields.section("encoder_config"), processor) if is_streaming else None
    prompt = _prompt(fields, processor) if model_type == "nemotron3_5_asr" else None
    encoder = _encoder(fields.section("encoder_config"), streaming)
    _check_features(folder, processor, encoder.num_mels)
    transducer = _transducer(fields, has_durations=model_type == "parakeet_tdt")
    return ModelConfig(encoder, transducer, prompt, normalize=not is_streaming)


def _read_processor(folder: Path) -> Fields:
    """The processor's config, which holds the lookaheads; empty if the folder has none."""
    file = folder / "processor_config.json"
    return Fields(read_json(file) if file.exists() else {}, file)


def _check_features(folder: Path, processor: Fields, num_mels: int) -> None:
    """Refuses features other than those of `megakernel_stt.network.features`."""
    file = folder / "preprocessor_config.json"
    if "feature_extractor" in processor.values:
        features = processor.section("feature_extractor")
    else:
        features = Fields(read_json(file), file)
    features.require(
        feature_size=num_mels,
        sampling_rate=SAMPLE_RATE,
        hop_length=HOP_SIZE,
        n_fft=512,
        win_length=400,
        preemphasis=0.97,
        padding_value=0.0,
        mel_filters_dtype="float32",
    )


def _encoder(fields: Fields, streaming: StreamingConfig | None) -> EncoderConfig:
    fields.require(
        hidden_act="silu",
        subsampling_factor=MELS_PER_FRAME,
        subsampling_conv_kernel_size=3,
        subsampling_conv_stride=2,
    )
    config = EncoderConfig(
        num_mels=fields.integer("num_mel_bins", default=80, minimum=8, maximum=1024),
        hidden_size=fields.integer("hidden_size", default=1024),
        intermediate_size=fields.integer("intermediate_size", default=4096),
        num_layers=fields.integer("num_hidden_layers", default=24, maximum=_MAX_LAYERS),
        num_heads=fields.integer("num_attention_heads", default=8),
        conv_kernel_size=fields.integer("conv_kernel_size", default=9, maximum=255),
        subsampling_channels=fields.integer("subsampling_conv_channels", default=256),
        attention_bias=boolean(fields, "attention_bias", default=True),
        convolution_bias=boolean(fields, "convolution_bias", default=True),
        scale_input=boolean(fields, "scale_input", default=True),
        max_frames=fields.integer("max_position_embeddings", default=5000),
        streaming=streaming,
    )
    return check_encoder(config, fields, "num_attention_heads", "conv_kernel_size")


def check_encoder(config: EncoderConfig, fields: Fields, heads: str, kernel: str) -> EncoderConfig:
    """Checks the sizes of an encoder against each other.

    Args:
        config: The encoder.
        fields: Where it was read, for messages.
        heads: Name of the number of heads there.
        kernel: Name of the kernel size there.

    Raises:
        CheckpointError: They do not fit each other.
    """
    if config.hidden_size % (2 * config.num_heads):
        raise fields.invalid(heads, f"a divisor of half the hidden size, {config.hidden_size} / 2")
    if config.conv_kernel_size % 2 == 0:
        raise fields.invalid(kernel, "an odd number")
    return config


def _streaming(fields: Fields, processor: Fields) -> StreamingConfig:
    left_context = fields.integer("sliding_window", default=71, minimum=2, maximum=4097) - 1
    name = "supported_num_lookahead_tokens"
    found = processor.values.get(name)
    lookaheads = list(_LOOKAHEADS) if found is None else found
    return StreamingConfig(left_context, check_lookaheads(lookaheads, processor, name))


def check_lookaheads(values: Any, fields: Fields, name: str) -> tuple[int, ...]:
    """Checks a list of lookaheads.

    Args:
        values: The list, in frames.
        fields: Where it was read, for messages.
        name: Its name there.

    Returns:
        The lookaheads in ascending order.

    Raises:
        CheckpointError: They are no distinct whole numbers of a reasonable size.
    """
    expected = f"a list of distinct whole numbers from 0 to {_MAX_LOOKAHEAD}"
    is_list = isinstance(values, list) and 0 < len(values) <= 16
    if not is_list or not all(type(v) is int and 0 <= v <= _MAX_LOOKAHEAD for v in values):
        raise fields.invalid(name, expected)
    if len(set(values)) < len(values):
        raise fields.invalid(name, expected)
    return tuple(sorted(values))


def _transducer(fields: Fields, *, has_durations: bool) -> TransducerConfig:
    fields.require(hidden_act="relu")
    vocab_size = fields.integer("vocab_size", minimum=2)
    durations = None
    if has_durations:
        durations = check_durations(fields.values.get("durations", [0, 1, 2, 3, 4]), fields)
    config = TransducerConfig(
        vocab_size=vocab_size,
        blank_id=fields.integer("blank_token_id", minimum=0, maximum=vocab_size - 1),
        hidden_size=fields.integer("decoder_hidden_size", default=640),
        num_layers=fields.integer("num_decoder_layers", default=2, maximum=16),
        max_symbols=fields.integer("max_symbols_per_step", default=10, maximum=1000),
        durations=durations,
    )
    return config


def check_durations(values: Any, fields: Fields, name: str = "durations") -> tuple[int, ...]:
    """Checks the durations of a TDT model.

    Args:
        values: The list, in frames.
        fields: Where it was read, for messages.
        name: Its name there.

    Raises:
        CheckpointError: They are no distinct whole numbers of a reasonable size.
    """
    is_list = isinstance(values, list | tuple) and 0 < len(values) <= 64
    if not is_list or not all(type(v) is int and 0 <= v <= _MAX_DURATION for v in values):
        raise fields.invalid(name, f"a list of whole numbers from 0 to {_MAX_DURATION}")
    return tuple(values)


def _prompt(fields: Fields, processor: Fields) -> PromptConfig:
    num_prompts = fields.integer("num_prompts", default=128, maximum=65536)
    default_id = fields.integer("default_prompt_id", 101, minimum=0, maximum=num_prompts - 1)
    ids = dict(_PROMPT_IDS)
    if processor.values.get("prompt_dictionary") is not None:
        ids = check_prompt_ids(processor, "prompt_dictionary", num_prompts)
    return PromptConfig(
        num_prompts,
        fields.integer("prompt_intermediate_size", default=2048),
        ids | {AUTO: default_id},
    )


def check_prompt_ids(fields: Fields, name: str, num_prompts: int) -> dict[str, int]:
    """Reads a table of languages, whose case is kept.

    Raises:
        CheckpointError: It is no object of names and indices below the number of prompts.
    """
    values = fields.section(name).values
    for language, index in values.items():
        is_index = type(index) is int and 0 <= index < num_prompts
        if not isinstance(language, str) or not is_index:  # YAML has names of other types
            raise fields.invalid(name, f"an object of languages and numbers below {num_prompts}")
    return dict(values)


def boolean(fields: Fields, name: str, *, default: bool) -> bool:
    """A boolean of a config.

    Raises:
        CheckpointError: The value has another type.
    """
    value = fields.values.get(name, default)
    if not isinstance(value, bool):
        raise fields.invalid(name, "true or false")
    return value
