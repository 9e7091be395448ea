"""Random lattices of scores, and plain searches of their best paths."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Scores = NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """Scores [B, T, S] and the lengths of every item, int64 [B]."""

    scores: Tensor
    text: Tensor
    frames: Tensor


def plain_durations(scores: Scores) -> list[int]:
    """Durations of one item [T, S]: recurrence and traceback as in the Glow-TTS paper."""
    tokens, frames = scores.shape
    sums = np.full((tokens + 1, frames + 1), -np.inf, np.float32)
    sums[0, 0] = 0
    with np.errstate(invalid="ignore"):
        for s in range(1, frames + 1):
            best = np.maximum(sums[1:, s - 1], sums[:-1, s - 1]) + scores[:, s - 1]
            sums[1:, s] = np.where(np.isnan(best), -np.inf, best)
    durations, t = [0] * tokens, tokens
    for s in range(frames, 0, -1):
        durations[t - 1] += 1
        if t > 1 and (t == s or sums[t, s - 1] < sums[t - 1, s - 1]):
            t -= 1
    return durations


def every_path(tokens: int, frames: int) -> Iterator[list[int]]:
    """Yields the durations of every path through a lattice."""
    for cuts in combinations(range(1, frames), tokens - 1):
        edges = (0, *cuts, frames)
        yield [b - a for a, b in pairwise(edges)]


def tokens_of(durations: list[int]) -> NDArray[np.int64]:
    """The token of every frame, from the durations."""
    return np.repeat(np.arange(len(durations)), durations)


def plain_batch_durations(batch: Batch) -> Tensor:
    """Durations int32 [B, T] by `plain_durations`."""
    out = torch.zeros(batch.scores.shape[:2], dtype=torch.int32)
    for item, (t, s) in enumerate(zip(batch.text.tolist(), batch.frames.tolist(), strict=True)):
        if 1 <= t <= s:
            scores = batch.scores[item, :t, :s].float().numpy()
            out[item, :t] = torch.tensor(plain_durations(scores))
    return out


def random_batch(seed: int, max_tokens: int, max_frames: int, max_items: int = 8) -> Batch:
    """A ragged batch with a random row stride; with frequent ties if the seed is odd."""
    rng = np.random.default_rng(seed)
    items = int(rng.integers(1, max_items + 1))
    tokens = int(rng.integers(1, max_tokens + 1))
    frames = int(rng.integers(tokens, max(tokens + 3, max_frames) + 1))
    scores = rng.standard_normal((items, tokens, frames + int(rng.integers(0, 3))))
    if seed % 2:
        scores = np.round(scores)
    if seed % 3 == 0:
        scores = scores * 10 - 200
    text = rng.integers(1, tokens + 1, items)
    text[0] = tokens
    ends = rng.integers(text, frames + 1)
    ends[0] = frames
    whole = torch.from_numpy(scores.astype(np.float32))
    return Batch(whole[:, :, :frames], torch.from_numpy(text), torch.from_numpy(ends))
