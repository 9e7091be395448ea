"""Time of every projection of the codec's decoder with every tile that it may have.

`choose_tile` in megakernel_tts/kernels/codec_tiles.py estimates these times, and `choose_unit_tile`
in codec_unit_tiles.py those of residual units as one launch or two. The codec has the
released size and random weights. A launch is repeated in a CUDA graph, so that its time contains
neither the host nor the start of the graph; several launches of one shape are timed once.

python -m bench.codec_tiles --json bench/results/codec-tiles.json
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.events import event_times
from bench.report import write
from megakernel_tts.codec.decoder_kernels import DecoderKernels
from megakernel_tts.codec.kernel_launches import Launch, LayerLaunches
from megakernel_tts.kernels.codec import load_codec_kernels
from megakernel_tts.kernels.codec_structs import (
    ATTENTION_WINDOW,
    ProjectionParams,
    ResidualUnitParams,
)
from megakernel_tts.kernels.codec_tiles import (
    AnyTile,
    all_fitting_tiles,
    choose_tile,
    fitting_tiles,
    reads_tiled_rows,
)
from megakernel_tts.kernels.codec_unit_tiles import (
    ResidualUnitTile,
    choose_unit_tile,
    fitting_unit_tiles,
)
from megakernel_tts.model.random_released import random_codec_weights

_FRAMES = (1, 8, 64, 256)
_STREAMS = 64
_LAUNCHES = 10  # of a graph
_REPEATS = 5
_SEPARATE = "separate"  # instead of the name of a residual unit's kernel: two launches

Shape = tuple[int, ...]


class _Chooser:
    """Gives launches a fixed tile, or the one of `choose_tile`, and keeps what was launched.

    Attributes:
        fixed: The tile of all launches; None: the one of `choose_tile`.
        chosen: The tile of the last projection; None before one was launched.
        fitting: The tiles that the last projection may have.
        shape: Rows, columns, taps, channels, dilation, planes, epilogue and channels of the output
            of the last projection.
        key: The shape, and what else changes the time: planes of the output, whether the sum is
            stored.
    """

    def __init__(self) -> None:
        self.fixed: AnyTile | None = None
        self.reset()

    def reset(self) -> None:
        """Discards the last projection."""
        self.chosen: AnyTile | None = None
        self.fitting: list[AnyTile] = []
        self.shape: Shape = ()
        self.key: Shape = ()

    def __call__(self, params: ProjectionParams, num_sms: int) -> AnyTile:
        if self.fixed is not None:
            params.input.is_tiled = reads_tiled_rows(self.fixed)
        elif not fitting_tiles(params):  # the input was tiled for a residual unit as one launch
            params.input.is_tiled = False
        self.chosen = self.fixed or choose_tile(params, num_sms)
        self.fitting = all_fitting_tiles(params)
        self.shape = _shape(params)
        self.key = (*self.shape, params.output.num_planes, bool(params.residual_out))
        return self.chosen


class _UnitChooser:
    """The same for residual units.

    Attributes:
        fixed: The tile of all launches; None: the one of `choose_unit_tile`.
        chosen: The tile that `choose_unit_tile` chose for the last unit; None: two launches.
        fitting: The tiles that the last unit may have.
        shape: `shape` of the unit's first projection.
        key: `shape` and `key` of its projections.
    """

    def __init__(self) -> None:
        self.fixed: ResidualUnitTile | None = None
        self.chosen: ResidualUnitTile | None = None
        self.fitting: list[ResidualUnitTile] = []
        self.shape: Shape = ()
        self.key: Shape = ()

    def __call__(self, params: ResidualUnitParams, num_sms: int) -> ResidualUnitTile | None:
        self.chosen = choose_unit_tile(params, num_sms)
        self.fitting = fitting_unit_tiles(params)
        self.shape, second = _shape(params.convolution), params.pointwise
        # The 1 distinguishes the key from that of a projection.
        self.key = (*self.shape, second.output.num_planes, bool(second.residual_out), 1)
        return self.fixed or self.chosen


def _shape(params: ProjectionParams) -> Shape:
    return (
        params.num_rows,
        params.num_columns,
        params.num_taps,
        params.input.num_channels,
        params.dilation,
        params.input.num_planes,
        params.epilogue.value,
        params.output.num_channels,
    )


def _write_requests(decoder: DecoderKernels, num_frames: int) -> None:
    """Divides the frames among the streams, whose attention windows are full."""
    frames = np.arange(num_frames)
    frames_of_stream = -(-num_frames // _STREAMS)
    slots = frames // frames_of_stream
    requests = decoder.requests[:num_frames]
    requests["slot"], requests["first_frame"] = slots, slots * frames_of_stream
    requests["position"] = ATTENTION_WINDOW + frames % frames_of_stream


def _time_us(launch: Launch, num_frames: int) -> float:
    """Microseconds of a launch."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launch(num_frames)
        stream.synchronize()
        graph.capture_begin()
        for _ in range(_LAUNCHES):
            launch(num_frames)
        graph.capture_end()
        times = event_times(graph.replay, _REPEATS)
    return round(1e3 * min(times) / _LAUNCHES, 2)


def _time_tiles(
    launch: Launch,
    num_frames: int,
    chooser: _Chooser,
    timed: dict[Shape, dict[str, Any]],
) -> dict[str, Any]:
    """Times a launch.

    Args:
        launch: The launch.
        num_frames: Frames of the call.
        chooser: Chooses its tile.
        timed: Results of earlier launches, to which this one is added.

    Returns:
        The microseconds of a launch that is no projection; of a projection also its shape, the
        chosen and the fastest tile, and the microseconds of each tile.
    """
    chooser.reset()
    chooser.fixed = None
    launch(num_frames)
    if chooser.chosen is None:
        return {"us": _time_us(launch, num_frames)}
    shape, key, chosen = chooser.shape, chooser.key, chooser.chosen.kernel
    if key not in timed:
        us: dict[str, float] = {}
        for tile in chooser.fitting:
            chooser.fixed = tile
            us[tile.kernel] = _time_us(launch, num_frames)
        best = min(us, key=lambda kernel: us[kernel])
        timed[key] = {
            "shape": shape, "us": us[chosen], "chosen": chosen, "best": best, "best_us": us[best],
            "us_by_tile": us,
        }  # fmt: skip
    return timed[key]


def _time_layer(
    layer: LayerLaunches,
    num_frames: int,
    chooser: _Chooser,
    unit_chooser: _UnitChooser,
    timed: dict[Shape, dict[str, Any]],
) -> dict[str, Any]:
    """Times a layer.

    Args:
        layer: The layer.
        num_frames: Frames of the call.
        chooser: Chooses the tiles of its projections.
        unit_chooser: Chooses the tile of a residual unit.
        timed: Results of earlier layers, to which this one is added.

    Returns:
        The result of `_time_tiles`. Of a residual unit that may be one launch: its shape, the
        results of its two launches, and the same figures as of a projection.
    """
    if layer.fused is None:
        return _time_tiles(layer.separate[0], num_frames, chooser, timed)
    unit_chooser.fixed = None
    layer.is_fused(num_frames)
    shape, key = unit_chooser.shape, unit_chooser.key
    chosen = _SEPARATE if unit_chooser.chosen is None else unit_chooser.chosen.kernel
    if key not in timed:
        us: dict[str, float] = {}
        for tile in unit_chooser.fitting:  # first, because two launches need another input
            unit_chooser.fixed = tile
            us[tile.kernel] = _time_us(layer.fused, num_frames)
        separate = [_time_tiles(launch, num_frames, chooser, timed) for launch in layer.separate]
        us[_SEPARATE] = round(sum(row["us"] for row in separate), 2)
        least_us = {**us, _SEPARATE: round(sum(row["best_us"] for row in separate), 2)}
        best = min(least_us, key=lambda kernel: least_us[kernel])
        timed[key] = {
            "unit_shape": shape, "us": us[chosen], "chosen": chosen, "best": best,
            "best_us": least_us[best], "us_by_tile": us, "separate": separate,
        }  # fmt: skip
    return timed[key]


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
    chooser, unit_chooser = _Chooser(), _UnitChooser()
    kernels = load_codec_kernels(torch.device("cuda", 0), choose=chooser, choose_unit=unit_chooser)
    decoder = DecoderKernels(
        weights, config, slots=_STREAMS, capacity=max(_FRAMES), kernels=kernels
    )
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "command": "bench.codec_tiles",
    }
    for num_frames in _FRAMES:
        timed: dict[Shape, dict[str, Any]] = {}
        rows: list[dict[str, Any]] = []
        _write_requests(decoder, num_frames)
        for layer in decoder.layers:
            chooser.fixed = unit_chooser.fixed = None
            decoder.decode(num_frames)  # decides which activations are tiled
            times = _time_layer(layer, num_frames, chooser, unit_chooser, timed)
            rows.append({"stage": layer.stage, **times})
        figures[f"us_of_{num_frames}_frames"] = {
            "chosen": round(sum(row["us"] for row in rows)),
            "best": round(sum(row.get("best_us", row["us"]) for row in rows)),
            "launches": list({str(row): row for row in rows}.values()),
        }
    write(figures, arguments.json, packages=("torch",))


if __name__ == "__main__":
    main()
