"""Which activations are tiled, by the layers that write and read them."""

from typing import cast

import pytest

from megakernel_tts.codec.kernel_launches import ActivationLayouts, ProjectionLaunch
from megakernel_tts.kernels.codec import CodecKernels
from megakernel_tts.kernels.codec_structs import Activations, ProjectionParams

_ADDRESS = 4096


class LargeCallsTiled:
    """Tiles the inputs of projections of more than 64 rows."""

    def is_tiled(self, params: ProjectionParams) -> bool:
        return params.num_rows > 64


def reader() -> ProjectionLaunch:
    params = ProjectionParams()
    params.input.data = _ADDRESS
    return ProjectionLaunch(params, rows_per_frame=2, writes=[])


def layouts(readers: list[ProjectionLaunch]) -> ActivationLayouts:
    made = ActivationLayouts(cast(CodecKernels, LargeCallsTiled()))
    for one in readers:
        made.add_reader(one)
    return made


def test_the_writer_and_the_reader_have_one_layout_for_each_size_of_a_call() -> None:
    one, output = reader(), Activations(data=_ADDRESS)
    made = layouts([one])
    for num_frames, writes_tiles, tiled in (
        (33, True, True),
        (32, True, False),
        (33, True, True),
        (33, False, False),
    ):
        made.choose(output, num_frames, writes_tiles=writes_tiles)
        assert bool(output.is_tiled) == bool(one.params.input.is_tiled) == tiled


@pytest.mark.parametrize("count", [0, 2])
def test_activations_without_one_reader_are_not_tiled(count: int) -> None:
    readers, output = [reader() for _ in range(count)], Activations(data=_ADDRESS)
    layouts(readers).choose(output, 33, writes_tiles=True)
    assert not output.is_tiled
    assert not any(one.params.input.is_tiled for one in readers)
