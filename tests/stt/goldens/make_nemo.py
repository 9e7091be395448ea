"""Writes what NeMo decodes: `python -m tests.stt.goldens.make_nemo` (NeMo 3.0)."""

import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.nemo_transducer import NemoTransducer
from megakernel_stt.model.checkpoint import load_model
from megakernel_stt.model.random_checkpoint import write_checkpoint
from tests.stt.batches import padded
from tests.stt.goldens.decodings import DECODINGS, FILE, NUM_RECORDED


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for decoding in DECODINGS:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), decoding.kind, blank_bias=decoding.blank_bias)
            model = load_model(Path(folder), torch.device("cpu"), torch.float32)
        nemo = NemoTransducer(*decoding.decoder(model), "graph_steps")
        for i, frames in enumerate(decoding.batches(NUM_RECORDED)):
            found = nemo.decode(*padded(frames))
            rows = [row for recording in found for row in recording]
            arrays[f"{decoding.name}-{i}-tokens"] = np.array(rows, np.int16).reshape(-1, 3)
            arrays[f"{decoding.name}-{i}-counts"] = np.array([len(r) for r in found], np.int16)
    np.savez_compressed(FILE, **arrays)  # type: ignore[arg-type]
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
