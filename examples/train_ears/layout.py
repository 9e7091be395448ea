"""Folders of a run, and the checkpoint's configuration and tokenizer in the released layout."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megakernel_stt.model.config import HOP_SIZE, SAMPLE_RATE, ModelConfig, read_model_config

LOOKAHEADS = (0, 1, 3, 6, 13)  # frames of 80 ms
LEFT_CONTEXT = 70  # frames


@dataclass(frozen=True)
class Sizes:
    """Widths and depths of the network.

    Attributes:
        hidden: Width of the encoder; its feed-forward modules have four times as much.
        layers: Conformer blocks.
        heads: Attention heads.
        channels: Of the subsampling.
        mels: Bins of the features.
        decoder: Width of prediction and joint network.
        vocab: Token ids, blank included.
    """

    hidden: int
    layers: int
    heads: int
    channels: int
    mels: int
    decoder: int
    vocab: int


FULL = Sizes(hidden=256, layers=10, heads=4, channels=64, mels=80, decoder=256, vocab=512)
TINY = Sizes(hidden=32, layers=2, heads=2, channels=8, mels=32, decoder=32, vocab=64)


@dataclass(frozen=True)
class Work:
    """Files of a run. Corpus and phonemes have the format of the voice's recipe."""

    folder: Path

    @property
    def targets(self) -> Path:
        """File of what the recogniser shall write: a line for each text of the corpus."""
        return self.folder / "targets.txt"

    @property
    def recordings(self) -> Path:
        """Folder of synthetic speech."""
        return self.folder / "ears_recordings"

    @property
    def held_out(self) -> Path:
        """File of the held-out sentences in held-out voices, in a shard's format."""
        return self.folder / "ears_held_out.npz"

    @property
    def ears(self) -> Path:
        """Folder of the checkpoint."""
        return self.folder / "ears"

    @property
    def state(self) -> Path:
        """File of the training state."""
        return self.folder / "ears.pt"

    @property
    def log(self) -> Path:
        """File of the training's metrics, one JSON object per line."""
        return self.folder / "ears.jsonl"

    def config(self) -> ModelConfig:
        """Configuration of the checkpoint."""
        return read_model_config(self.ears)

    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the checkpoint."""
        return Tokenizer.from_file(str(self.ears / "tokenizer.json"))


def write_folder(folder: Path, tokenizer: Tokenizer, sizes: Sizes) -> None:
    """Writes all files of a checkpoint except its tensors.

    Args:
        folder: Created if missing.
        tokenizer: Of at most `sizes.vocab` ids, of which the last is blank.
        sizes: Sizes of the network; the vocabulary is as large as the tokenizer's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    _write_json(folder / "config.json", _config(sizes, vocab_size))
    _write_json(folder / "generation_config.json", {"decoder_start_token_id": vocab_size - 1})
    _write_json(folder / "processor_config.json", _processor(sizes))


def _config(sizes: Sizes, vocab_size: int) -> dict[str, Any]:
    encoder = {
        "model_type": "nemotron_asr_streaming_encoder",
        "attention_bias": False, "convolution_bias": False, "conv_kernel_size": 9,
        "hidden_act": "silu", "hidden_size": sizes.hidden,
        "intermediate_size": 4 * sizes.hidden, "max_position_embeddings": 5000,
        "num_attention_heads": sizes.heads, "num_hidden_layers": sizes.layers,
        "num_mel_bins": sizes.mels, "scale_input": False, "sliding_window": LEFT_CONTEXT + 1,
        "default_num_lookahead_tokens": LOOKAHEADS[-1], "subsampling_factor": 8,
        "subsampling_conv_channels": sizes.channels, "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
    }  # fmt: skip
    return {
        "model_type": "nemotron_asr_streaming", "blank_token_id": vocab_size - 1,
        "decoder_hidden_size": sizes.decoder, "hidden_act": "relu", "max_symbols_per_step": 10,
        "num_decoder_layers": 1, "vocab_size": vocab_size, "encoder_config": encoder,
    }  # fmt: skip


def _processor(sizes: Sizes) -> dict[str, Any]:
    features = {
        "feature_size": sizes.mels, "hop_length": HOP_SIZE, "n_fft": 512, "padding_value": 0.0,
        "preemphasis": 0.97, "sampling_rate": SAMPLE_RATE, "win_length": 400,
    }  # fmt: skip
    return {
        "feature_extractor": features,
        "blank_token": "<blank>",
        "supported_num_lookahead_tokens": list(LOOKAHEADS),
    }


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
