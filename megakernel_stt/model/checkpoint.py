"""Loads a recogniser from a folder that transformers saved, or from a NeMo archive."""

from dataclasses import dataclass
from pathlib import Path

import torch

from megakernel_common.checkpoint import Checkpoint
from megakernel_common.errors import CheckpointError
from megakernel_stt.model.config import ModelConfig, read_model_config
from megakernel_stt.model.nemo import NemoArchive
from megakernel_stt.model.weights import Weights, model_specs
from megakernel_stt.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """A loaded recogniser.

    Attributes:
        config: Its sizes.
        weights: Its tensors.
        tokenizer: Its vocabulary.
    """

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer


def load_model(path: Path, device: torch.device, dtype: torch.dtype) -> Model:
    """Loads a recogniser.

    Args:
        path: A `.nemo` file, or a folder with the files of transformers or with one `.nemo` file.
        device: Of the tensors.
        dtype: Of the tensors.

    Raises:
        CheckpointError: A file is missing or does not fit the others.
    """
    file = path if path.is_file() else _only_archive(path)
    source = NemoArchive(file) if file is not None else Checkpoint(path)
    config = source.config() if isinstance(source, NemoArchive) else read_model_config(path)
    ids = config.transducer.vocab_size, config.transducer.blank_id
    if isinstance(source, NemoArchive):
        tokenizer = source.tokenizer(*ids)
    else:
        tokenizer = Tokenizer.from_folder(path, *ids)
    return Model(config, source.load(model_specs(config), device, dtype), tokenizer)


def _only_archive(folder: Path) -> Path | None:
    """The `.nemo` file of a folder; None if the folder has the files of transformers."""
    archives = sorted(folder.glob("*.nemo"))
    has_config = (folder / "config.json").exists()
    if has_config and (not archives or any(folder.glob("*.safetensors"))):
        return None
    if len(archives) != 1:
        names = ", ".join(file.name for file in archives) or "none"
        raise CheckpointError(
            f"{folder}: has no config.json and not one .nemo file either (found: {names}); name "
            "a folder that transformers saved, or a .nemo file."
        )
    return archives[0]
