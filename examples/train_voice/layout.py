"""Folders of a run, and the checkpoint's configuration and tokenizer in the released layout."""

import json
from dataclasses import dataclass
from pathlib import Path

from examples.train_voice.phonemes import LANGUAGES, VOICES
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
# With the temperatures of the released models, 0.9 and 0.9, a small predictor is less intelligible.
SAMPLING = {"temperature": 0.8, "subtalker_temperature": 0.3}


@dataclass(frozen=True)
class Sizes:
    """Widths and depths of the networks."""

    hidden: int
    layers: int
    intermediate: int
    predictor_hidden: int
    predictor_intermediate: int
    filters: int  # of the codec's encoder
    latent: int  # width of the codec's transformers
    codebook: int  # width of entries in the decoder; half of it in the codebooks
    decoder: int


FULL = Sizes(256, 8, 512, 256, 512, filters=16, latent=128, codebook=96, decoder=384)
TINY = Sizes(32, 2, 32, 32, 32, filters=2, latent=32, codebook=16, decoder=16)


@dataclass(frozen=True)
class Work:
    """Files of a run."""

    folder: Path

    @property
    def corpus(self) -> Path:
        """File of the corpus: a voice, a tab and a text per line."""
        return self.folder / "corpus.tsv"

    @property
    def phonemes(self) -> Path:
        """File of the texts' phonemes: words separated by `|`, a text per line."""
        return self.folder / "phonemes.txt"

    @property
    def held_out_phonemes(self) -> Path:
        """File of the phonemes of the held-out sentences, in the same format."""
        return self.folder / "held_out_phonemes.txt"

    @property
    def held_out_speech(self) -> Path:
        """File of the teacher's recordings of the held-out sentences, in a shard's format."""
        return self.folder / "held_out.npz"

    @property
    def spoken(self) -> Path:
        """File of the codes of the trained voice's speech of the held-out sentences."""
        return self.folder / "spoken.npz"

    @property
    def ends(self) -> Path:
        """File of how the trained voice's speech ends."""
        return self.folder / "ends.json"

    @property
    def recordings(self) -> Path:
        """Folder of synthetic speech."""
        return self.folder / "recordings"

    @property
    def voice(self) -> Path:
        """Folder of the checkpoint."""
        return self.folder / "voice"

    @property
    def codes(self) -> Path:
        """File of the recordings' codes."""
        return self.folder / "codes.npz"

    def state(self, stage: str) -> Path:
        """File of a stage's training state."""
        return self.folder / f"{stage}.pt"

    def log(self, stage: str) -> Path:
        """File of a stage's metrics, one JSON object per line."""
        return self.folder / f"{stage}.jsonl"

    def texts(self) -> list[str]:
        """Texts of the corpus."""
        return [text for _, text in self.read_corpus()]

    def read_corpus(self) -> list[tuple[str, str]]:
        """Voice and text of each line of the corpus."""
        lines = self.corpus.read_text(encoding="utf-8").splitlines()
        pairs = (line.split("\t") for line in lines)
        return [(voice, text) for voice, text in pairs]

    def write_corpus(self, corpus: list[tuple[str, str]]) -> None:
        """Writes voices and texts."""
        lines = (f"{voice}\t{text}\n" for voice, text in corpus)
        self.corpus.write_text("".join(lines), encoding="utf-8")

    def model_config(self) -> ModelConfig:
        """Configuration of the checkpoint."""
        return read_model_config(self.voice / "config.json")

    def codec_config(self) -> CodecConfig:
        """Configuration of the codec."""
        return read_codec_config(self.voice / "speech_tokenizer" / "config.json")


def write_folder(folder: Path, vocab: dict[str, int], merges: list[str], sizes: Sizes) -> None:
    """Writes all files of a checkpoint except its tensors.

    Args:
        folder: Folder of the checkpoint.
        vocab: Vocabulary of the byte-level BPE.
        merges: Its merges, in order.
        sizes: Sizes of the networks.
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
        "codec_language_id": {n: talker["codec_language_id"][n] for n in LANGUAGES},
        "spk_id": {name: voice.row for name, voice in VOICES.items()},
        "spk_is_dialect": dict.fromkeys(VOICES, False),
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
    file = folder / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) | SAMPLING
    file.write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def summary(document: str | None) -> str:
    """First line of a module's docstring."""
    return (document or "").splitlines()[0]


def append_json(file: Path, content: dict[str, float]) -> None:
    """Appends a line of metrics to a log."""
    with file.open("a", encoding="utf-8") as log:
        log.write(json.dumps({k: round(v, 4) for k, v in content.items()}) + "\n")
