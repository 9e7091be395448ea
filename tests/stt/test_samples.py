"""Samples in pieces: equal to the same samples in one array."""

import numpy as np
import pytest
from numpy.typing import NDArray

from megakernel_stt.engine.samples import SampleQueue, copy_to, size_of


def pieces(rng: np.random.Generator, num: int) -> list[NDArray[np.float32]]:
    return [rng.standard_normal(rng.integers(0, 6)).astype(np.float32) for _ in range(num)]


@pytest.mark.parametrize("seed", range(20))
def test_a_queue_is_the_array_of_its_samples(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queue, expected = SampleQueue(3), np.zeros(3, np.float32)
    for _ in range(30):
        for piece in pieces(rng, 3):
            queue.add(piece)
            expected = np.concatenate([expected, piece])
        num = int(rng.integers(0, len(expected) + 3))
        found = queue.first(num)
        assert size_of(found) == min(num, len(expected))
        np.testing.assert_array_equal(np.concatenate([*found, expected[:0]]), expected[:num])
        num = int(rng.integers(0, 10))
        queue.drop(num)
        expected = expected[num:]
        np.testing.assert_array_equal(queue.all(), expected)


def test_a_fork_and_its_queue_do_not_change_each_other() -> None:
    queue = SampleQueue(2)
    fork = queue.fork()
    fork.add(np.ones(3, np.float32))
    queue.drop(1)
    assert queue.all().tolist() == [0]
    assert fork.all().tolist() == [0, 0, 1, 1, 1]


def test_a_copy_leaves_the_rest_of_a_row() -> None:
    rng = np.random.default_rng(0)
    rows, samples = np.full((5, 20), 9, np.float32), [pieces(rng, 4) for _ in range(4)]
    copy_to(rows, samples)
    for row, parts in zip(rows, samples, strict=False):
        np.testing.assert_array_equal(row[: size_of(parts)], np.concatenate(parts))
        assert (row[size_of(parts) :] == 9).all()
    assert (rows[4] == 9).all()


def test_a_copy_changes_no_other_row() -> None:
    rows, piece = np.zeros((2, 4), np.float32), np.ones(5, np.float32)
    for samples in ([[piece]], [[piece[:1]]] * 3):
        with pytest.raises(AssertionError):
            copy_to(rows, samples)
    with pytest.raises(AssertionError):
        copy_to(rows[:, ::2], [[piece[:1]]])
