"""Trains the recogniser on the recordings.

python -m examples.train_ears.train WORK --minutes 20
"""

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from examples.train_ears.augmentation import CLEAN, TRAINING, Augmentation, Conditions, masked
from examples.train_ears.features import LogMel
from examples.train_ears.lattice import NEVER, ctc_likelihood, transducer_likelihood
from examples.train_ears.layout import LOOKAHEADS, Work
from examples.train_ears.net import Net
from examples.train_ears.recordings import Group, Recordings
from examples.train_voice.layout import append_json, summary
from examples.train_voice.training import (
    Average,
    Budget,
    CapturedStep,
    adamw,
    load_state,
    pick_device,
    save_state,
    set_rate,
)
from megakernel_stt.model.config import HOP_SIZE, MELS_PER_FRAME

_PEAK_RATE = 1e-3
_CTC_WEIGHTS = 1.0, 0.15  # at the start and after the share of the time that follows
_RAMP_SHARE = 0.15  # in which recordings are changed more and more often
_CHANGED_SHARE = 0.7  # of the recordings, after that time
_LOG_EVERY = 100
_AVERAGE_EVERY = 4
_HELD_OUT = 16  # recordings of a batch of validation


class Trainer:
    """Network, optimiser, and one captured step for each group of recordings."""

    def __init__(
        self, net: Net, recordings: Recordings, conditions: Conditions, *, mask: bool
    ) -> None:
        """Prepares training.

        Args:
            net: The network.
            recordings: Speech.
            conditions: How it is changed in training.
            mask: Whether parts of the features are masked in training.
        """
        device = recordings.wave.device
        self._net, self._recordings, self._device = net, recordings, device
        self._mask = mask
        self._mels = LogMel(net.config.encoder.num_mels, device)
        self._augmentation = Augmentation(conditions, device)
        self.parameters = list(net.parameters.values())
        self.optimizer = adamw(self.parameters, betas=(0.9, 0.98), decay=0.01)
        self._steps: dict[int, CapturedStep] = {}
        on_gpu = device.type == "cuda"
        self._pool: Any = torch.cuda.graph_pool_handle() if on_gpu else None
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=on_gpu)

    def calibrate(self) -> None:
        """Adapts the network's first layers and heads to the recordings and their texts."""
        recordings = self._recordings
        group = recordings.groups[len(recordings.groups) // 2]
        chosen = torch.from_numpy(group.members[: group.batch]).to(self._device)
        changed = torch.zeros(len(chosen), dtype=torch.bool, device=self._device)
        mels, lengths, _ = self._features(chosen, group.samples, self._augmentation, changed)
        self._net.calibrate(mels, lengths)
        index = torch.arange(recordings.tokens.shape[1], device=self._device)
        tokens = recordings.tokens[index < recordings.labels[:, None]]
        counts = tokens.bincount(minlength=self._net.config.transducer.vocab_size)
        self._net.initialise_heads(
            counts.float(), len(recordings.wave) / (HOP_SIZE * MELS_PER_FRAME)
        )

    def __call__(
        self,
        group: Group,
        chosen: NDArray[np.int64],
        lookahead: int,
        ctc_weight: float,
        changed: NDArray[np.bool_],
        rate: float,
    ) -> dict[str, Tensor]:
        """Trains on a batch.

        Args:
            group: Of the recordings.
            chosen: [group.batch], their indices.
            lookahead: In frames.
            ctc_weight: Of the loss of the CTC head.
            changed: [group.batch], whether a recording's conditions are changed.
            rate: Learning rate.
        """
        inputs = [
            self._to_device(torch.from_numpy(chosen)),
            self._to_device(torch.tensor(lookahead)),
            self._to_device(torch.tensor(ctc_weight)),
            self._to_device(torch.from_numpy(changed)),
        ]
        set_rate(self.optimizer, rate)
        if group.samples not in self._steps:
            step = partial(self._step, group.samples, group.labels)
            self._steps[group.samples] = CapturedStep(step, *inputs, pool=self._pool)
        return self._steps[group.samples](*inputs)

    def _step(
        self,
        samples: int,
        labels: int,
        chosen: Tensor,
        lookahead: Tensor,
        ctc_weight: Tensor,
        changed: Tensor,
    ) -> dict[str, Tensor]:
        net = self._net
        net.training = True
        mels, lengths, has_speech = self._features(chosen, samples, self._augmentation, changed)
        if self._mask:
            mels = torch.where(changed[:, None, None], masked(mels, lengths), mels)
        metrics = self._losses(mels, lengths, chosen, labels, has_speech, lookahead)
        net.training = False
        self.optimizer.zero_grad(set_to_none=True)
        (metrics["transducer"] + ctc_weight * metrics["ctc"]).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return {name: value.detach() for name, value in metrics.items()} | {"gradient": norm}

    @torch.no_grad()
    def _features(
        self, chosen: Tensor, samples: int, augmentation: Augmentation, changed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Features [batch, mel frames, bins], their numbers, and which recordings have speech."""
        recordings = self._recordings
        starts, sizes = recordings.starts[chosen], recordings.samples[chosen]
        wave, sizes, has_speech = augmentation(recordings.wave, starts, sizes, samples, changed)
        return self._mels(wave, sizes), sizes // HOP_SIZE, has_speech

    def _losses(
        self,
        mels: Tensor,
        lengths: Tensor,
        chosen: Tensor,
        most_labels: int,
        has_speech: Tensor,
        lookahead: Tensor,
    ) -> dict[str, Tensor]:
        """Losses per token of a batch."""
        tokens = self._recordings.tokens[chosen][:, :most_labels]
        labels = self._recordings.labels[chosen] * has_speech
        with self._autocast():
            frames, counts = self._net.encode(mels, lengths, lookahead)
            blank, label = self._net.transducer_scores(frames, tokens)
            ctc = self._net.ctc_scores(frames)
        num_tokens = labels.sum().clamp(min=1)
        by_ctc = ctc_likelihood(ctc, tokens, counts, labels)
        by_ctc = by_ctc.masked_fill(by_ctc < NEVER / 2, 0.0)  # speech too fast for CTC
        by_transducer = transducer_likelihood(blank, label, counts, labels)
        return {
            "transducer": -by_transducer.sum() / num_tokens,
            "ctc": -by_ctc.sum() / num_tokens,
        }

    @torch.no_grad()
    def validate(self, lookahead: int) -> dict[str, float]:
        """Losses on held-out recordings as they are."""
        recordings, clean = self._recordings, Augmentation(CLEAN, self._device)
        sums: dict[str, float] = {}
        total = 0
        for first in range(0, len(recordings.held_out), _HELD_OUT):
            chosen = torch.from_numpy(recordings.held_out[first : first + _HELD_OUT])
            chosen = chosen.to(self._device)
            samples = int(recordings.samples[chosen].max())
            most_labels = int(recordings.labels[chosen].max())
            unchanged = torch.zeros_like(chosen, dtype=torch.bool)
            mels, lengths, has_speech = self._features(chosen, samples, clean, unchanged)
            ahead = torch.tensor(lookahead, device=self._device)
            found = self._losses(mels, lengths, chosen, most_labels, has_speech, ahead)
            count = int(recordings.labels[chosen].sum())
            total += count
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + count * float(value)
        return {f"held_{name}": value / total for name, value in sums.items()}

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Copies without waiting for the GPU, which a copy from pageable memory would do."""
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def train(
    work: Work,
    minutes: float,
    batch_s: float,
    seed: int,
    pause_after: float = math.inf,
    conditions: Conditions = TRAINING,
    *,
    mask: bool = True,
) -> None:
    """Trains for the given time; continues from the state of an earlier call.

    Args:
        work: The run, after `synthesis`.
        minutes: Of all calls.
        batch_s: Seconds of speech in a batch.
        seed: Of initial weights and batches.
        pause_after: Minutes of this call.
        conditions: How the speech is changed.
        mask: Whether parts of the features are masked.
    """
    device, begin_s = pick_device(), time.monotonic()
    torch.manual_seed(seed)
    recordings = Recordings(work, device, batch_s)
    net = Net(work.config(), device)
    trainer = Trainer(net, recordings, conditions, mask=mask)
    used_s, step_idx = 0.0, 0
    state = load_state(work.state, device) if work.state.exists() else None
    if state is None:
        trainer.calibrate()
    average = Average(trainer.parameters)
    if state is not None:
        used_s, step_idx = state["used"], state["step"]
        net.load(state["live"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        for own, name in zip(average.tensors, net.parameters, strict=True):
            own.copy_(state["parameters"][name])
        torch.manual_seed(seed + step_idx)
    rng = np.random.default_rng(seed + step_idx)
    budget, batches = Budget(minutes, used_s), recordings.batches(rng)
    print(
        f"{recordings.hours:.1f} hours of speech, groups of", [g.batch for g in recordings.groups]
    )

    def save() -> None:
        names = list(net.parameters)
        content = {
            "parameters": dict(zip(names, average.tensors, strict=True)),
            "live": {name: value.detach() for name, value in net.parameters.items()},
            "optimizer": trainer.optimizer.state_dict(),
            "used": budget.used_s,
            "step": step_idx,
        }
        save_state(work.state, content)
        times = {"step": step_idx, "seconds": budget.used_s}
        with average.applied():
            for lookahead in (LOOKAHEADS[1], LOOKAHEADS[-1]):
                found = trainer.validate(lookahead)
                append_json(work.log, times | {"lookahead": lookahead} | found)

    with tqdm(desc="train", unit=" steps", disable=None) as progress:
        while budget.share < 1 and time.monotonic() - begin_s < 60 * pause_after:
            batch = next(batches, None)
            if batch is None:
                batches = recordings.batches(rng)
                continue
            first, last = _CTC_WEIGHTS
            ramp = min(1.0, budget.share / _RAMP_SHARE)
            ctc_weight = first + (last - first) * ramp
            changed = rng.random(batch[0].batch) < _CHANGED_SHARE * ramp
            lookahead = int(rng.choice(LOOKAHEADS))
            metrics = trainer(*batch, lookahead, ctc_weight, changed, budget.rate(_PEAK_RATE))
            if step_idx % _AVERAGE_EVERY == 0:
                average.update(step_idx)
            if step_idx % _LOG_EVERY == 0:
                values = {name: float(value) for name, value in metrics.items()}
                progress.set_postfix({k: f"{v:.3f}" for k, v in values.items()})
                append_json(work.log, {"step": step_idx, "seconds": budget.used_s} | values)
            if budget.due:
                save()
            step_idx += 1
            progress.update()
    save()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `synthesis`")
    parser.add_argument("--minutes", type=float, default=20.0, help="of all calls (default: 20)")
    parser.add_argument(
        "--pause-after",
        type=float,
        default=math.inf,
        help="minutes after which this call ends; the next one continues",
    )
    parser.add_argument("--batch-s", type=float, default=800.0, help="seconds of speech in a batch")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(Work(options.work), options.minutes, options.batch_s, options.seed, options.pause_after)


if __name__ == "__main__":
    main()
