"""Writes the trained tensors into the checkpoint's folder.

python -m examples.train_voice.export WORK
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.train_voice.codec_model import file_tensors
from examples.train_voice.layout import Work, summary
from examples.train_voice.training import load_state

_CPU = torch.device("cpu")


def export(work: Work) -> int:
    """Writes both tensor files, with the decoder of `vocoder` if it ran.

    Returns:
        Size of the checkpoint in bytes.
    """
    talker = load_state(work.state("talker"), _CPU)["parameters"]
    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in talker.items() if "." in k}
    save_file(tensors, work.voice / "model.safetensors", metadata={"format": "pt"})
    last = work.state("vocoder")
    codec = load_state(last if last.exists() else work.state("codec"), _CPU)
    folder = work.voice / "speech_tokenizer"
    save_file(file_tensors(codec, _half), folder / "model.safetensors", metadata={"format": "pt"})
    return sum(file.stat().st_size for file in work.voice.rglob("*") if file.is_file())


def _half(tensor: Tensor) -> Tensor:
    """Converts to float16, whose precision is audible compared with bfloat16."""
    return tensor.to(torch.float16)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after all training stages")
    size = export(Work(parser.parse_args().work))
    print(f"{size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
