"""What a frame of the kernel takes, phase by phase, beside a CUDA graph of plain torch.

Random weights of the released sizes; one launch makes many frames, timed with CUDA events.

python -m bench.step --json bench/results/step.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.events import event_times
from bench.graph import frame_graph
from bench.report import write
from megakernel_tts import Sampling
from megakernel_tts.backends.megakernel import PHASES, Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.kernels import build
from megakernel_tts.model.checkpoint import leaves, map_leaves
from megakernel_tts.model.config import ModelConfig, read_model_config
from megakernel_tts.model.random_checkpoint import write_checkpoint
from megakernel_tts.model.random_released import SIZES, released
from megakernel_tts.model.weights import Model, Stack, model_specs

_COLUMNS = (1, 2, 4, 8)
_POSITIONS = (16, 100, 500, 1000, 2000)
_PROMPT, _PREFIX = 10, 9
_LONGEST = 24
_FRAMES = 32  # a launch
_REPEATS = 7

Phases = dict[str, dict[str, float]]  # wait, multiply and rest of each


def random_model(size: str) -> tuple[Model, ModelConfig]:
    """bfloat16 weights of a released size on the GPU, and its config."""
    name, hidden, intermediate = SIZES[size]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(spec: Any) -> Tensor:
        noise = torch.randn(spec.shape, device="cuda", generator=generator)
        return (1.0 + 0.1 * noise if len(spec.shape) == 1 else 0.02 * noise).bfloat16()

    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder)
        write_checkpoint(small, "custom_voice", name, codes=256)
        config = read_model_config(
            released(small / "config.json", small / "large.json", hidden, intermediate)
        )
    return map_leaves(model_specs(config), draw), config


def milliseconds(act: Callable[[], object]) -> float:
    """The median of a few runs on the GPU, after one to warm up."""
    act()
    return median(event_times(act, _REPEATS))


def read_bandwidth() -> float:
    """Bytes a second that a plain sum over 4 GB reads."""
    data = torch.ones(1 << 30, device="cuda")
    return data.numel() * 4 / milliseconds(data.sum) * 1e3


def _size(part: object) -> int:
    return sum(t.numel() * t.element_size() for t in leaves(part))


def stack_bytes(stack: Stack) -> dict[str, int]:
    """Weights that a pass reads, by phase; norms, keys and values are small."""
    layers = stack.layers
    return {
        "qkv": sum(_size((w.q, w.k, w.v)) for w in layers),
        "out": sum(_size(w.o) for w in layers),
        "gate_up": sum(_size((w.gate, w.up)) for w in layers),
        "down": sum(_size(w.down) for w in layers),
    }


def frame_bytes(model: Model, passes: int) -> dict[str, int]:
    """Weights that a frame reads, by phase, of which the predictor takes so many passes."""
    talker, predictor = stack_bytes(model.talker.stack), stack_bytes(model.predictor.stack)
    project = model.predictor.project
    return {phase: talker[phase] + passes * predictor[phase] for phase in talker} | {
        "head": _size(model.talker.head) + _size(model.predictor.heads),
        "input_projection": passes * _size(project.weight) if project else 0,
    }


class Bench:
    """A kernel with eight slots of random weights."""

    def __init__(self, model: Model, config: ModelConfig) -> None:
        hidden = config.talker.stack.hidden
        self.pad = torch.randn(hidden, device="cuda").bfloat16()
        self.kernel = Megakernel(model, config, self.pad, slots=8, positions=2048)
        self.prompt = 0.05 * torch.randn(_LONGEST, hidden).bfloat16()

    def prefill(self, streams: int, common: int, length: int = _PROMPT) -> float:
        """Ms for a prompt each, of so many positions, of which the common ones were run before."""
        prompt = self.prompt[:length]
        starts = [PrefillRequest(i, prompt, Sampling(seed=i), 0, common) for i in range(streams)]
        return milliseconds(lambda: self.kernel.prefill(starts))

    def frame(self, columns: int, position: int) -> float:
        """Ms for a frame of all columns."""
        slots = list(range(columns))
        for slot in slots:
            self.kernel.prefill([PrefillRequest(slot, self.prompt[:_PROMPT], Sampling(seed=slot))])
            self.kernel.feed(slot, self.prompt[:0], True)
            self.kernel.step([slot], 1)
            self.kernel._state[slot].prompt = position
        return milliseconds(lambda: self._launch(slots)) / _FRAMES

    def _launch(self, slots: list[int]) -> None:
        """Frames from the same place on; a stream that ends early keeps its column."""
        self.kernel._launch(slots, _FRAMES)

    def phases(self) -> dict[str, Phases]:
        """Microseconds by phase, the mean of the blocks, of frames and of passes of a prompt.

        Cycles of the profiling build. Frames of a launch tell how many make a microsecond.
        """
        frame = 1e3 * self.frame(1, 100)
        cycles = {"frame": self._cycles() / _FRAMES}
        self.frame(8, 100)
        cycles["frame_of_eight"] = self._cycles() / _FRAMES
        self.prefill(1, 0, 8)
        cycles["eight_positions"] = self._cycles()
        self.prefill(1, 8, _LONGEST)
        cycles["sixteen_positions"] = self._cycles()
        self.prefill(1, 8, 10)
        cycles["two_positions"] = self._cycles()
        a_microsecond = cycles["frame"].sum() / frame
        return {
            work: {
                phase: dict(zip(("wait", "multiply", "rest"), row, strict=True))
                for phase, row in zip(PHASES, (of / a_microsecond).tolist(), strict=True)
            }
            for work, of in cycles.items()
        }

    def _cycles(self) -> Tensor:
        """Of the last launch, [phases, 3]."""
        return self.kernel._memory[-1].double().mean(0)


def table(phases: Phases, weights: Mapping[str, int], bandwidth: float) -> Mapping[str, object]:
    """Microseconds of each phase, and how fast it reads its weights; of all together."""

    def row(microseconds: Mapping[str, float], read: int) -> dict[str, float]:
        speed = read / sum(microseconds.values()) * 1e6 if read else 0.0
        return {part: round(time, 1) for part, time in microseconds.items()} | {
            "mb": round(read / 1e6, 1),
            "gb_s": round(speed / 1e9),
            "share_of_read_bandwidth": round(speed / bandwidth, 3),
        }

    parts = {part: sum(times[part] for times in phases.values()) for part in phases["qkv"]}
    every = {phase: row(times, weights.get(phase, 0)) for phase, times in phases.items()}
    return every | {"all": row(parts, sum(weights.values()))}


def profiled(size: str) -> dict[str, Phases]:
    """`Bench.phases` by the profiling build: of a process of its own, which has no other."""
    command = [sys.executable, "-m", "bench.step", "--phases", size]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(found.splitlines()[-1])


def measure(size: str) -> dict[str, object]:
    """All figures of a size."""
    phases = profiled(size)
    model, config = random_model(size)
    passes = config.talker.groups  # of the predictor; of one stream, the first two share one
    prompt = stack_bytes(model.talker.stack)
    read = {
        "frame": frame_bytes(model, passes - 1),
        "frame_of_eight": frame_bytes(model, passes),
        "eight_positions": prompt,
        "sixteen_positions": prompt,
        "two_positions": prompt,
    }
    bandwidth, weights = read_bandwidth(), sum(read["frame"].values())
    graph = {p: round(milliseconds(frame_graph(model, config, p)), 3) for p in (100, 500)}
    bench = Bench(model, config)
    columns = {c: round(bench.frame(c, 100), 3) for c in _COLUMNS}
    positions = {p: round(bench.frame(1, p), 3) for p in _POSITIONS}
    return {
        "frame_ms_by_streams": columns,
        "frame_ms_by_streams_at_500": {c: round(bench.frame(c, 500), 3) for c in _COLUMNS},
        "frame_ms_by_position": positions,
        "prefill_ms": round(bench.prefill(1, 0), 3),
        "prefill_ms_after_its_prefix": round(bench.prefill(1, _PREFIX), 3),
        "prefill_ms_of_24_positions": round(bench.prefill(1, 0, _LONGEST), 3),
        "prefill_ms_of_24_positions_after_eight": round(bench.prefill(1, 8, _LONGEST), 3),
        "prefill_ms_of_eight": round(bench.prefill(8, 0), 3),
        "prefill_ms_of_eight_after_their_prefix": round(bench.prefill(8, _PREFIX), 3),
        "torch_graph_ms_by_position": graph,
        "times_the_graph_at_500": round(graph[500] / positions[500], 2),
        "weights_gb": round(weights / 1e9, 3),
        "read_gb_s": round(bandwidth / 1e9),
        "share_of_read_bandwidth": round(weights / columns[1] * 1e3 / bandwidth, 3),
        "phases_us": {work: table(found, read[work], bandwidth) for work, found in phases.items()},
    }


@torch.inference_mode()
def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--phases", choices=SIZES, help="phases alone, as one line of JSON")
    arguments = parser.parse_args()
    if arguments.phases:
        build.load(torch.device("cuda"), profile=True)
        print(json.dumps(Bench(*random_model(arguments.phases)).phases()))
        return
    figures: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "command": "bench.step"}
    for size in SIZES:
        figures[size] = measure(size)
        print(f"{size}: {json.dumps(figures[size], indent=1)}", file=sys.stderr)
    write(figures, arguments.json, packages=("torch",))


if __name__ == "__main__":
    main()
