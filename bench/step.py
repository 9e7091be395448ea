"""Time per frame and per prefill of the decode kernel, in total and by phase.

The weights are random and have the shapes of the released sizes. One launch makes 32 frames and is
timed with CUDA events; a launch that makes fewer frames is an error. A CUDA graph of plain torch
with as many streams is the baseline.

python -m bench.step --json bench/results/step.json
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.events import event_times
from bench.frames import FRAMES_PER_LAUNCH, disable_end_of_speech, frame_ms
from bench.report import write
from megakernel_common.checkpoint import leaves, map_leaves
from megakernel_tts import Sampling
from megakernel_tts.backends.decode_buffers import PHASE_INTERVALS, PHASES
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.bench.torch_graph import frame_graph
from megakernel_tts.kernels.decode import ORDINARY, DecodeVariant, load_decode_kernels
from megakernel_tts.model.config import ModelConfig, read_model_config
from megakernel_tts.model.random_checkpoint import write_checkpoint
from megakernel_tts.model.random_released import SIZES, write_released_config
from megakernel_tts.model.weights import Model, Stack, model_specs

_STREAM_COUNTS = (1, 2, 4, 8, 16, 32, 48, 64)
_NUM_SLOTS = max(_STREAM_COUNTS)
_POSITIONS = (16, 100, 500, 1000, 2000)
_PROMPT, _PREFIX = 10, 9  # positions
_LONG_PROMPT = 24
_PROMPTS = (_PROMPT, _LONG_PROMPT, 35, 64)  # of one stream, with nothing cached
_REPEATS = 7

PhaseTimes = dict[str, dict[str, float]]  # phase -> microseconds by interval


def random_model(size: str) -> tuple[Model, ModelConfig]:
    """Draws bfloat16 weights on the GPU.

    Args:
        size: A key of `SIZES`, `0.6B` or `1.7B`.

    Returns:
        The weights, and the config of that size.
    """
    name, hidden, intermediate = SIZES[size]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(spec: Any) -> Tensor:
        noise = torch.randn(spec.shape, device="cuda", generator=generator)
        return (1.0 + 0.1 * noise if len(spec.shape) == 1 else 0.02 * noise).bfloat16()

    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder)
        write_checkpoint(small, "custom_voice", name, codes=256)
        config = read_model_config(
            write_released_config(small / "config.json", small / "large.json", hidden, intermediate)
        )
    return map_leaves(model_specs(config), draw), config


def median_ms(launch: Callable[[], object]) -> float:
    """Median GPU time of a launch over a few repeats, in milliseconds, after one warm-up."""
    launch()
    return median(event_times(launch, _REPEATS))


def read_bandwidth() -> float:
    """Bytes per second at which a sum over 4 GB reads memory."""
    data = torch.ones(1 << 30, device="cuda")
    return data.numel() * 4 / median_ms(data.sum) * 1e3


def _num_bytes(weights: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in leaves(weights))


def stack_bytes(stack: Stack) -> dict[str, int]:
    """Bytes of weight matrices that one pass of a decoder stack reads, by phase.

    Norms, keys and values are not counted: they are below one per cent.
    """
    layers = stack.layers
    return {
        "qkv": sum(_num_bytes((layer.q, layer.k, layer.v)) for layer in layers),
        "out": sum(_num_bytes(layer.o) for layer in layers),
        "gate_up": sum(_num_bytes((layer.gate, layer.up)) for layer in layers),
        "down": sum(_num_bytes(layer.down) for layer in layers),
    }


def frame_bytes(model: Model, num_passes: int) -> dict[str, int]:
    """Bytes of weight matrices that one frame reads, by phase.

    Args:
        model: The weights.
        num_passes: Passes of the code predictor in a frame.
    """
    talker, predictor = stack_bytes(model.talker.stack), stack_bytes(model.predictor.stack)
    project = model.predictor.project
    return {phase: talker[phase] + num_passes * predictor[phase] for phase in talker} | {
        "head": _num_bytes(model.talker.head) + _num_bytes(model.predictor.heads),
        "input_projection": num_passes * _num_bytes(project.weight) if project else 0,
    }


class KernelTimer:
    """Times launches of a `Megakernel` backend.

    Attributes:
        kernel: The backend.
        prompt: [64, hidden], the input vectors of a prompt, bfloat16 on the host.
    """

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        variant: DecodeVariant = ORDINARY,
        num_slots: int = _NUM_SLOTS,
    ) -> None:
        """Loads the kernels that so many slots need; those for few have no wide prefill."""
        hidden = config.talker.stack.hidden_size
        pad = torch.randn(hidden, device="cuda").bfloat16()
        kernels = load_decode_kernels(config, pad.device, variant, num_streams=num_slots)
        self.kernel = Megakernel(
            model, config, pad, num_slots=num_slots, max_positions=2048, kernels=kernels
        )
        disable_end_of_speech(self.kernel)
        self.prompt = 0.05 * torch.randn(max(_PROMPTS), hidden).bfloat16()

    def prefill(self, num_streams: int, common: int, length: int = _PROMPT) -> float:
        """Times the prefill of one prompt for each of several streams.

        Args:
            num_streams: Prompts, one for each stream.
            common: Leading positions whose keys and values come from the prefix cache, rounded
                down to whole tiles of the prompt.
            length: Positions of each prompt.

        Returns:
            Milliseconds for all prompts together.
        """
        prompt = self.prompt[:length]
        requests = [
            PrefillRequest(slot, prompt, Sampling(seed=slot), 0, common)
            for slot in range(num_streams)
        ]
        return median_ms(lambda: self.kernel.prefill(requests))

    def frame(self, num_streams: int, position: int) -> float:
        """Times a frame.

        Args:
            num_streams: Streams of the launch.
            position: Talker position of the launch's first frame.

        Returns:
            Milliseconds for one frame of all streams.

        Raises:
            RuntimeError: A launch made fewer frames than requested.
        """
        slots = list(range(num_streams))
        for slot in slots:
            self.kernel.prefill([PrefillRequest(slot, self.prompt[:_PROMPT], Sampling(seed=slot))])
            self.kernel.feed(slot, self.prompt[:0], True)
            self.kernel.step([slot], 1)
            self.kernel._state[slot].num_prompt = position
        return frame_ms(self.kernel, slots)

    def phases(self) -> dict[str, PhaseTimes]:
        """Microseconds by phase, as the mean over thread blocks; needs the profiling build.

        The profiling build counts clock cycles. The time of a frame by CUDA events converts
        cycles to microseconds.

        Returns:
            For a frame of one stream, of eight and of 64, and for prefill batches of 8, 16, 2 and
            64 columns, the last of eight prompts and of one: the times of each phase.
        """
        frame_us = 1e3 * self.frame(1, 100)
        cycles = {"frame": self._cycles() / FRAMES_PER_LAUNCH}
        self.frame(8, 100)
        cycles["frame_eight_streams"] = self._cycles() / FRAMES_PER_LAUNCH
        self.frame(_NUM_SLOTS, 100)
        cycles[f"frame_{_NUM_SLOTS}_streams"] = self._cycles() / FRAMES_PER_LAUNCH
        for name, common, length in (("8", 0, 8), ("16", 8, _LONG_PROMPT), ("2", 8, 10)):
            self.prefill(1, common, length)
            cycles[f"prefill_{name}_columns"] = self._cycles()
        self.prefill(8, 0, 8)
        cycles["prefill_64_columns"] = self._cycles()
        self.prefill(1, 0, 64)
        cycles["prefill_64_columns_of_one_prompt"] = self._cycles()
        cycles_per_us = cycles["frame"].sum() / frame_us
        return {
            work: {
                phase: dict(zip(PHASE_INTERVALS, row, strict=True))
                for phase, row in zip(PHASES, (counts / cycles_per_us).tolist(), strict=True)
            }
            for work, counts in cycles.items()
        }

    def _cycles(self) -> Tensor:
        """Mean cycles over thread blocks in the last launch, [phases, intervals] float64."""
        return self.kernel._buffers.phase_times.double().mean(0)


def phase_table(
    phases: PhaseTimes, weight_bytes: Mapping[str, int], bandwidth: float
) -> Mapping[str, object]:
    """Adds to the times of each phase how fast it reads its weights, and a total.

    Args:
        phases: Microseconds of each phase by interval.
        weight_bytes: Bytes of weights that each phase reads.
        bandwidth: Read bandwidth of the GPU in bytes per second.

    Returns:
        For each phase and for `total`: the times, megabytes, GB per second, and the share of the
        read bandwidth.
    """

    def row(times_us: Mapping[str, float], num_bytes: int) -> dict[str, float]:
        rate = num_bytes / sum(times_us.values()) * 1e6 if num_bytes else 0.0
        return {interval: round(time_us, 1) for interval, time_us in times_us.items()} | {
            "mb": round(num_bytes / 1e6, 1),
            "gb_s": round(rate / 1e9),
            "share_of_read_bandwidth": round(rate / bandwidth, 3),
        }

    sums = {name: sum(times[name] for times in phases.values()) for name in phases["qkv"]}
    rows = {phase: row(times, weight_bytes.get(phase, 0)) for phase, times in phases.items()}
    return rows | {"total": row(sums, sum(weight_bytes.values()))}


def measure(size: str) -> dict[str, object]:
    """Measures all figures of a size, `0.6B` or `1.7B`."""
    model, config = random_model(size)
    phases = KernelTimer(model, config, DecodeVariant(profile=True)).phases()
    num_passes = config.talker.num_groups  # with one stream, positions 0 and 1 share a pass
    prefill = stack_bytes(model.talker.stack)
    weight_bytes = {
        "frame": frame_bytes(model, num_passes - 1),
        "frame_eight_streams": frame_bytes(model, num_passes),
        f"frame_{_NUM_SLOTS}_streams": frame_bytes(model, num_passes),
    }
    bandwidth, frame_weights = read_bandwidth(), sum(weight_bytes["frame"].values())
    graph_ms = {p: round(median_ms(frame_graph(model, config, p)), 3) for p in (100, 500)}
    graph_ms_by_streams = {
        n: round(median_ms(frame_graph(model, config, 100, n)), 3) for n in _STREAM_COUNTS
    }
    timer = KernelTimer(model, config)
    narrow = KernelTimer(model, config, num_slots=8)
    by_streams = {n: round(timer.frame(n, 100), 3) for n in _STREAM_COUNTS}
    by_position = {p: round(timer.frame(1, p), 3) for p in _POSITIONS}
    return {
        "frame_ms_by_streams": by_streams,
        "frame_ms_by_streams_at_500": {n: round(timer.frame(n, 500), 3) for n in _STREAM_COUNTS},
        "frame_ms_by_position": by_position,
        "prefill_ms_by_positions": {n: round(timer.prefill(1, 0, n), 3) for n in _PROMPTS},
        "prefill_ms_by_positions_in_narrow_batches": {
            n: round(narrow.prefill(1, 0, n), 3) for n in _PROMPTS
        },
        "prefill_ms_cached_prefix": round(timer.prefill(1, _PREFIX), 3),
        "prefill_ms_24_positions_cached_prefix": round(timer.prefill(1, 8, _LONG_PROMPT), 3),
        "prefill_ms_eight_streams": round(timer.prefill(8, 0), 3),
        "prefill_ms_eight_streams_in_narrow_batches": round(narrow.prefill(8, 0), 3),
        "prefill_ms_eight_streams_cached_prefix": round(timer.prefill(8, _PREFIX), 3),
        "torch_graph_ms_by_position": graph_ms,
        "torch_graph_ms_by_streams": graph_ms_by_streams,
        "speedup_over_graph_at_500": round(graph_ms[500] / by_position[500], 2),
        "weights_gb": round(frame_weights / 1e9, 3),
        "read_gb_s": round(bandwidth / 1e9),
        "share_of_read_bandwidth": round(frame_weights / by_streams[1] * 1e3 / bandwidth, 3),
        "phases_us": {
            work: phase_table(times, weight_bytes.get(work, prefill), bandwidth)
            for work, times in phases.items()
        },
    }


@torch.inference_mode()
def main() -> None:
    """Prints the figures of both sizes; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    figures: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "command": "bench.step"}
    for size in SIZES:
        figures[size] = measure(size)
        print(f"{size}: {json.dumps(figures[size], indent=1)}", file=sys.stderr)
    write(figures, arguments.json, packages=("torch",))


if __name__ == "__main__":
    main()
