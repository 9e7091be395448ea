"""Predicts the codes of recordings with the talker, as training data of the stage `vocoder`.

Code 0 and all earlier frames are the recording's, the other codes are sampled as in speech. The
decoder, trained on recordings' codes so far, learns to decode what the predictor produces. The
talker may still be in training, on another GPU.

python -m examples.train_voice.predictions WORK --hours 20
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from examples.train_voice.dialogue import NOTHING, Dataset
from examples.train_voice.layout import SAMPLING, Work, summary
from examples.train_voice.own_codes import sample
from examples.train_voice.talker_net import TalkerNet
from examples.train_voice.training import load_state, pick_device

_FRAMES_PER_HOUR = 45_000
_POLL_INTERVAL_S = 1.0


def wait_for_talker(work: Work, minutes: float) -> None:
    """Waits until a saved state of the talker has been trained for so many minutes."""
    file = work.state("talker")
    while not file.exists() or load_state(file, torch.device("cpu"))["used"] < 60 * minutes:
        time.sleep(_POLL_INTERVAL_S)


@torch.no_grad()
def predict(work: Work, hours: float, positions: int, temperature: float, seed: int) -> None:
    """Writes uint8 [frames, groups]: the codes of the first recordings, in their order."""
    device = pick_device()
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = work.model_config()
    dataset = Dataset(work, config, device)
    net = TalkerNet(config, device)
    net.load(load_state(work.state("talker"), device))
    count = max(1, int((dataset.ends <= hours * _FRAMES_PER_HOUR).sum()))
    predicted = torch.zeros_like(dataset.codes[: dataset.ends[count - 1]])
    order = np.argsort(dataset.lengths[:count], kind="stable")
    with (
        torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
        tqdm(total=count, desc="predictions", unit=" utterances", disable=None) as progress,
    ):
        for chosen, length in dataset.split(order, positions):
            full = torch.from_numpy(rng.random(len(chosen)) < 0.5).to(device)
            utterances = torch.from_numpy(chosen).to(device)
            batch = dataset.build(utterances, full, torch.zeros_like(full), length)
            hidden, _, _ = net.talker(net.inputs(batch, dataset.codes_of(batch.previous)))
            predicting = batch.frame != NOTHING
            frames = batch.frame[predicting]
            codes = dataset.codes_of(frames)
            _sample(net, hidden[predicting], codes, temperature)
            predicted[frames] = codes.to(predicted.dtype)
            progress.update(len(chosen))
    partial = work.predictions.with_suffix(".part.npy")
    np.save(partial, predicted.cpu().numpy())
    partial.rename(work.predictions)  # `vocoder` polls for it


def _sample(net: TalkerNet, hidden: Tensor, codes: Tensor, temperature: float) -> None:
    """Replaces codes 1 to the last of frames [n, groups] by samples."""
    for group in range(1, codes.shape[1]):
        codes[:, group] = sample(net.rest_logits(hidden, codes)[:, group - 1], temperature)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder; `talker` may still run")
    parser.add_argument("--hours", type=float, default=20.0, help="of recordings")
    parser.add_argument(
        "--after", type=float, default=0.0, metavar="MINUTES", help="of training of the talker"
    )
    parser.add_argument("--positions", type=int, default=12_000, help="positions of a batch")
    temperature = SAMPLING["subtalker_temperature"]
    parser.add_argument("--temperature", type=float, default=temperature, help="of later codes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wait_for_talker(Work(options.work), options.after)
    predict(Work(options.work), options.hours, options.positions, options.temperature, options.seed)


if __name__ == "__main__":
    main()
