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

from examples.train_voice.dialogue import NOTHING, Batch, Dialogue
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
_PREDICTED = 6_144  # frames a batch whose other codes are learned
_HELD = 256  # utterances that only tell how training goes
_FULL, _AUTO = 0.6, 0.3  # shares of the layouts and of the open language
_WRONG = 0.04  # codes of the past that are wrong, on average: sampling will make mistakes, too
_SHORT_FIRST = 0.03  # of the time, when only short texts are learned
_SHORT = 70  # positions
_LOG_EVERY = 100


class Losses:
    """What a batch should have been."""

    def __init__(self, net: TalkerNet, dialogue: Dialogue) -> None:
        self._net, self._dialogue = net, dialogue

    def __call__(self, batch: Batch, *, wrong: float) -> dict[str, Tensor]:
        """Mean losses by name.

        Args:
            batch: From `Dialogue.build`.
            wrong: Share of the codes of the past to make up.
        """
        net = self._net
        codes = batch.codes
        if wrong:
            share = 2 * wrong * torch.rand(len(codes), 1, 1, device=codes.device)
            made_up = torch.randint_like(codes, net.config.predictor.vocab_size)
            replaced = torch.rand(codes.shape, device=codes.device) < share
            codes = torch.where(replaced, made_up, codes)
        x = net.text(batch.text) + net.frames(codes) * batch.fed[..., None]
        control = net.control(batch.control.clamp(min=0))
        x = x + control * (batch.control != NOTHING)[..., None]
        hidden, middle, guided = net.talk(x)
        labelled = batch.labels >= 0
        labels = batch.labels[labelled]
        logits = net.first_logits(hidden[labelled]).float()
        making = batch.frame >= 0
        frames = batch.frame[making]
        phones = net.phones(middle[making]).float().flatten(0, 1)
        wanted = self._dialogue.phones[frames].long().flatten()
        ends = logits.softmax(-1)[:, net.config.talker.control.eos]
        is_end = labels == net.config.talker.control.eos
        return {
            "first": F.cross_entropy(logits, labels),
            "rest": self._rest(hidden[making], frames),
            "phone": F.cross_entropy(phones, wanted),
            "guide": torch.stack([_guide(q, k, batch) for q, k in guided]).mean(),
            "end": ends[is_end].mean().detach(),
            "false_end": ends[~is_end].mean().detach(),
        }

    def _rest(self, hidden: Tensor, frames: Tensor) -> Tensor:
        pick = torch.randperm(len(frames), device=frames.device)[:_PREDICTED]
        codes = self._dialogue.codes[frames[pick]].long()
        logits = self._net.rest_logits(hidden[pick], codes).float()
        return F.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())


def _guide(q: Tensor, k: Tensor, batch: Batch) -> Tensor:
    """How little a head attends to the word that is being said."""
    causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    same = batch.frame_word[:, :, None] == batch.text_word[:, None, :]
    same &= batch.spoken[:, None, :] & (batch.frame_word >= 0)[:, :, None] & causal
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    attention = scores.masked_fill(~causal, -1e9).softmax(-1)
    held = (attention * same).sum(-1)[same.any(-1)]
    return -(held + 1e-3).log().mean()


def _batches(
    dialogue: Dialogue, rng: np.random.Generator, longest: int, positions: int
) -> Iterator[NDArray[np.int64]]:
    """One pass over all utterances but the held ones, those of like length together."""
    lengths = dialogue.lengths
    numbers = np.arange(_held(dialogue), len(lengths))
    numbers = numbers[lengths[numbers] <= longest]
    order = numbers[np.argsort(lengths[numbers] + rng.uniform(0, 12, len(numbers)))]
    batches: list[NDArray[np.int64]] = []
    start = 0
    while start < len(order):
        most = np.maximum.accumulate(lengths[order[start : start + positions]])
        fits = most * np.arange(1, len(most) + 1) <= positions
        end = start + max(1, int(fits.sum()))
        batches.append(order[start:end])
        start = end
    rng.shuffle(batches)  # pyright: ignore[reportArgumentType]
    return iter(batches)


def _held(dialogue: Dialogue) -> int:
    return min(_HELD, len(dialogue.lengths) // 8)


def train(work: Work, minutes: float, positions: int, seed: int) -> None:
    """Trains until the time is used up; goes on where an earlier call stopped."""
    device, file = pick_device(), work.state("talker")
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = work.model_config()
    dialogue = Dialogue(work, config, device)
    net = TalkerNet(config, device)
    used = 0.0
    if file.exists():
        state = load_state(file, device)
        used = state["used"]
        with torch.no_grad():
            for name, value in state["parameters"].items():
                net.parameters[name].copy_(value)
    parameters = list(net.parameters.values())
    optimizer = adamw(parameters, betas=(0.9, 0.97), decay=0.02)
    losses, average = Losses(net, dialogue), Average(parameters)
    budget, done, passes = Budget(minutes, used), 0, 0
    queue: Iterator[NDArray[np.int64]] = iter(())
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def keep() -> None:
        named = dict(zip(net.parameters, average.tensors, strict=True))
        save_state(file, {"parameters": named, "used": budget.used})

    net.dropping = True
    with tqdm(desc="talker", unit=" steps", disable=None) as progress:
        while budget.share < 1:
            chosen = next(queue, None)
            if chosen is None:
                longest = _SHORT if budget.share < _SHORT_FIRST else 1 << 30
                queue, passes = _batches(dialogue, rng, longest, positions), passes + 1
                continue
            full, auto = rng.random(len(chosen)) < _FULL, rng.random(len(chosen)) < _AUTO
            with autocast:
                figures = losses(dialogue.build(chosen, full, auto), wrong=_WRONG)
            guide = 0.3 * max(0.1, 1 - budget.share)
            loss = figures["first"] + figures["rest"] + 0.2 * figures["phone"]
            optimizer.zero_grad(set_to_none=True)
            (loss + guide * figures["guide"]).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            set_rate(optimizer, budget.rate(_PEAK_RATE))
            optimizer.step()
            if done % 4 == 0:
                average.update(done)
            if done % _LOG_EVERY == 0:
                shown = {name: float(value.detach()) for name, value in figures.items()}
                progress.set_postfix({k: f"{v:.3f}" for k, v in shown.items()})
                times = {"step": done, "seconds": budget.used, "passes": passes}
                append_json(work.log("talker"), times | shown)
            if budget.due:
                keep()
            done += 1
            progress.update()
    keep()
    with torch.no_grad():
        for parameter, value in zip(parameters, average.tensors, strict=True):
            parameter.copy_(value)
        net.dropping = False
        held = np.arange(_held(dialogue))
        for layout in (True, False):
            batch = dialogue.build(held, np.full(len(held), layout), np.zeros(len(held), bool))
            with autocast:
                figures = losses(batch, wrong=0.0)
            shown = {f"held_{name}": float(value) for name, value in figures.items()}
            append_json(work.log("talker"), {"full": float(layout)} | shown)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `codes`")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--positions", type=int, default=24_000, help="a batch")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(Work(options.work), options.minutes, options.positions, options.seed)


if __name__ == "__main__":
    main()
