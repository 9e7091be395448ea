"""Writes the trained tensors into the checkpoint's folder, matrices with 8 bits per number.

python -m examples.train_ears.export WORK
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.train_ears.layout import Work
from examples.train_voice.layout import summary
from examples.train_voice.training import load_state
from megakernel_common.checkpoint import leaves
from megakernel_stt.model.weights import model_specs


def quantise(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Tensors to be stored: a matrix as int8 with the scale of each row, others in float16."""
    if tensor.ndim < 2:
        return {name: tensor.half()}
    rows = tensor.float().flatten(1)
    scale = (rows.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float16).tiny).half()
    numbers = (rows / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return {name: numbers.view(tensor.shape), f"{name}_scale": scale}


def export(work: Work) -> int:
    """Writes the tensors, without those of the CTC head.

    Returns:
        Size of the checkpoint in bytes.
    """
    parameters = load_state(work.state, torch.device("cpu"))["parameters"]
    tensors = dict[str, Tensor]()
    for leaf in leaves(model_specs(work.config())):
        tensors |= quantise(leaf.name, parameters[leaf.name])
    save_file(tensors, work.ears / "model.safetensors", metadata={"format": "pt"})
    return sum(file.stat().st_size for file in work.ears.iterdir())


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `train`")
    size = export(Work(parser.parse_args().work))
    print(f"{size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
