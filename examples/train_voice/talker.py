"""Trains talker and code predictor on texts and codes.

python -m examples.train_voice.talker WORK --minutes 12
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from examples.train_voice.dialogue import Batch, Dataset
from examples.train_voice.layout import Work, append_json, summary
from examples.train_voice.talker_net import TalkerNet
from examples.train_voice.training import (
    Average,
    Budget,
    adamw,
    load_state,
    pick_device,
    save_state,
    set_rate,
)

_PEAK_RATE = 1.5e-3
_PREDICTOR_FRAMES = 6_144  # of a batch, for the code predictor's loss
_REST_WEIGHTS = 1.5, 0.5  # of the losses of codes 1 and 15; the first codes are heard most
_FULL_SHARE, _AUTO_SHARE = 0.6, 0.3  # of the full layout and of utterances without language
_CORRUPTION_SHARE = 0.04  # of input codes that are random, since sampled codes contain errors
_PREDICTED_FROM = 0.2  # share of the time from which the predictor's codes are used as inputs
_PREDICTED_INTERVAL = 2  # batches, of which one uses them
_PREDICTED_TEMPERATURE = 0.3  # as in speech
_SHORT_TEXTS_SHARE = 0.03  # of the time, with short texts only
_SHORT_POSITIONS = 70
_LOG_EVERY = 100


class Losses:
    """Losses of a batch."""

    def __init__(self, net: TalkerNet, dataset: Dataset) -> None:
        self._net, self._dataset = net, dataset
        weights = torch.linspace(*_REST_WEIGHTS, net.config.talker.num_groups - 1)
        self._weights = weights.to(dataset.codes.device)

    def __call__(
        self, batch: Batch, *, corruption: float, predicted: bool = False
    ) -> dict[str, Tensor]:
        """Computes mean losses by name.

        Args:
            batch: From `Dataset.build`.
            corruption: Mean share of input codes that are replaced by random ones.
            predicted: Whether codes 1 to groups - 1 of the input frames are the predictor's
                samples, as in speech, instead of those of the recording.
        """
        net = self._net
        codes = self.predicted_inputs(batch) if predicted else batch.codes
        if corruption:
            share = 2 * corruption * torch.rand(len(codes), 1, 1, device=codes.device)
            random_codes = torch.randint_like(codes, net.config.predictor.vocab_size)
            replaced = torch.rand(codes.shape, device=codes.device) < share
            codes = torch.where(replaced, random_codes, codes)
        hidden, middle, guided = net.talker(net.inputs(batch, codes))
        hidden, middle = hidden.flatten(0, 1), middle.flatten(0, 1)
        frames, count = batch.frames, len(batch.frames)
        codes = self._dataset.codes[frames].long()
        eos = net.config.talker.control.eos
        labels = torch.cat([codes[:, 0], torch.full_like(batch.ending, eos)])
        logits = net.first_logits(hidden[torch.cat([batch.predicting, batch.ending])]).float()
        phones = net.phones(middle[batch.predicting]).float().flatten(0, 1)
        ends = logits.detach().softmax(-1)[:, eos]
        each = self._rest(hidden[batch.predicting], codes)
        return {
            "first": F.cross_entropy(logits, labels),
            "rest": (each * self._weights).mean(),
            "phone": F.cross_entropy(phones, self._dataset.phones[frames].long().flatten()),
            "guide": torch.stack([_guide(q, k, batch) for q, k in guided]).mean(),
            "second": each[0].detach(),
            "last": each[-1].detach(),
            "end": ends[count:].mean(),
            "false_end": ends[:count].mean(),
        }

    @torch.no_grad()
    def predicted_inputs(self, batch: Batch) -> Tensor:
        """Codes of the input frames, of which all but code 0 are sampled from the predictor.

        Each code is predicted from the recording's earlier codes and frames, in one pass. The
        talker's loss with these inputs is about that with codes that are sampled one by one.
        """
        hidden, _, _ = self._net.talker(self._net.inputs(batch, batch.codes))
        recorded = self._dataset.codes[batch.frames].long()
        logits = self._net.rest_logits(hidden.flatten(0, 1)[batch.predicting], recorded).float()
        shares = (logits / _PREDICTED_TEMPERATURE).softmax(-1)
        sampled = torch.multinomial(shares.flatten(0, 1), 1).view(len(recorded), -1)
        codes = batch.codes.clone()
        # The frame that a position predicts is the input of the next position.
        codes.view(-1, codes.shape[-1])[batch.predicting + 1, 1:] = sampled
        return codes

    def _rest(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Mean loss of each later code of a sample of frames."""
        # `torch.randperm` makes short permutations on the CPU and waits for the GPU.
        pick = torch.rand(len(codes), device=codes.device).argsort()[:_PREDICTOR_FRAMES]
        codes = codes[pick]
        logits = self._net.rest_logits(hidden[pick], codes).float()
        losses = F.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten(), reduction="none")
        return losses.view(len(pick), -1).mean(0)


def _guide(q: Tensor, k: Tensor, batch: Batch) -> Tensor:
    """Loss of a head's attention to the word that is being spoken: -log of its attention."""
    causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    same = batch.frame_word[:, :, None] == batch.text_word[:, None, :]
    same &= batch.spoken[:, None, :] & (batch.frame_word >= 0)[:, :, None] & causal
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    attention = scores.masked_fill(~causal, -1e9).softmax(-1)
    has_word = same.any(-1)
    losses = -((attention * same).sum(-1) + 1e-3).log() * has_word
    return losses.sum() / has_word.sum().clamp(min=1)


def _batches(
    dataset: Dataset, rng: np.random.Generator, longest: int, positions: int
) -> Iterator[NDArray[np.int64]]:
    """Batches of similar lengths, in one pass over all utterances that are not held out."""
    lengths = dataset.lengths
    numbers = np.flatnonzero(~dataset.held_out & (lengths <= longest))
    order = numbers[np.argsort(lengths[numbers] + rng.uniform(0, 12, len(numbers)))]
    batches = list(dataset.split(order, positions))
    rng.shuffle(batches)  # pyright: ignore[reportArgumentType]
    return iter(batches)


def train(work: Work, minutes: float, positions: int, seed: int) -> None:
    """Trains for the given time; resumes from the state of an earlier call."""
    device, file = pick_device(), work.state("talker")
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = work.model_config()
    dataset = Dataset(work, config, device)
    net = TalkerNet(config, device)
    used_s = 0.0
    if file.exists():
        state = load_state(file, device)
        used_s = state["used"]
        net.load(state)
    parameters = list(net.parameters.values())
    optimizer = adamw(parameters, betas=(0.9, 0.97), decay=0.02)
    losses, average = Losses(net, dataset), Average(parameters)
    budget, step_idx, num_passes = Budget(minutes, used_s), 0, 0
    queue: Iterator[NDArray[np.int64]] = iter(())
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def save() -> None:
        pairs = zip(net.parameters, average.tensors, strict=True)
        named = {name: value.bfloat16() for name, value in pairs}  # as in the checkpoint
        save_state(file, {"parameters": named, "used": budget.used_s})
        net.dropout = False
        with average.applied(), autocast, torch.no_grad():
            for full, predicted in ((True, False), (False, False), (True, True)):
                batch = dataset.build_held_out(full)
                metrics = losses(batch, corruption=0.0, predicted=predicted)
                values = {f"held_{name}": float(value) for name, value in metrics.items()}
                times = {"step": step_idx, "seconds": budget.used_s}
                kind = {"full": float(full), "predicted": float(predicted)}
                append_json(work.log("talker"), times | kind | values)
        net.dropout = True

    net.dropout = True
    with tqdm(desc="talker", unit=" steps", disable=None) as progress:
        while budget.share < 1:
            chosen = next(queue, None)
            if chosen is None:
                longest = _SHORT_POSITIONS if budget.share < _SHORT_TEXTS_SHARE else 1 << 30
                queue, num_passes = _batches(dataset, rng, longest, positions), num_passes + 1
                continue
            full, auto = (
                rng.random(len(chosen)) < _FULL_SHARE,
                rng.random(len(chosen)) < _AUTO_SHARE,
            )
            predicted = budget.share > _PREDICTED_FROM and step_idx % _PREDICTED_INTERVAL == 1
            with autocast:
                batch = dataset.build(chosen, full, auto)
                metrics = losses(batch, corruption=_CORRUPTION_SHARE, predicted=predicted)
            guide = 0.3 * max(0.1, 1 - budget.share)
            loss = metrics["first"] + metrics["rest"] + 0.2 * metrics["phone"]
            optimizer.zero_grad(set_to_none=True)
            (loss + guide * metrics["guide"]).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            set_rate(optimizer, budget.rate(_PEAK_RATE))
            optimizer.step()
            if step_idx % 4 == 0:
                average.update(step_idx)
            if step_idx % _LOG_EVERY == 0:
                values = {name: float(value.detach()) for name, value in metrics.items()}
                progress.set_postfix({k: f"{v:.3f}" for k, v in values.items()})
                times = {"step": step_idx, "seconds": budget.used_s, "passes": num_passes}
                append_json(work.log("talker"), times | values)
            if budget.due:
                save()
            step_idx += 1
            progress.update()
    save()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `codes`")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--positions", type=int, default=24_000, help="positions of a batch")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(Work(options.work), options.minutes, options.positions, options.seed)


if __name__ == "__main__":
    main()
