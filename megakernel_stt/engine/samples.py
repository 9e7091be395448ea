"""The samples of a stream in pieces, which are copied once: to the inputs of a step.

NumPy releases the interpreter lock in operations on more than 500 elements. An engine thread with
many streams would wait for the lock after each: up to 5 ms while pushes of packets keep it. Slices
of arrays and assignments of memoryviews do not release it.
"""

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Pieces = Sequence[NDArray[np.float32]]


class SampleQueue:
    """Samples at 16 kHz of a stream from which later chunks begin."""

    def __init__(self, num_before: int) -> None:
        """Begins with samples of zero.

        Args:
            num_before: Their number.
        """
        self._pieces = [np.zeros(num_before, np.float32)]

    def add(self, samples: NDArray[np.float32]) -> None:
        """Adds samples [samples], which nothing may change."""
        self._pieces.append(samples)

    def first(self, num_samples: int) -> Pieces:
        """The first `num_samples` samples, or all if there are fewer."""
        found = list[NDArray[np.float32]]()
        for piece in self._pieces:
            if num_samples <= 0:
                break
            found.append(piece[:num_samples])
            num_samples -= len(piece)
        return found

    def drop(self, num_samples: int) -> None:
        """Drops the first `num_samples` samples, or all if there are fewer."""
        for i, piece in enumerate(self._pieces):
            if len(piece) > num_samples:
                self._pieces = [piece[num_samples:], *self._pieces[i + 1 :]]
                return
            num_samples -= len(piece)
        self._pieces = []

    def fork(self) -> "SampleQueue":
        """A queue of the same samples, to which others can be added."""
        fork = copy.copy(self)
        fork._pieces = [*self._pieces]
        return fork

    def all(self) -> NDArray[np.float32]:
        """All samples [samples]."""
        return np.concatenate([np.zeros(0, np.float32), *self._pieces])


def size_of(pieces: Pieces) -> int:
    """Number of samples of pieces."""
    return sum(len(piece) for piece in pieces)


def copy_to(rows: NDArray[np.float32], samples: Sequence[Pieces]) -> None:
    """Copies samples to the beginnings of rows.

    Args:
        rows: [streams, samples], contiguous.
        samples: Of each stream, at most as many as a row has; those of a row behind them stay.
    """
    assert rows.flags.c_contiguous and len(samples) <= len(rows)
    flat, size = rows.reshape(-1).data, rows.shape[1]
    for i, pieces in enumerate(samples):
        at = i * size
        assert size_of(pieces) <= size
        for piece in pieces:
            flat[at : at + len(piece)] = piece.data
            at += len(piece)
