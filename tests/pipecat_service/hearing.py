"""A tiny recogniser with random weights that has text where audio is loud, and none in silence."""

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from megakernel_stt.model.checkpoint import load_model
from megakernel_stt.model.random_checkpoint import write_checkpoint
from megakernel_stt.network.features import LogMel
from tests.stt.streams import encode

_SEED = 3  # of weights whose frames of noise and of silence differ
_SCALE = 60.0  # of the logit by which loudness lowers that of blank
_BLANK_BIAS = 15.0


def speech(seconds: float, seed: int = 0, rate: int = 16_000) -> NDArray[np.int16]:
    """Noise whose level changes 20 times a second."""
    generator = np.random.default_rng(seed)
    level = np.repeat(generator.uniform(100, 8000, int(seconds * 20) + 1), rate // 20)
    count = round(seconds * rate)
    return (generator.standard_normal(count) * level[:count]).clip(-32768, 32767).astype(np.int16)


def silence(seconds: float, rate: int = 16_000) -> NDArray[np.int16]:
    return np.zeros(round(seconds * rate), np.int16)


def write_hearing_checkpoint(folder: Path) -> None:
    """Writes a random checkpoint of which one unit of the joint network measures loudness.

    The unit is the projection on the line from the mean frame of silence to that of noise, and
    lowers the logit of blank alone.
    """
    write_checkpoint(folder, seed=_SEED)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"max_symbols_per_step": 1}
    file.write_text(json.dumps(config), encoding="utf-8")
    model = load_model(folder, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        quiet, loud = (encode(model, _mels(pcm), 1).mean(0) for pcm in (silence(2), speech(2)))
        direction = (loud - quiet) / (loud - quiet).square().sum()
        offset = direction @ (loud + quiet) / 2
    weights_file = folder / "model.safetensors"
    tensors = load_file(weights_file)
    tensors["encoder_projector.weight"][0] = _SCALE * direction
    tensors["encoder_projector.bias"][0] = -_SCALE * offset
    tensors["decoder.decoder_projector.weight"][0] = 0
    tensors["decoder.decoder_projector.bias"][0] = 0
    tensors["joint.head.weight"][:, 0] = 0
    tensors["joint.head.weight"][-1, 0] = -1
    tensors["joint.head.bias"][-1] += _BLANK_BIAS
    save_file(tensors, weights_file, metadata={"format": "pt"})


def _mels(pcm: NDArray[np.int16]) -> Tensor:
    """The features [frames, bins] of a recording."""
    return LogMel(128, torch.device("cpu")).recording(pcm.astype(np.float32) / np.float32(32768))
