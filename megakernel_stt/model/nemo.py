"""NeMo archives (`.nemo`): configuration, tensors and tokenizer, read in place.

An archive is an uncompressed tar with `model_config.yaml`, `model_weights.ckpt` and the tokenizer's
SentencePiece model. The weights are unpickled with `weights_only`, which runs no code of the file.
"""

import re
import tarfile
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import yaml
from torch import Tensor

from megakernel_common.checkpoint import TensorSpec, map_leaves
from megakernel_common.errors import CheckpointError
from megakernel_common.fields import Fields, check_regular
from megakernel_stt.model.config import (
    AUTO,
    HOP_SIZE,
    MELS_PER_FRAME,
    SAMPLE_RATE,
    EncoderConfig,
    ModelConfig,
    PromptConfig,
    StreamingConfig,
    TransducerConfig,
    boolean,
    check_durations,
    check_encoder,
    check_lookaheads,
    check_prompt_ids,
)
from megakernel_stt.text.tokenizer import Tokenizer

T = TypeVar("T")

_CONFIG, _WEIGHTS, _TOKENIZER = "model_config.yaml", "model_weights.ckpt", "tokenizer.model"
_MAX_TEXT_BYTES = 16 << 20  # of the config and of the tokenizer

# Names of transformers -> names of NeMo; the first pattern that matches decides.
_NAMES = (
    (r"encoder\.subsampling\.conv_in\.", "encoder.pre_encode.conv.0."),
    (r"encoder\.subsampling\.layers\.0\.depthwise_conv\.", "encoder.pre_encode.conv.2."),
    (r"encoder\.subsampling\.layers\.0\.pointwise_conv\.", "encoder.pre_encode.conv.3."),
    (r"encoder\.subsampling\.layers\.1\.depthwise_conv\.", "encoder.pre_encode.conv.5."),
    (r"encoder\.subsampling\.layers\.1\.pointwise_conv\.", "encoder.pre_encode.conv.6."),
    (r"encoder\.subsampling\.layers\.", "encoder.pre_encode.conv."),
    (r"encoder\.subsampling\.linear\.", "encoder.pre_encode.out."),
    (r"(.*)\.self_attn\.relative_k_proj\.", r"\1.self_attn.linear_pos."),
    (r"(.*)\.self_attn\.([qkv])_proj\.", r"\1.self_attn.linear_\2."),
    (r"(.*)\.self_attn\.o_proj\.", r"\1.self_attn.linear_out."),
    (r"(.*)\.self_attn\.bias_", r"\1.self_attn.pos_bias_"),
    (r"(.*)\.conv\.norm\.", r"\1.conv.batch_norm."),
    (r"encoder_projector\.", "joint.enc."),
    (r"prompt_projector\.linear_1\.", "prompt_kernel.0."),
    (r"prompt_projector\.linear_2\.", "prompt_kernel.2."),
    (r"decoder\.embedding\.", "decoder.prediction.embed."),
    (r"decoder\.lstm\.", "decoder.prediction.dec_rnn.lstm."),
    (r"decoder\.decoder_projector\.", "joint.pred."),
    (r"joint\.head\.", "joint.joint_net.2."),
)


def nemo_name(name: str) -> str:
    """The name of a tensor in NeMo.

    Args:
        name: Its name in transformers.
    """
    for pattern, replacement in _NAMES:
        renamed, count = re.subn(f"^{pattern}", replacement, name)
        if count:
            return renamed
    return name


class NemoArchive:
    """A `.nemo` file."""

    def __init__(self, file: Path) -> None:
        """Reads the directory of the archive.

        Raises:
            CheckpointError: It is no uncompressed tar, or a member is missing.
        """
        self.file = file
        check_regular(file)
        try:
            with tarfile.open(file, "r:") as archive:
                members = [member for member in archive.getmembers() if member.isreg()]
        except (OSError, tarfile.TarError, ValueError) as error:
            raise CheckpointError(
                f"{file}: not readable as an uncompressed tar, which a .nemo file is ({error})."
            ) from error
        self._members: dict[str, tarfile.TarInfo] = {}
        for name in (_CONFIG, _WEIGHTS, _TOKENIZER):
            found = [m for m in members if _is_named(Path(m.name).name, name)]
            if not found:
                raise CheckpointError(f"{file}: the member {name} is missing from the archive.")
            self._members[name] = found[0]

    def config(self) -> ModelConfig:
        """Reads the configuration.

        Raises:
            CheckpointError: A field is missing, or a value is not supported.
        """
        try:
            content = yaml.safe_load(self._read(_CONFIG).decode())
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise CheckpointError(f"{self.file}: {_CONFIG} is not YAML ({error}).") from error
        return _read_config(Fields(content, self.file / _CONFIG))

    def load(self, tree: T, device: torch.device, dtype: torch.dtype) -> T:
        """Loads the tensors of a tree of specs.

        Args:
            tree: Dataclasses with `TensorSpec` leaves, named as in transformers.
            device: Of the tensors.
            dtype: Of the tensors.

        Returns:
            The same tree with tensors as leaves.

        Raises:
            CheckpointError: The file is no archive of tensors, or one is missing or has another
                shape or type.
        """
        try:
            with self._open(_WEIGHTS) as stream:
                tensors = torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file raises whatever its operations raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise CheckpointError(
                f"{self.file}: {_WEIGHTS} is not readable as a file of tensors ({reason})."
            ) from error
        if not isinstance(tensors, dict):
            raise CheckpointError(f"{self.file}: {_WEIGHTS} holds no dictionary of tensors.")

        def read(leaf: TensorSpec) -> Tensor:
            name = nemo_name(leaf.name)
            tensor = tensors.get(name)
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"{self.file}: the tensor {name} is missing from {_WEIGHTS}; expected shape "
                    f"{list(leaf.shape)}."
                )
            if tuple(tensor.shape) != leaf.shape or not tensor.is_floating_point():
                raise CheckpointError(
                    f"{self.file}: {name} has shape {list(tensor.shape)} and type {tensor.dtype}; "
                    f"expected floats of shape {list(leaf.shape)}."
                )
            return tensor.to(device=device, dtype=dtype)

        return map_leaves(tree, read)

    def tokenizer(self, vocab_size: int, blank_id: int) -> Tokenizer:
        """Reads the tokenizer.

        Args:
            vocab_size: Token ids of the model, blank included.
            blank_id: The id that is no token.

        Raises:
            CheckpointError: It is no SentencePiece model, or has another number of tokens.
        """
        file = self.file / _TOKENIZER
        return Tokenizer.from_sentencepiece(self._read(_TOKENIZER), file, vocab_size, blank_id)

    def _read(self, name: str) -> bytes:
        """Reads a small member."""
        if self._members[name].size > _MAX_TEXT_BYTES:
            raise CheckpointError(f"{self.file}: {name} has more than {_MAX_TEXT_BYTES} bytes.")
        try:
            with self._open(name) as stream:
                return stream.read()
        except OSError as error:
            raise CheckpointError(f"{self.file}: {name} is not readable ({error}).") from error

    def _open(self, name: str) -> IO[bytes]:
        """Opens a member in place. Closing it closes the archive."""
        return _Member(self.file, self._members[name])


class _Member(tarfile.ExFileObject):
    """A member of an archive as a file, which owns the archive."""

    def __init__(self, file: Path, member: tarfile.TarInfo) -> None:
        self._archive = tarfile.open(file, "r:")  # closed below
        super().__init__(self._archive, member)

    def close(self) -> None:
        super().close()
        self._archive.close()


def _is_named(name: str, expected: str) -> bool:
    """Whether a member has the name; NeMo puts a digest before that of the tokenizer."""
    return name == expected or (expected == _TOKENIZER and name.endswith(f"_{expected}"))


def _read_config(fields: Fields) -> ModelConfig:
    encoder_fields = fields.section("encoder")
    encoder = _encoder(encoder_fields)
    preprocessor = fields.section("preprocessor")
    preprocessor.require(
        sample_rate=SAMPLE_RATE,
        window_size=0.025,
        window_stride=HOP_SIZE / SAMPLE_RATE,
        window="hann",
        features=encoder.num_mels,
        n_fft=512,
        log=True,
        frame_splicing=1,
    )
    normalize = preprocessor.values.get("normalize") == "per_feature"
    if normalize == (encoder.streaming is not None):
        expected = "NA" if encoder.streaming else "per_feature"
        raise preprocessor.invalid("normalize", f"{expected} for this kind of encoder")
    prompt = None
    defaults = fields.values.get("model_defaults")
    if isinstance(defaults, dict) and "prompt_dictionary" in defaults:
        prompt = _prompt(fields.section("model_defaults"), encoder.hidden_size)
    return ModelConfig(encoder, _transducer(fields), prompt, normalize)


def _encoder(fields: Fields) -> EncoderConfig:
    is_streaming = boolean(fields, "causal_downsampling", default=False)
    fields.require(
        subsampling="dw_striding",
        subsampling_factor=MELS_PER_FRAME,
        self_attention_model="rel_pos",
        untie_biases=True,
        conv_norm_type="layer_norm" if is_streaming else "batch_norm",
        att_context_style="chunked_limited" if is_streaming else "regular",
    )
    if fields.values.get("conv_context_size") != ("causal" if is_streaming else None):
        raise fields.invalid("conv_context_size", "causal if the subsampling is, else null")
    use_bias = boolean(fields, "use_bias", default=True)
    hidden_size = fields.integer("d_model")
    config = EncoderConfig(
        num_mels=fields.integer("feat_in", minimum=8, maximum=1024),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * fields.integer("ff_expansion_factor", 4, maximum=64),
        num_layers=fields.integer("n_layers", maximum=256),
        num_heads=fields.integer("n_heads"),
        conv_kernel_size=fields.integer("conv_kernel_size", maximum=255),
        subsampling_channels=fields.integer("subsampling_conv_channels"),
        attention_bias=use_bias,
        convolution_bias=use_bias,
        scale_input=boolean(fields, "xscaling", default=True),
        max_frames=fields.integer("pos_emb_max_len", default=5000),
        streaming=_streaming(fields) if is_streaming else None,
    )
    return check_encoder(config, fields, "n_heads", "conv_kernel_size")


def _streaming(fields: Fields) -> StreamingConfig:
    """Reads pairs of left and right context: one, or those of a model with several lookaheads."""
    name = "att_context_size"
    value: Any = fields.values.get(name)
    pairs = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    expected = "pairs of left and right context with the same left context"
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise fields.invalid(name, expected)
    left_contexts = [pair[0] for pair in pairs]
    left = left_contexts[0]
    if type(left) is not int or not 1 <= left <= 4096 or left_contexts != [left] * len(pairs):
        raise fields.invalid(name, expected)
    return StreamingConfig(left, check_lookaheads([pair[1] for pair in pairs], fields, name))


def _transducer(fields: Fields) -> TransducerConfig:
    decoder, joint = fields.section("decoder"), fields.section("joint")
    network, jointnet = decoder.section("prednet"), joint.section("jointnet")
    decoder.require(blank_as_pad=True)
    decoder_norm = decoder.values.get("normalization_mode")
    if decoder_norm is not None:
        raise decoder.invalid("normalization_mode", "null, the only one implemented")
    hidden_size = network.integer("pred_hidden")
    jointnet.require(activation="relu", joint_hidden=hidden_size)
    num_tokens = joint.integer("num_classes", minimum=1)
    decoding = fields.section("decoding")
    durations = None
    if joint.values.get("num_extra_outputs"):
        durations = check_durations(decoding.values.get("durations"), decoding)
        joint.require(num_extra_outputs=len(durations))
    greedy = decoding.section("greedy") if "greedy" in decoding.values else Fields({}, fields.file)
    return TransducerConfig(
        vocab_size=num_tokens + 1,
        blank_id=num_tokens,
        hidden_size=hidden_size,
        num_layers=network.integer("pred_rnn_layers", default=1, maximum=16),
        max_symbols=greedy.integer("max_symbols", default=10, maximum=1000),
        durations=durations,
    )


def _prompt(fields: Fields, hidden_size: int) -> PromptConfig:
    num_prompts = fields.integer("num_prompts", default=128, maximum=65536)
    ids = check_prompt_ids(fields, "prompt_dictionary", num_prompts)
    if AUTO not in ids:
        raise fields.invalid("prompt_dictionary", f"a table with the language {AUTO}")
    return PromptConfig(num_prompts, 2 * hidden_size, ids)
