"""Configs of the released sizes, whose weights are drawn at random."""

import json
from pathlib import Path
from typing import Any

import torch

from megakernel_tts.checkpoint import map_leaves
from megakernel_tts.codec import weights as w
from megakernel_tts.config import CodecConfig, read_codec_config
from megakernel_tts.random_checkpoint import codec_config, random_tensor

_STACK = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_PREDICTOR = _STACK | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5, "vocab_size": 2048,
}  # fmt: skip
_TALKER = _STACK | {
    "num_hidden_layers": 28, "vocab_size": 3072, "text_vocab_size": 151936,
    "text_hidden_size": 2048,
}  # fmt: skip
_CODEC = {
    "latent_dim": 1024, "codebook_dim": 512, "decoder_dim": 1536, "hidden_size": 512,
    "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 8,
}  # fmt: skip


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


def released_codec(
    file: Path, seed: int, device: torch.device | None = None
) -> tuple[w.Decoder, CodecConfig]:
    """The codec's decoder of the released size, with random weights.

    Args:
        file: Where its config is written.
        seed: Of the weights.
        device: Where they go; by default the GPU.

    Returns:
        The weights in float32, and the codec's numbers.
    """
    content = codec_config(2048)
    content["decoder_config"] |= _CODEC
    file.write_text(json.dumps(content))
    config = read_codec_config(file)
    device = device or torch.device("cuda")
    specs = w.decoder_specs(config.decoder)
    return map_leaves(specs, lambda spec: random_tensor(spec, seed).to(device)), config
