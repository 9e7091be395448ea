"""Small recognisers with random weights, in the layout of transformers and as NeMo archives.

Tests and benchmarks use them. Their text is noise, but every tensor affects it. The same seed gives
the same bytes on every machine.
"""

import io
import json
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as BpeTokenizer

from megakernel_common.checkpoint import TensorSpec, leaves, map_leaves
from megakernel_stt.model.checkpoint import Model
from megakernel_stt.model.config import ModelConfig, read_model_config
from megakernel_stt.model.nemo import nemo_name
from megakernel_stt.model.weights import model_specs
from megakernel_stt.text.tokenizer import Tokenizer

Kind = Literal["streaming", "multilingual", "rnnt", "tdt"]

_MODEL_TYPES = {
    "streaming": "nemotron_asr_streaming",
    "multilingual": "nemotron3_5_asr",
    "rnnt": "parakeet_rnnt",
    "tdt": "parakeet_tdt",
}
_LOOKAHEADS = [13, 6, 3, 1, 0]
_PROMPTS = {"en-US": 0, "de-DE": 1, "auto": 3}
_DURATIONS = [0, 1, 2, 3, 4]


@dataclass(frozen=True)
class Size:
    """Sizes of a random recogniser; the defaults are tiny. The other sizes are the released ones.

    Attributes:
        hidden_size: Width of the encoder.
        num_layers: Of the encoder.
        num_heads: Of its attention.
        channels: Of its subsampling.
        num_mels: Bins of the features.
        decoder_size: Width of prediction and joint network.
        vocab_size: Token ids, blank included; at least 40.
        left_context: Frames of the past that attention sees.
    """

    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    channels: int = 8
    num_mels: int = 128
    decoder_size: int = 16
    vocab_size: int = 64
    left_context: int = 70


RELEASED_SIZE = Size(1024, 24, 8, 256, 128, 640, 1025)


def write_checkpoint(
    folder: Path,
    kind: Kind = "streaming",
    size: Size | None = None,
    *,
    bias: bool = False,
    blank_bias: float = 2.0,
    seed: int = 0,
) -> None:
    """Writes a recogniser with random weights as transformers saves it.

    Args:
        folder: Created if missing.
        kind: `streaming` and `multilingual` are cache-aware; `rnnt` and `tdt` are offline.
        size: Sizes; tiny if None.
        bias: Whether attention, feed-forward and convolution modules have biases.
        blank_bias: Added to the logit of blank: the higher it is, the fewer tokens there are.
        seed: Of the weights.
    """
    size = size or Size()
    config = _write_config(folder, kind, size, bias=bias)
    generator = np.random.RandomState(seed)  # its stream is guaranteed not to change
    tensors = {s.name: _random_tensor(s, generator) for s in leaves(model_specs(config))}
    tensors["joint.head.bias"][config.transducer.blank_id] += blank_bias
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def random_model(
    kind: Kind, size: Size, device: torch.device, dtype: torch.dtype, *, seed: int = 0
) -> Model:
    """A recogniser with random weights that are made on its device; for large ones.

    Args:
        kind: As in `write_checkpoint`.
        size: Sizes.
        device: Of the tensors. Another one has other weights.
        dtype: Of the tensors.
        seed: Of the weights.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def tensor(spec: TensorSpec) -> torch.Tensor:
        mean, deviation = _moments(spec)
        values = torch.randn(spec.shape, device=device, generator=generator) * deviation + mean
        return values.abs_().to(dtype) if _is_variance(spec) else values.to(dtype)

    with tempfile.TemporaryDirectory() as folder:
        config = _write_config(Path(folder), kind, size, bias=False)
        ids = config.transducer.vocab_size, config.transducer.blank_id
        tokenizer = Tokenizer.from_folder(Path(folder), *ids)
    return Model(config, map_leaves(model_specs(config), tensor), tokenizer)


def _write_config(folder: Path, kind: Kind, size: Size, *, bias: bool) -> ModelConfig:
    """Writes all files but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(kind, size, bias=bias))
    _write_json(folder / "processor_config.json", _processor(kind, size))
    _write_tokenizer(folder / "tokenizer.json", _pieces(size.vocab_size - 1))
    return read_model_config(folder)


def write_archive(file: Path, folder: Path) -> None:
    """Writes a recogniser of `write_checkpoint` as a NeMo archive.

    Args:
        file: The `.nemo` file.
        folder: Of the checkpoint.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    processor = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
    tensors = load_file(str(folder / "model.safetensors"))
    weights = io.BytesIO()
    torch.save({nemo_name(name): tensor for name, tensor in tensors.items()}, weights)
    pieces = _pieces(config["vocab_size"] - 1)
    contents = {
        "./model_config.yaml": yaml.safe_dump(_nemo_config(config, processor)).encode(),
        "./0a1b2c_tokenizer.model": _sentencepiece(pieces),
        "./model_weights.ckpt": weights.getvalue(),
    }
    with tarfile.open(file, "w:") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _random_tensor(spec: TensorSpec, generator: np.random.RandomState) -> torch.Tensor:
    """A float32 tensor of a spec."""
    mean, deviation = _moments(spec)
    values = generator.standard_normal(spec.shape) * deviation + mean
    if _is_variance(spec):
        values = np.abs(values)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _is_variance(spec: TensorSpec) -> bool:
    return spec.name.endswith(".running_var")


def _moments(spec: TensorSpec) -> tuple[float, float]:
    """Mean and deviation of a tensor, chosen so that every layer affects the output."""
    leaf, shape = spec.name.rsplit(".", 1)[-1], spec.shape
    mean, deviation = 0.0, 0.1
    if leaf == "running_var" or (leaf == "weight" and len(shape) == 1):
        mean = 1.0
    elif "embedding" in spec.name:
        deviation = 1.0
    elif len(shape) > 1 and not leaf.startswith("bias"):
        gain = 3.0 if "joint.head" in spec.name else 1.5
        deviation = gain / float(np.prod(shape[1:])) ** 0.5
    return mean, deviation


def _pieces(count: int) -> list[str]:
    """Pieces of words, punctuation, two bytes of a character, and a language tag."""
    pieces = ["<unk>", "▁", ".", ",", "?", "<0xC3>", "<0xA9>", "<en-US>", "▁the", "ing", "é"]
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pieces += [f"▁{letter}" for letter in letters[:12]]
    pieces += list(letters)
    pieces += [f"▁{a}{b}" for a in letters for b in letters]
    pieces += [f"{a}{b}{c}" for a in letters for b in letters for c in letters]
    return [*dict.fromkeys(pieces)][:count]  # "ing" is one of the last ones too


def _write_tokenizer(file: Path, pieces: list[str]) -> None:
    tokenizer = BpeTokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("<blank>")])
    tokenizer.save(str(file))


def _sentencepiece(pieces: list[str]) -> bytes:
    """The pieces as a SentencePiece model."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    message = b""
    for piece in pieces:
        kind = {"<unk>": 2}.get(piece, 6 if piece.startswith("<0x") else 1)
        message += field(
            1, field(1, piece.encode()) + bytes([2 << 3 | 5, 0, 0, 0, 0, 3 << 3, kind])
        )
    return message


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _config(kind: Kind, size: Size, *, bias: bool) -> dict[str, Any]:
    is_streaming = kind in ("streaming", "multilingual")
    encoder = {
        "model_type": "nemotron_asr_streaming_encoder" if is_streaming else "parakeet_encoder",
        "attention_bias": bias, "convolution_bias": bias, "conv_kernel_size": 9,
        "hidden_act": "silu", "hidden_size": size.hidden_size,
        "intermediate_size": 4 * size.hidden_size, "max_position_embeddings": 5000,
        "num_attention_heads": size.num_heads, "num_hidden_layers": size.num_layers,
        "num_mel_bins": size.num_mels, "scale_input": False, "subsampling_factor": 8,
        "subsampling_conv_channels": size.channels, "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
    }  # fmt: skip
    if is_streaming:
        encoder |= {"sliding_window": size.left_context + 1, "default_num_lookahead_tokens": 13}
    config = {
        "model_type": _MODEL_TYPES[kind], "blank_token_id": size.vocab_size - 1,
        "decoder_hidden_size": size.decoder_size, "hidden_act": "relu", "max_symbols_per_step": 10,
        "num_decoder_layers": 2, "vocab_size": size.vocab_size, "encoder_config": encoder,
    }  # fmt: skip
    if kind == "tdt":
        config["durations"] = _DURATIONS
    if kind == "multilingual":
        # As in an archive, where the width of the prompt's network follows from the encoder's.
        config |= {"num_prompts": 8, "default_prompt_id": 3}
        config["prompt_intermediate_size"] = 2 * size.hidden_size
    return config


def _processor(kind: Kind, size: Size) -> dict[str, Any]:
    features = {
        "feature_size": size.num_mels, "hop_length": 160, "n_fft": 512, "padding_value": 0.0,
        "preemphasis": 0.97, "sampling_rate": 16000, "win_length": 400,
    }  # fmt: skip
    processor: dict[str, Any] = {"feature_extractor": features, "blank_token": "<blank>"}
    if kind in ("streaming", "multilingual"):
        processor["supported_num_lookahead_tokens"] = _LOOKAHEADS
    if kind == "multilingual":
        processor["prompt_dictionary"] = _PROMPTS
    return processor


def _nemo_config(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    encoder = config["encoder_config"]
    lookaheads = processor.get("supported_num_lookahead_tokens")
    left_context = encoder.get("sliding_window", 0) - 1
    durations = config.get("durations")
    content: dict[str, Any] = {
        "sample_rate": 16000,
        "preprocessor": {
            "sample_rate": 16000, "normalize": "NA" if lookaheads else "per_feature",
            "window_size": 0.025, "window_stride": 0.01, "window": "hann",
            "features": encoder["num_mel_bins"], "n_fft": 512, "log": True, "frame_splicing": 1,
            "dither": 1e-5, "pad_to": 0,
        },
        "encoder": {
            "feat_in": encoder["num_mel_bins"], "feat_out": -1,
            "n_layers": encoder["num_hidden_layers"], "d_model": encoder["hidden_size"],
            "use_bias": encoder["attention_bias"], "subsampling": "dw_striding",
            "subsampling_factor": 8, "causal_downsampling": bool(lookaheads),
            "subsampling_conv_channels": encoder["subsampling_conv_channels"],
            "ff_expansion_factor": 4, "self_attention_model": "rel_pos",
            "n_heads": encoder["num_attention_heads"], "xscaling": encoder["scale_input"],
            "att_context_size": [[left_context, r] for r in lookaheads] if lookaheads else [-1, -1],
            "att_context_style": "chunked_limited" if lookaheads else "regular",
            "untie_biases": True, "pos_emb_max_len": 5000, "conv_kernel_size": 9,
            "conv_norm_type": "layer_norm" if lookaheads else "batch_norm",
            "conv_context_size": "causal" if lookaheads else None,
        },
        "decoder": {
            "normalization_mode": None, "blank_as_pad": True,
            "prednet": {"pred_hidden": config["decoder_hidden_size"], "pred_rnn_layers": 2},
        },
        "joint": {
            "num_classes": config["vocab_size"] - 1,
            "num_extra_outputs": len(durations or ()),
            "jointnet": {"joint_hidden": config["decoder_hidden_size"], "activation": "relu"},
        },
        "decoding": {
            "strategy": "greedy_batch", "greedy": {"max_symbols": 10},
            **({"durations": durations} if durations else {}),
        },
    }  # fmt: skip
    if "num_prompts" in config:
        content["model_defaults"] = {
            "num_prompts": config["num_prompts"],
            "prompt_dictionary": processor["prompt_dictionary"],
        }
    return content
