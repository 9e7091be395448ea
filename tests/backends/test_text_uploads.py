"""Text vectors reach the device as if each were copied when it is fed."""

import random

import pytest
import torch
from torch import Tensor

from megakernel_tts.backends.text_uploads import TextUploads

SLOTS, POSITIONS, HIDDEN = 5, 12, 3


def test_vectors_are_where_a_copy_at_each_feed_puts_them() -> None:
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    text = torch.zeros(SLOTS, POSITIONS, HIDDEN, dtype=torch.bfloat16)
    expected, num_fed = text.clone(), [0] * SLOTS
    uploads = TextUploads(text, torch.clone)
    num_flushed = 0
    for _ in range(3000):
        slot, kind = rng.randrange(SLOTS), rng.random()
        if kind < 0.6:
            count = rng.randint(1, 4)
            if num_fed[slot] + count > POSITIONS:
                continue
            vectors = torch.randn(count, HIDDEN, generator=generator).bfloat16()
            uploads.add(slot, num_fed[slot], vectors)
            expected[slot, num_fed[slot] : num_fed[slot] + count] = vectors
            num_fed[slot] += count
        elif kind < 0.8:
            uploads.drop(slot)  # its stream ends; the next one may begin before the next launch
            num_fed[slot] = 0
        else:
            uploads.flush()
            num_flushed += 1
            for i, count in enumerate(num_fed):
                assert torch.equal(text[i, :count], expected[i, :count])
    assert num_flushed > 100


def test_all_streams_share_the_copies() -> None:
    copies: list[Tensor] = []

    def upload(host: Tensor) -> Tensor:
        copies.append(host)
        return host

    uploads = TextUploads(torch.zeros(SLOTS, POSITIONS, HIDDEN), upload)
    uploads.flush()
    assert not copies
    for slot in range(SLOTS):
        uploads.add(slot, slot, torch.ones(2, HIDDEN))
    uploads.flush()
    uploads.flush()
    assert [copy.shape[0] for copy in copies] == [2 * SLOTS, 2 * SLOTS], "vectors and their rows"


@pytest.mark.parametrize(
    "vectors",
    [torch.ones(2, HIDDEN), torch.ones(2, HIDDEN + 1).bfloat16(), torch.ones(HIDDEN).bfloat16()],
    ids=["dtype", "size", "shape"],
)
def test_vectors_that_cannot_be_copied_fail_for_their_stream(vectors: Tensor) -> None:
    text = torch.zeros(SLOTS, POSITIONS, HIDDEN, dtype=torch.bfloat16)
    uploads = TextUploads(text, torch.clone)
    uploads.add(0, 0, torch.ones(2, HIDDEN).bfloat16())
    with pytest.raises(ValueError, match="Text vectors must be"):
        uploads.add(1, 0, vectors)
    uploads.flush()
    assert text[0, :2].all() and not text[1].any()
