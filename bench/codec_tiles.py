"""Times every launch of the codec's decoder with every tile that fits; the tile tables' source.

The codec has the released size and random weights. A launch is repeated in a CUDA graph, so that
its time contains neither the host nor the gap to other kernels.

python -m bench.codec_tiles --json bench/results/codec-tiles.json
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.events import event_times
from bench.report import write
from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.kernels import codec as kernels
from megakernel_tts.kernels.codec_structs import ProjectionParams
from megakernel_tts.model.random_released import random_codec_weights

_FRAMES = (8, 64, 256)
_LAUNCHES = 10  # of a graph
_REPEATS = 5


def _time_us(launch: Callable[[int], None], num_frames: int) -> float:
    """Microseconds of a launch."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launch(num_frames)
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_LAUNCHES):
            launch(num_frames)
        graph.capture_end()
        times = event_times(graph.replay, _REPEATS)
    return round(1e3 * min(times) / _LAUNCHES, 2)


def _time_tiles(
    launch: Callable[[int], None], num_frames: int, known: dict[tuple[int, ...], dict[str, Any]]
) -> dict[str, Any]:
    """The shape of a launch, its chosen tile, and microseconds by tile.

    Args:
        launch: The launch.
        num_frames: Frames of the call.
        known: The results for other launches by their shape.
    """
    seen: list[ProjectionParams] = []
    choose = kernels.choose_tile

    def record(params: ProjectionParams, num_sms: int) -> kernels.Tile | kernels.ManyRowTile:
        seen.append(params)
        return choose(params, num_sms)

    kernels.choose_tile = record
    launch(num_frames)
    if not seen:
        kernels.choose_tile = choose
        return {"us": _time_us(launch, num_frames)}
    params = seen[0]
    shape = (
        params.num_rows,
        params.num_columns,
        params.num_taps,
        params.input.num_channels,
        params.dilation,
        params.input.num_planes,
        params.num_k_splits,
        params.epilogue,
    )
    if shape in known:
        kernels.choose_tile = choose
        return known[shape]
    chosen = choose(params, torch.cuda.get_device_properties(0).multi_processor_count)
    taken: dict[str, float] = {}
    for tile in kernels.fitting_tiles(params):
        kernels.choose_tile = lambda *_, tile=tile: tile
        taken[tile.kernel.removeprefix("codec_project_")] = _time_us(launch, num_frames)
    kernels.choose_tile = choose
    best = min(taken, key=lambda name: taken[name])
    known[shape] = {
        "shape": shape,
        "us": taken[chosen.kernel.removeprefix("codec_project_")],
        "chosen": chosen.kernel.removeprefix("codec_project_"),
        "best": best,
        "best_us": taken[best],
        "tiles": taken,
    }
    return known[shape]


@torch.inference_mode()
def main() -> None:
    """Measures and prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights, config = random_codec_weights(Path(folder) / "config.json", seed=0)
    decoder = CudaDecoder(weights, config, slots=64)
    layers = decoder._kernels
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "command": "bench.codec_tiles",
    }
    for num_frames in _FRAMES:
        known: dict[tuple[int, ...], dict[str, Any]] = {}
        rows = [
            {"stage": stage, **_time_tiles(launch, num_frames, known)}
            for stage, launch in zip(layers.stages, layers.launches, strict=True)
        ]
        for row in rows:
            print(num_frames, {k: v for k, v in row.items() if k != "tiles"}, flush=True)
        figures[f"launches_of_{num_frames}_frames"] = rows
        figures[f"us_of_{num_frames}_frames"] = {
            "chosen": round(sum(row["us"] for row in rows)),
            "best": round(sum(row.get("best_us", row["us"]) for row in rows)),
        }
    write(figures, arguments.json, packages=("torch",))


if __name__ == "__main__":
    main()
