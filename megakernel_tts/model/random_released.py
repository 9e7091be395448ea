"""Checkpoints of the released sizes with random weights, for benchmarks without a download.

They run at the speed of the released models. Their speech is noise.

python -m megakernel_tts.model.random_released /tmp/random-0.6B --size 0.6B
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megakernel_common.checkpoint import TensorSpec, leaves, map_leaves
from megakernel_tts.codec.weights import DecoderWeights, decoder_specs
from megakernel_tts.model.config import CodecConfig, read_codec_config, read_model_config
from megakernel_tts.model.random_checkpoint import (
    Size,
    mean_and_deviation,
    random_tensor,
    small_codec_config,
    write_checkpoint,
)
from megakernel_tts.model.weights import model_specs

SIZES: dict[str, tuple[Size, int, int]] = {  # -> name in config.json, hidden, intermediate size
    "0.6B": ("0b6", 1024, 3072),
    "1.7B": ("1b7", 2048, 6144),
}

_STACK = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_PREDICTOR = _STACK | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5, "vocab_size": 2048,
    "layer_types": ["full_attention"] * 5,
}  # fmt: skip
_TALKER = _STACK | {
    "num_hidden_layers": 28, "vocab_size": 3072, "text_vocab_size": 151936,
    "text_hidden_size": 2048,
}  # fmt: skip
# Words of the benchmark's texts. Each is one token, as common words are of the released vocabulary.
_WORDS = (
    "Hello", " it", " is", " good", " to", " hear", " you", " It", " a", " fine", " day", " the",
    " sun", " shining", " and", " we", " have", " all", " time", " need",
)  # fmt: skip
_CODEC = {
    "latent_dim": 1024, "codebook_dim": 512, "codebook_size": 2048, "decoder_dim": 1536,
    "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 8,
}  # fmt: skip


def write_released_config(source: Path, target: Path, hidden: int, intermediate: int) -> Path:
    """Writes a `config.json` of a released size.

    Args:
        source: The config.json of a small checkpoint.
        target: The file to write.
        hidden: Hidden size of the talker: 1,024 for the 0.6B, 2,048 for the 1.7B.
        intermediate: Intermediate size of the talker: 3,072 or 6,144.

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


def write_released_codec_config(source: Path, target: Path) -> Path:
    """Writes the config of the released codec's decoder; the encoder keeps its small size.

    Args:
        source: The config.json of a small codec.
        target: The file to write.

    Returns:
        The target.
    """
    content = json.loads(source.read_text(encoding="utf-8"))
    content["decoder_config"] |= _CODEC
    content["encoder_config"]["codebook_size"] = _CODEC["codebook_size"]
    target.write_text(json.dumps(content))
    return target


def random_codec_weights(
    file: Path, seed: int, device: torch.device | None = None
) -> tuple[DecoderWeights, CodecConfig]:
    """The codec's decoder in the released size, with random weights.

    Args:
        file: Where the config is written.
        seed: Of the weights.
        device: Of the weights; by default the GPU.

    Returns:
        The weights in float32, and the codec's config.
    """
    file.write_text(json.dumps(small_codec_config(2048)))
    config = read_codec_config(write_released_codec_config(file, file))
    target = device or torch.device("cuda")
    specs = decoder_specs(config.decoder)
    return map_leaves(specs, lambda spec: random_tensor(spec, seed).to(target)), config


def write_released_checkpoint(folder: Path, size: str, device: torch.device) -> None:
    """Writes a CustomVoice checkpoint of a released size, 2 to 4 GB.

    Args:
        folder: Created if missing; an existing checkpoint in it is overwritten.
        size: `0.6B` or `1.7B`.
        device: Generates the weights.
    """
    name, hidden, intermediate = SIZES[size]
    codec = folder / "speech_tokenizer"
    write_checkpoint(folder, "custom_voice", name, codes=2048, words=_WORDS)
    model = read_model_config(
        write_released_config(folder / "config.json", folder / "config.json", hidden, intermediate)
    )
    decoder = read_codec_config(
        write_released_codec_config(codec / "config.json", codec / "config.json")
    )
    generator = torch.Generator(device).manual_seed(0)

    def random_weight(spec: TensorSpec) -> Tensor:
        if spec.name.endswith("cluster_usage"):  # a divisor, so not near 0
            return torch.rand(spec.shape, device=device, generator=generator) * 3 + 0.5
        mean, deviation = mean_and_deviation(spec)
        noise = torch.randn(spec.shape, device=device, generator=generator)
        return noise.mul_(deviation).add_(mean)

    def save(specs: object, file: Path, dtype: torch.dtype) -> None:
        weights = {spec.name: random_weight(spec).to("cpu", dtype) for spec in leaves(specs)}
        save_file(weights, str(file), metadata={"format": "pt"})

    save(model_specs(model), folder / "model.safetensors", torch.bfloat16)
    save(decoder_specs(decoder.decoder), codec / "model.safetensors", torch.float32)


def main() -> None:
    """Writes the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_released_checkpoint(options.folder, options.size, device)


if __name__ == "__main__":
    main()
