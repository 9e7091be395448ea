"""Trains talker and code predictor on texts and codes.

python -m examples.train_voice.talker WORK --minutes 12
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from examples.train_voice.dialogue import NOTHING, Batch, Dataset
from examples.train_voice.layout import SAMPLING, Work, append_json, summary
from examples.train_voice.own_codes import OwnCodes, sample
from examples.train_voice.parallel import DataParallel
from examples.train_voice.talker_net import TalkerNet
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

_PEAK_RATE = 1.5e-3
_PREDICTOR_SHARE = 0.43  # of a batch's positions, for the code predictor's loss
_REST_WEIGHTS = 1.5, 0.5  # of the losses of codes 1 and 15; the first codes are heard most
_FULL_SHARE, _AUTO_SHARE = 0.45, 0.3  # of the full layout and of utterances without language
_CORRUPTION_SHARE = 0.04  # of input codes that are random, since sampled codes contain errors
_OWN_SHARE, _OWN_FROM = 0.8, 0.1  # utterances with own input codes, from this share of the time
_SHORT_TEXTS_SHARE = 0.03  # of the time, with short texts only
_SHORT_POSITIONS = 70
_IGNORED = -100  # label without loss
_LOG_EVERY = 100


class Losses:
    """Losses of a batch."""

    def __init__(self, net: TalkerNet, dataset: Dataset) -> None:
        self._net, self._dataset = net, dataset
        weights = torch.linspace(*_REST_WEIGHTS, net.config.talker.num_groups - 1)
        self._weights = weights.to(dataset.codes.device)

    def __call__(
        self, batch: Batch, inputs: Tensor, own: OwnCodes | None = None
    ) -> dict[str, Tensor]:
        """Computes mean losses by name.

        Args:
            batch: From `Dataset.build`.
            inputs: Codes of the input frames [batch, positions, groups].
            own: Gets samples from the predictions.
        """
        net, eos = self._net, self._net.config.talker.control.eos
        hidden, middle, guided = net.talker(net.inputs(batch, inputs))
        hidden, frame, is_eos = hidden.flatten(0, 1), batch.frame.flatten(), batch.is_eos.flatten()
        predicting, codes = frame != NOTHING, self._dataset.codes_of(frame)
        logits = net.first_logits(hidden).float()
        labels = torch.where(predicting, codes[:, 0], _IGNORED).masked_fill(is_eos, eos)
        phones = self._dataset.phones[frame.clamp(min=0)].long()
        phones = phones.masked_fill(~predicting[:, None], _IGNORED)
        ends = logits.detach().softmax(-1)[:, eos]
        picked = _pick(predicting)
        rest = net.rest_logits(hidden.index_select(0, picked), codes[picked]).float()
        each = _rest_losses(rest, codes[picked], predicting[picked])
        if own:
            own.store(batch, logits, picked, rest)
        phone_logits = net.phones(middle).float().flatten(0, 2)
        return {
            "first": F.cross_entropy(logits, labels, ignore_index=_IGNORED),
            "rest": (each * self._weights).mean(),
            "phone": F.cross_entropy(phone_logits, phones.flatten(), ignore_index=_IGNORED),
            "guide": torch.stack([_guide(q, k, batch) for q, k in guided]).mean(),
            "second": each[0].detach(),
            "last": each[-1].detach(),
            "end": _mean(ends, is_eos),
            "false_end": _mean(ends, predicting),
        }

    @torch.no_grad()
    def predicted_inputs(self, batch: Batch) -> Tensor:
        """Codes of the input frames, of which all but code 0 are sampled from the predictor.

        Each code is predicted from the recording's earlier codes and frames, in one pass. The
        talker's loss with these inputs is about that with codes that are sampled one by one.
        """
        inputs = self._dataset.codes_of(batch.previous)
        hidden, _, _ = self._net.talker(self._net.inputs(batch, inputs))
        predicting = batch.frame != NOTHING
        codes = self._dataset.codes_of(batch.frame[predicting])
        logits = self._net.rest_logits(hidden[predicting], codes)
        codes[:, 1:] = sample(logits, SAMPLING["subtalker_temperature"])
        inputs[batch.previous != NOTHING] = codes  # in the same order
        return inputs


def _pick(predicting: Tensor) -> Tensor:
    """Random positions, a fixed share; those that predict a frame come first."""
    order = torch.rand(predicting.shape, device=predicting.device) + ~predicting
    return order.argsort()[: round(_PREDICTOR_SHARE * len(order))]


def _rest_losses(logits: Tensor, codes: Tensor, predicting: Tensor) -> Tensor:
    """Mean loss of each later code [groups - 1] over the rows that predict a frame."""
    losses = F.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten(), reduction="none")
    return _mean(losses.view(len(codes), -1).t(), predicting)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values along the last axis."""
    return (values * chosen).sum(-1) / chosen.sum().clamp(min=1)


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
    dataset: Dataset, group: DataParallel, rng: np.random.Generator, longest: int, positions: int
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Batches of similar lengths, in one pass over a process's utterances for training."""
    lengths = dataset.lengths
    numbers = np.flatnonzero(~dataset.held_out)[group.rank :: group.size]
    if not len(numbers):
        raise ValueError(
            f"{np.sum(~dataset.held_out)} utterances are too few for {group.size} processes; "
            "every process needs one."
        )
    short = numbers[lengths[numbers] <= longest]
    numbers = short if len(short) else numbers
    order = numbers[np.argsort(lengths[numbers] + rng.uniform(0, 12, len(numbers)))]
    batches = list(dataset.split(order, positions))
    rng.shuffle(batches)  # pyright: ignore[reportArgumentType]
    return iter(batches)


class _Training:
    """The optimiser, and a captured computation of gradients for each length of sequences."""

    def __init__(self, net: TalkerNet, dataset: Dataset, group: DataParallel) -> None:
        self._net, self._dataset, self._device = net, dataset, dataset.codes.device
        self._group = group
        self.parameters = list(net.parameters.values())
        self._optimizer = adamw(self.parameters, betas=(0.9, 0.97), decay=0.02)
        sizes = [p.numel() for p in self.parameters]
        self._gradients = torch.zeros(sum(sizes), device=self._device)
        for p, gradient in zip(self.parameters, self._gradients.split(sizes), strict=True):
            p.grad = gradient.view_as(p)
        self.losses = Losses(net, dataset)
        self._own = OwnCodes(dataset, net.config.predictor.vocab_size)
        self._captured: dict[int, CapturedStep] = {}
        on_gpu = self._device.type == "cuda"
        self._pool: Any = torch.cuda.graph_pool_handle() if on_gpu else None
        self.autocast = partial(torch.autocast, self._device.type, torch.bfloat16, enabled=on_gpu)

    def __call__(
        self,
        chosen: NDArray[np.int64],
        length: int,
        share: float,
        rate: float,
        rng: np.random.Generator,
    ) -> dict[str, Tensor]:
        """Trains on a batch.

        Args:
            chosen: Indices of this process's utterances.
            length: Positions to which they are padded.
            share: Share of the time used so far.
            rate: Learning rate.
            rng: For the utterances' layouts.
        """
        full, auto = (rng.random(len(chosen)) < s for s in (_FULL_SHARE, _AUTO_SHARE))
        own = _OWN_SHARE * (share > _OWN_FROM)
        weights = np.array([own, 0.3 * max(0.1, 1 - share)], np.float32)
        inputs = [self._to_device(values) for values in (chosen, full, auto, weights)]
        if length not in self._captured:
            step = partial(self._differentiate, length)
            self._captured[length] = CapturedStep(step, *inputs, pool=self._pool)
        metrics = self._captured[length](*inputs)
        self._group.average(self._gradients)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        set_rate(self._optimizer, rate)
        self._optimizer.step()
        return metrics

    def _differentiate(
        self, length: int, chosen: Tensor, full: Tensor, auto: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """Computes gradients; weights: share of utterances with own codes, weight of the guide."""
        with self.autocast():
            batch = self._dataset.build(chosen, full, auto, length)
            inputs = self._own.inputs(batch, weights[0], _CORRUPTION_SHARE)
            metrics = self.losses(batch, inputs, self._own)
        loss = metrics["first"] + metrics["rest"] + 0.2 * metrics["phone"]
        self._gradients.zero_()
        (loss + weights[1] * metrics["guide"]).backward()  # adds to the views of `_gradients`
        return {name: value.detach() for name, value in metrics.items()}

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        """Copies without waiting for the GPU, which a copy from pageable memory would do."""
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    @torch.no_grad()
    def validate(self, full: bool, predicted: bool) -> dict[str, float]:
        """Losses on held-out utterances, with recorded or with predicted input frames."""
        with self.autocast():
            batch = self._dataset.build_held_out(full)
            recorded = self._dataset.codes_of(batch.previous)
            inputs = self.losses.predicted_inputs(batch) if predicted else recorded
            metrics = self.losses(batch, inputs)
        kind = {"full": float(full), "predicted": float(predicted)}
        return kind | {f"held_{name}": float(value) for name, value in metrics.items()}


def train(work: Work, minutes: float, positions: int, seed: int, processes: int = 1) -> None:
    """Trains for the given time; resumes from the state of an earlier call.

    Args:
        work: The run.
        minutes: Time of all calls together.
        positions: Of a step's batches together.
        seed: For parameters and batches.
        processes: Processes that train together, each on a GPU of its own.
    """
    if processes == 1:
        _train(0, 1, work, minutes, positions, seed)
        return
    _rendezvous(work).unlink(missing_ok=True)
    arguments = processes, work, minutes, positions, seed
    torch.multiprocessing.spawn(_train, arguments, processes)  # pyright: ignore[reportPrivateImportUsage]


def _rendezvous(work: Work) -> Path:
    return work.folder / "talker.rendezvous"


def _train(
    rank: int, processes: int, work: Work, minutes: float, positions: int, seed: int
) -> None:
    group = DataParallel(rank, processes, _rendezvous(work))
    device, file = pick_device(), work.state("talker")
    torch.manual_seed(seed)  # the same parameters in all processes
    config = work.model_config()
    dataset = Dataset(work, config, device)
    net = TalkerNet(config, device)
    torch.manual_seed(seed + rank)
    rng = np.random.default_rng(seed + rank)
    used_s = 0.0
    if file.exists():
        state = load_state(file, device)
        used_s = state["used"]
        net.load(state)
    training = _Training(net, dataset, group)
    average = Average(training.parameters)
    budget, step_idx, num_passes = Budget(minutes, used_s), 0, 0
    queue: Iterator[tuple[NDArray[np.int64], int]] = iter(())

    def save() -> None:
        pairs = zip(net.parameters, average.tensors, strict=True)
        named = {name: value.bfloat16() for name, value in pairs}  # as in the checkpoint
        save_state(file, {"parameters": named, "used": budget.used_s})
        times = {"step": step_idx, "seconds": budget.used_s}
        net.dropout = False
        with average.applied():
            for full, predicted in ((True, False), (False, False), (True, True)):
                append_json(work.log("talker"), times | training.validate(full, predicted))
        net.dropout = True

    net.dropout = True
    with tqdm(desc="talker", unit=" steps", disable=True if rank else None) as progress:
        while (share := group.first(budget.share)) < 1:
            if (batch := next(queue, None)) is None:
                longest = _SHORT_POSITIONS if share < _SHORT_TEXTS_SHARE else 1 << 30
                queue = _batches(dataset, group, rng, longest, positions // processes)
                batch, num_passes = next(queue), num_passes + 1
            metrics = training(*batch, share, budget.rate(_PEAK_RATE, share), rng)
            if step_idx % 4 == 0:
                average.update(step_idx)
            if step_idx % _LOG_EVERY == 0 and rank == 0:
                values = {name: float(value) for name, value in metrics.items()}
                progress.set_postfix({k: f"{v:.3f}" for k, v in values.items()})
                times = {"step": step_idx, "seconds": budget.used_s, "passes": num_passes}
                append_json(work.log("talker"), times | values)
            if rank == 0 and budget.due:
                save()
            step_idx += 1
            progress.update()
    if rank == 0:
        save()
    group.close()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `codes`")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--positions", type=int, default=24_000, help="positions of a batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that share a batch, one per GPU"
    )
    options = parser.parse_args()
    work = Work(options.work)
    train(work, options.minutes, options.positions, options.seed, options.processes)


if __name__ == "__main__":
    main()
