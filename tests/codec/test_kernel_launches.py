"""Which activations are tiled, by the layers that write and read them."""

import pytest

from megakernel_tts.codec.kernel_launches import ActivationLayouts
from megakernel_tts.kernels.codec_structs import Activations

_ADDRESS = 4096


class LargeCallsTiled:
    """A layer whose input is tiled in calls of more than 32 frames."""

    def __init__(self) -> None:
        self.input = Activations(data=_ADDRESS)

    def reads_tiles(self, num_frames: int) -> bool:
        return num_frames > 32


def layouts(readers: list[LargeCallsTiled]) -> ActivationLayouts:
    made = ActivationLayouts()
    for one in readers:
        made.add_reader(one)
    return made


def test_the_writer_and_the_reader_have_one_layout_for_each_size_of_a_call() -> None:
    one, output, updated = LargeCallsTiled(), Activations(data=_ADDRESS), Activations(data=_ADDRESS)
    made = layouts([one])
    made.add_update(updated)
    for num_frames, writes_tiles, tiled in (
        (33, True, True),
        (32, True, False),
        (33, True, True),
        (33, False, False),
    ):
        made.choose(output, num_frames, writes_tiles=writes_tiles)
        assert {bool(x.is_tiled) for x in (output, one.input, updated)} == {tiled}


@pytest.mark.parametrize("count", [0, 2])
def test_activations_without_one_reader_are_not_tiled(count: int) -> None:
    readers, output = [LargeCallsTiled() for _ in range(count)], Activations(data=_ADDRESS)
    layouts(readers).choose(output, 33, writes_tiles=True)
    assert not output.is_tiled
    assert not any(one.input.is_tiled for one in readers)
