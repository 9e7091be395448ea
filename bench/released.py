"""Configs and checkpoints of the released sizes, whose weights are drawn at random."""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megakernel_tts.checkpoint import Spec, leaves
from megakernel_tts.codec.weights import decoder_specs
from megakernel_tts.config import read_codec_config, read_model_config
from megakernel_tts.random_checkpoint import Size, write_checkpoint
from megakernel_tts.weights import model_specs

_STACK = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_PREDICTOR = _STACK | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5, "vocab_size": 2048,
}  # fmt: skip
_TALKER = _STACK | {
    "num_hidden_layers": 28, "vocab_size": 3072, "text_vocab_size": 151936,
    "text_hidden_size": 2048,
}  # fmt: skip
_CODEC = {
    "latent_dim": 1024, "codebook_dim": 512, "codebook_size": 2048, "decoder_dim": 1536,
    "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 8,
}  # fmt: skip
SIZES: dict[Size, tuple[int, int]] = {"0b6": (1024, 3072), "1b7": (2048, 6144)}


def released(source: Path, target: Path, hidden: int, intermediate: int) -> Path:
    """Writes a config of a released size.

    Args:
        source: A small checkpoint's config.json.
        target: The file to write.
        hidden: 1,024 for the 0.6B, 2,048 for the 1.7B.
        intermediate: 3,072 or 6,144.

    Returns:
        The target.
    """
    content = json.loads(source.read_text(encoding="utf-8"))
    talker = content["talker_config"]
    shift = 2048 - (talker["vocab_size"] - 1024)
    ids: dict[str, Any] = {
        name: value + shift
        for name, value in talker.items()
        if name.startswith("codec_") and name.endswith("_id") and isinstance(value, int)
    }
    talker |= _TALKER | ids | {"hidden_size": hidden, "intermediate_size": intermediate}
    talker["code_predictor_config"] |= _PREDICTOR
    if "speaker_encoder_config" in content:
        content["speaker_encoder_config"] = {"enc_dim": hidden, "sample_rate": 24000}
    target.write_text(json.dumps(content))
    return target


def released_codec(source: Path, target: Path) -> Path:
    """Writes the codec's config of the release.

    Args:
        source: A small codec's config.json.
        target: The file to write.

    Returns:
        The target.
    """
    content = json.loads(source.read_text(encoding="utf-8"))
    content["decoder_config"] |= _CODEC
    content["encoder_config"]["codebook_size"] = _CODEC["codebook_size"]
    target.write_text(json.dumps(content))
    return target


def write_released(folder: Path, size: Size) -> None:
    """Writes a CustomVoice checkpoint of a released size, its codec's encoder left small.

    Args:
        folder: Is made.
        size: Of the release.
    """
    write_checkpoint(folder, "custom_voice", size, codes=2048)
    codec = folder / "speech_tokenizer"
    model = read_model_config(
        released(folder / "config.json", folder / "config.json", *SIZES[size])
    )
    decoder = read_codec_config(released_codec(codec / "config.json", codec / "config.json"))
    _save(folder, leaves(model_specs(model)), torch.bfloat16)
    _save(codec, leaves(decoder_specs(decoder.decoder)), torch.float32)


def _save(folder: Path, specs: Iterator[Spec], dtype: torch.dtype) -> None:
    """Few numbers, drawn once and used again and again: nobody listens."""
    noise = torch.randn((1 << 20) + 1, generator=torch.Generator().manual_seed(0)).to(dtype)

    def weight(spec: Spec) -> Tensor:
        count = prod(spec.shape)
        values = noise.repeat(-(-count // len(noise)))[:count].view(spec.shape)
        return 1.0 + 0.1 * values if len(spec.shape) == 1 else 0.02 * values

    save_file({spec.name: weight(spec) for spec in specs}, str(folder / "model.safetensors"))
