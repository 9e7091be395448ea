"""Writes the trained tensors into the checkpoint's folder.

python -m examples.train_ears.export WORK
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.train_ears.layout import Work
from examples.train_voice.layout import summary
from examples.train_voice.training import load_state
from megakernel_common.checkpoint import leaves
from megakernel_stt.model.weights import model_specs


def export(work: Work) -> int:
    """Writes the tensors in float16, without those of the CTC head.

    Returns:
        Size of the checkpoint in bytes.
    """
    parameters = load_state(work.state, torch.device("cpu"))["parameters"]
    names = [leaf.name for leaf in leaves(model_specs(work.config()))]
    tensors = {name: parameters[name].to(torch.float16).contiguous() for name in names}
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
