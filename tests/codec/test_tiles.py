"""The choice of a tile against the times of all tiles that were measured on a GPU."""

import json
from pathlib import Path

import pytest

from megakernel_tts.kernels.codec_structs import ProjectionParams
from megakernel_tts.kernels.codec_tiles import choose_tile, num_k_splits

_FILE = Path(__file__).parents[2] / "bench/results/codec-tiles-h100.json"
_NUM_SMS = 132


@pytest.mark.parametrize(("num_frames", "most"), [(1, 1.04), (8, 1.02), (64, 1.01), (256, 1.01)])
def test_chosen_tiles_are_nearly_the_fastest(num_frames: int, most: float) -> None:
    """In sum over the projections of different shapes."""
    launches = json.loads(_FILE.read_text())[f"us_of_{num_frames}_frames"]["launches"]
    chosen_us = fastest_us = 0.0
    for launch in launches:
        if "shape" not in launch:
            continue  # no projection
        rows, columns, taps, channels, dilation, planes, epilogue = launch["shape"]
        params = ProjectionParams(
            num_rows=rows,
            num_columns=columns,
            num_taps=taps,
            dilation=dilation,
            epilogue=epilogue,
        )
        params.input.num_channels, params.input.num_planes = channels, planes
        params.input.rows_per_frame = rows // num_frames
        params.num_k_splits = num_k_splits(params)
        us = launch["us_by_tile"]
        chosen_us += us[choose_tile(params, _NUM_SMS).kernel.removeprefix("codec_project_")]
        fastest_us += min(us.values())
    assert fastest_us > 0
    assert chosen_us <= most * fastest_us
