"""Encodes every recording with the trained codec, as training data of the talker.

python -m examples.train_voice.codes WORK
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from examples.train_voice.codec_model import CodecModel
from examples.train_voice.layout import Work, summary
from examples.train_voice.recordings import Recordings
from examples.train_voice.training import load_state, pick_device

_BATCH = 8_000  # frames


@torch.no_grad()
def encode(work: Work) -> None:
    """Writes codes, phones, words, lengths, texts and speakers of all recordings to a file."""
    device = pick_device()
    model = CodecModel(work.codec_config(), device)
    model.load(load_state(work.state("codec"), device))
    model.encoder.fast = torch.float32
    recordings = Recordings(work, device)
    while not recordings.complete:
        recordings.poll()
        time.sleep(0.01)
    tables = {name: np.concatenate(column) for name, column in recordings.tables.items()}
    groups = len(model.quantizer.books)
    codes = torch.zeros(recordings.frames, groups, dtype=torch.uint8, device=device)
    order = np.argsort(tables["frames"], kind="stable")  # batches of similar length
    start = 0
    with tqdm(total=len(order), desc="utterances", disable=None) as progress:
        while start < len(order):
            count = _BATCH // int(tables["frames"][order[start]])
            longest = tables["frames"][order[start : start + count]][-1]
            count = max(1, _BATCH // int(longest))
            wave, number = recordings.whole(order[start : start + count])
            semantic, acoustic = model.embed(wave)
            found = model.quantizer.encode(semantic.flatten(0, 1), acoustic.flatten(0, 1))
            inside = number.flatten() >= 0
            codes[number.flatten()[inside]] = found[inside].to(torch.uint8)
            start += count
            progress.update(len(wave))
    arrays: dict[str, Any] = {"codes": codes.cpu().numpy(), **tables}
    np.savez(work.codes, **arrays)
    print(f"{recordings.frames} frames of {len(order)} utterances")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `codec` and `synthesis`")
    encode(Work(parser.parse_args().work))


if __name__ == "__main__":
    main()
