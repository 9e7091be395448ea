"""Synthetic speech in device memory, and batches of it in which all shapes are static."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from examples.train_ears.layout import Work
from megakernel_stt.model.config import SAMPLE_RATE

HELD_OUT_INTERVAL = 256  # one text in so many is for validation only
_LIMITS_S = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 13.0, 17.0, 22.0)  # durations of the groups
MIN_S, MAX_S = 0.25, _LIMITS_S[-1]


@dataclass(frozen=True)
class Group:
    """Recordings of similar durations, which are padded to the same shapes.

    Attributes:
        samples: Most samples of a recording.
        labels: Most tokens of a text.
        batch: Recordings of a batch.
        members: [recordings], their indices.
    """

    samples: int
    labels: int
    batch: int
    members: NDArray[np.int64]


class Recordings:
    """All shards, concatenated, with the tokens of their texts.

    Attributes:
        wave: [samples] int16 at 16 kHz.
        starts: [recordings] int64, first sample of each.
        samples: [recordings] int64, samples of each.
        tokens: [recordings, labels] int64, padded with 0.
        labels: [recordings] int64, tokens of each.
        held_out: Recordings for validation.
        groups: The others, by duration.
    """

    def __init__(self, work: Work, device: torch.device, batch_s: float) -> None:
        """Loads the shards of a run.

        Args:
            work: The run, after `synthesis`.
            device: Of the tensors.
            batch_s: Seconds of speech in a batch, padding included.

        Raises:
            FileNotFoundError: There is no shard.
        """
        files = sorted(work.recordings.glob("*.npz"))
        if not files:
            raise FileNotFoundError(f"{work.recordings} has no shards; run `synthesis` first.")
        waves, samples, texts = _read(files)
        self.wave = torch.cat([torch.from_numpy(wave).to(device) for wave in waves])
        ends = np.cumsum(samples)
        targets = work.targets.read_text(encoding="utf-8").splitlines()
        ids = [encoding.ids for encoding in work.tokenizer().encode_batch(targets)]
        rows = [ids[text] for text in texts]
        labels = np.array([len(row) for row in rows])
        tokens = np.zeros((len(rows), max(1, labels.max())), np.int64)
        for padded, row in zip(tokens, rows, strict=True):
            padded[: len(row)] = row
        self.starts = torch.from_numpy(ends - samples).to(device)
        self.samples = torch.from_numpy(samples).to(device)
        self.tokens = torch.from_numpy(tokens).to(device)
        self.labels = torch.from_numpy(labels).to(device)
        usable = (samples >= MIN_S * SAMPLE_RATE) & (samples <= MAX_S * SAMPLE_RATE) & (labels > 0)
        is_held_out = texts % HELD_OUT_INTERVAL == 0
        self.held_out = np.flatnonzero(usable & is_held_out)
        self.groups = _groups(samples, labels, usable & ~is_held_out, batch_s)

    @property
    def hours(self) -> float:
        """Duration of all recordings."""
        return len(self.wave) / SAMPLE_RATE / 3600

    def batches(self, rng: np.random.Generator) -> Iterator[tuple[Group, NDArray[np.int64]]]:
        """Batches of one pass over all groups, in random order; the rest of a group is left out."""
        found: list[tuple[Group, NDArray[np.int64]]] = []
        for group in self.groups:
            order = rng.permutation(group.members)
            count = len(order) // group.batch
            found += [(group, row) for row in order[: count * group.batch].reshape(count, -1)]
        return (found[i] for i in rng.permutation(len(found)))


def _read(
    files: Sequence[Path],
) -> tuple[list[NDArray[np.int16]], NDArray[np.int64], NDArray[np.int64]]:
    """Waves of the shards; samples and text of each recording."""
    waves, samples, texts = [], [], []
    for file in files:
        with np.load(file) as shard:
            waves.append(shard["wave"])
            samples.append(shard["samples"])
            texts.append(shard["text"])
    return waves, np.concatenate(samples), np.concatenate(texts)


def _groups(
    samples: NDArray[np.int64], labels: NDArray[np.int64], chosen: NDArray[np.bool_], batch_s: float
) -> list[Group]:
    groups: list[Group] = []
    least = 0
    for limit_s in _LIMITS_S:
        most = round(limit_s * SAMPLE_RATE)
        members = np.flatnonzero(chosen & (samples > least) & (samples <= most))
        least = most
        if len(members):
            batch = max(1, min(round(batch_s / limit_s), len(members)))
            groups.append(Group(most, int(labels[members].max()), batch, members))
    return groups
