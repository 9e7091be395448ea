"""Encodes every recording with the trained codec, as training data of the talker.

Each recording that is not held out is encoded twice: as it is, and half a frame later. The codes
differ, so that the talker learns them by heart less easily.

python -m examples.train_voice.codes WORK
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tqdm import tqdm

from examples.train_voice.codec_model import CodecModel
from examples.train_voice.layout import Work, summary
from examples.train_voice.recordings import Recordings, is_held_out
from examples.train_voice.speech import FRAME
from examples.train_voice.training import load_state, pick_device

_BATCH = 8_000  # frames
_DELAY = FRAME // 2  # samples
_OF_RECORDINGS = "frames", "text", "speaker"  # columns


def encode(work: Work) -> None:
    """Writes codes, phones, words, lengths, texts and speakers of all recordings to a file.

    The delayed recordings follow the others.
    """
    device = pick_device()
    model = CodecModel(work.codec_config(), device)
    model.load(load_state(work.state("codec"), device))
    model.encoder.fast = torch.float32
    recordings = Recordings(work, device)
    while not recordings.complete:
        recordings.poll(max_shards=None)
        time.sleep(0.01)
    tables = {name: np.concatenate(column) for name, column in recordings.tables.items()}
    frames = tables["frames"]
    repeated = ~is_held_out(tables["text"])
    starts, inside = np.cumsum(frames) - frames, np.repeat(repeated, frames)
    pairs = {
        "codes": [_codes(model, recordings, frames, delay) for delay in (0, _DELAY)],
        "phones": [tables["phones"], _half_later(tables["phones"], starts, 0)],
        "words": [tables["words"], _half_later(tables["words"], starts, -1)],
    }
    columns = {name: tables[name] for name in _OF_RECORDINGS}
    arrays: dict[str, Any] = {
        **{name: np.concatenate([one, late[inside]]) for name, (one, late) in pairs.items()},
        **{name: np.concatenate([one, one[repeated]]) for name, one in columns.items()},
    }
    np.savez(work.codes, **arrays)
    print(f"{len(arrays['codes'])} frames of {len(arrays['frames'])} utterances")


@torch.no_grad()
def _codes(
    model: CodecModel, recordings: Recordings, frames: NDArray[np.int64], delay: int
) -> NDArray[np.uint8]:
    """Codes [frames, groups] of all recordings, delayed by so many samples of silence."""
    groups, device = len(model.quantizer.books), model.quantizer.books.device
    codes = torch.zeros(recordings.frames, groups, dtype=torch.uint8, device=device)
    order = np.argsort(frames, kind="stable")  # batches of similar length
    start = 0
    with tqdm(total=len(order), desc="utterances", disable=None) as progress:
        while start < len(order):
            count = _BATCH // int(frames[order[start]])
            longest = frames[order[start : start + count]][-1]
            count = max(1, _BATCH // int(longest))
            wave, number = recordings.whole(order[start : start + count])
            wave = F.pad(wave, (delay, 0))[:, : wave.shape[1]]
            semantic, acoustic = model.embed(wave)
            found = model.quantizer.encode(semantic.flatten(0, 1), acoustic.flatten(0, 1))
            inside = number.flatten() >= 0
            codes[number.flatten()[inside]] = found[inside].to(torch.uint8)
            start += count
            progress.update(len(wave))
    return codes.cpu().numpy()


def _half_later(halves: NDArray[Any], starts: NDArray[np.int64], fill: int) -> NDArray[Any]:
    """Labels [frames, 2] of the halves of all frames, half a frame later in each recording."""
    later = np.roll(halves.reshape(-1), 1).reshape(-1, 2)
    later[starts, 0] = fill
    return later


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `codec` and `synthesis`")
    encode(Work(parser.parse_args().work))


if __name__ == "__main__":
    main()
