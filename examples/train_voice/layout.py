"""The folder that becomes the voice: configs and tokenizer files in the released layout."""

import json
from dataclasses import dataclass
from pathlib import Path

from megakernel_tts.model.config import (
    CodecConfig,
    ModelConfig,
    read_codec_config,
    read_model_config,
)
from megakernel_tts.model.random_checkpoint import (
    small_codec_config,
    small_model_config,
    write_configs,
    write_tokenizer,
)

CODES = 256
VOICES = {"clara": "slt", "henry": "rms"}  # speaker -> flite's voice
_ROWS = {"clara": 1274, "henry": 1269}  # of the codec embedding, among the control ids


@dataclass(frozen=True)
class Sizes:
    """Widths and depths; everything else is the architecture's."""

    hidden: int
    layers: int
    intermediate: int
    predictor_hidden: int
    predictor_intermediate: int
    filters: int  # of the codec's encoder
    latent: int  # of the codec, its transformers included
    codebook: int  # entries' width on the decoder's side; half of it in the codebooks
    decoder: int


FULL = Sizes(256, 6, 576, 256, 512, filters=16, latent=128, codebook=96, decoder=256)
TINY = Sizes(32, 2, 32, 32, 32, filters=2, latent=32, codebook=16, decoder=16)


@dataclass(frozen=True)
class Work:
    """Where a run keeps its files."""

    folder: Path

    @property
    def corpus(self) -> Path:
        """The texts, one a line."""
        return self.folder / "corpus.txt"

    @property
    def recordings(self) -> Path:
        """The folder of synthetic speech."""
        return self.folder / "recordings"

    @property
    def voice(self) -> Path:
        """The checkpoint."""
        return self.folder / "voice"

    @property
    def codes(self) -> Path:
        """What the codec makes of the recordings."""
        return self.folder / "codes.npz"

    def state(self, stage: str) -> Path:
        """A training's state."""
        return self.folder / f"{stage}.pt"

    def log(self, stage: str) -> Path:
        """A training's figures, a JSON object a line."""
        return self.folder / f"{stage}.jsonl"

    def texts(self) -> list[str]:
        """The corpus."""
        return self.corpus.read_text(encoding="utf-8").splitlines()

    def model_config(self) -> ModelConfig:
        """The checkpoint's numbers."""
        return read_model_config(self.voice / "config.json")

    def codec_config(self) -> CodecConfig:
        """The codec's numbers."""
        return read_codec_config(self.voice / "speech_tokenizer" / "config.json")


def write_folder(folder: Path, vocab: dict[str, int], merges: list[str], sizes: Sizes) -> None:
    """Writes everything of a checkpoint but its tensors.

    Args:
        folder: The checkpoint.
        vocab: Of the byte-level BPE.
        merges: In its order.
        sizes: Of the networks.
    """
    (folder / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    specials = write_tokenizer(folder, vocab, merges)
    model = small_model_config("custom_voice", "0b6", CODES, vocab, specials)
    talker = model["talker_config"]
    talker |= {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.intermediate,
        "text_hidden_size": sizes.hidden // 2,
        "text_vocab_size": -(-(len(vocab) + len(specials)) // 8) * 8,
        "codec_language_id": {"english": talker["codec_language_id"]["english"]},
        "spk_id": _ROWS,
        "spk_is_dialect": dict.fromkeys(_ROWS, False),
    }
    talker["code_predictor_config"] |= {
        "hidden_size": sizes.predictor_hidden,
        "intermediate_size": sizes.predictor_intermediate,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    codec = small_codec_config(CODES)
    attention = {
        "hidden_size": sizes.latent,
        "intermediate_size": 2 * sizes.latent,
        "head_dim": sizes.latent // 4,
    }
    codec["decoder_config"] |= attention | {
        "num_hidden_layers": 3,
        "latent_dim": sizes.latent,
        "codebook_dim": sizes.codebook,
        "decoder_dim": sizes.decoder,
        "vector_quantization_hidden_dimension": sizes.codebook,
    }
    codec["encoder_config"] |= attention | {
        "num_filters": sizes.filters,
        "codebook_dim": sizes.codebook // 2,
        "vector_quantization_hidden_dimension": sizes.codebook // 2,
        "upsample_groups": sizes.latent,
    }
    write_configs(folder, model, codec)


def summary(document: str | None) -> str:
    """The first line of a module's documentation."""
    return (document or "").splitlines()[0]


def append_json(file: Path, content: dict[str, float]) -> None:
    """Adds a line of figures to a log."""
    with file.open("a", encoding="utf-8") as log:
        log.write(json.dumps({k: round(v, 4) for k, v in content.items()}) + "\n")
