"""GPU time of the decode kernels alone, by a program without torch (bench/kernel_timing.cu).

The program is compiled with nvcc for the GPU of this machine, with random weights of a released
size. A frame figure comes from one launch of many frames, a prefill figure from one prompt or one
prefill batch. Each is the median of several launches by CUDA events; every launch must give the
same codes.

To measure a change of the kernels, run this in two checkouts alternately on one GPU.

python -m bench.kernel_timing --model 0.6B --streams 1,8 --positions 16,100,300,484
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import write
from megakernel_common.kernels import build
from megakernel_tts.kernels.structs import ARGUMENT_STREAMS
from megakernel_tts.kernels.wide import needed_widths

_SOURCE = Path(__file__).with_suffix(".cu")
# Name -> type in csrc/shapes.cuh, layers of the talker and of the code predictor.
_MODELS = {
    "0.6B": ("Model06B", 28, 5),
    "1.7B": ("Model17B", 28, 5),
    "tiny": ("ModelTinyWide", 2, 2),
}


@dataclass(frozen=True)
class LaunchTiming:
    """Result of a job.

    Attributes:
        median_ms: Median time of a launch, in milliseconds.
        min_ms: Least time of a launch.
        checksum: Hash of the launch's codes, or of the prompt's hidden state.
    """

    median_ms: float
    min_ms: float
    checksum: str


def kernel_width(architecture: str, num_streams: int) -> int:
    """The streams of the wide kernel that launches so many streams; 0 for kernels of few streams.

    Args:
        architecture: As nvcc names it, such as `90a`.
        num_streams: Streams of a launch.
    """
    return (0, *needed_widths(architecture, num_streams, ARGUMENT_STREAMS))[-1]


def compile_program(model: str, architecture: str, folder: Path, width: int = 0) -> Path:
    """Compiles the program.

    Args:
        model: `0.6B`, `1.7B` or `tiny`.
        architecture: As nvcc names it, such as `90a`.
        folder: Folder for the program.
        width: Streams of its wide kernel; 0 for the kernels of few streams.

    Returns:
        The program's path.

    Raises:
        RuntimeError: nvcc is missing, or the compilation failed.
    """
    name, talker_layers, predictor_layers = _MODELS[model]
    program = folder / f"{_SOURCE.stem}_{width}"
    command = [
        *build.nvcc(architecture),
        f"-DMEGAKERNEL_MODEL={name}",
        f"-DMEGAKERNEL_TALKER_LAYERS={talker_layers}",
        f"-DMEGAKERNEL_PREDICTOR_LAYERS={predictor_layers}",
        *([f"-DMEGAKERNEL_WIDE_STREAMS={width}"] if width else []),
        *("-o", str(program), str(_SOURCE)),
    ]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        raise RuntimeError(f"nvcc could not compile {_SOURCE}:\n{compiled.stderr}")
    return program


def run_jobs(
    program: Path, jobs: Sequence[str], num_launches: int, l2_bytes: int = -1
) -> list[LaunchTiming]:
    """Runs the program.

    Args:
        program: Its path.
        jobs: Lines as described in bench/kernel_timing.cu.
        num_launches: Timed launches of each job.
        l2_bytes: L2 capacity for resident keys and values; -1 for the default of the kernels.

    Raises:
        RuntimeError: A launch failed, or two launches of a job gave different results.
    """
    command = [str(program), str(num_launches), str(l2_bytes)]
    run = subprocess.run(command, input="\n".join(jobs) + "\n", capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {run.stderr.strip()}")
    return [parse_timing(line) for line in run.stdout.splitlines()]


def parse_timing(line: str) -> LaunchTiming:
    """Parses one line of the program's output."""
    median_ms, min_ms, checksum = line.split()
    return LaunchTiming(float(median_ms), float(min_ms), checksum)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _batch(text: str) -> tuple[int, int]:
    columns, _, position = text.partition("@")
    return int(columns), int(position or 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=_MODELS, default="0.6B", help="random weights of this size")
    add("--streams", type=_integers, default=[1, 4, 8], help="streams of a launch, such as 1,4,8")
    add(
        "--positions",
        type=_integers,
        default=[16, 100, 300, 484],
        help="talker position of the first frame, such as 16,100",
    )
    add("--frames", type=int, default=32, help="frames of a launch")
    add("--prompts", type=_integers, default=[10], help="lengths of prompts, such as 10,24")
    add(
        "--batches",
        type=lambda text: [_batch(batch) for batch in text.split(",") if batch],
        default=[(2, 8), (8, 0), (16, 8)],
        help="prefill batches as COLUMNS@POSITION, such as 2@8,8@0,16@8",
    )
    add("--launches", type=int, default=15, help="timed launches of each job")
    add(
        "--l2-mb",
        type=float,
        help="L2 capacity in MB for keys and values that stay resident\n"
        "(default: a fifth of the cache)",
    )
    add("--json", type=Path, help="file for the figures")
    return parser


def main() -> int:
    """Prints the figures; writes them with --json."""
    options = _parser().parse_args()
    import torch

    if not torch.cuda.is_available():
        print("bench.kernel_timing needs a CUDA GPU, and there is none.", file=sys.stderr)
        return 1
    frames = [(n, p) for n in options.streams for p in options.positions]
    jobs = [f"prompt {length}" for length in options.prompts]
    jobs += [f"batch {columns} {position}" for columns, position in options.batches]
    l2_bytes = -1 if options.l2_mb is None else int(1e6 * options.l2_mb)
    with tempfile.TemporaryDirectory() as folder:
        architecture = build.architecture_of(torch.device("cuda"))

        def run(jobs: Sequence[str], width: int) -> list[LaunchTiming]:
            program = compile_program(options.model, architecture, Path(folder), width)
            return run_jobs(program, jobs, options.launches, l2_bytes)

        frame_timings: dict[tuple[int, int], LaunchTiming] = {}
        for width in sorted({kernel_width(architecture, n) for n in options.streams}):
            own = [(n, p) for n, p in frames if kernel_width(architecture, n) == width]
            found = run([f"frames {n} {p} {options.frames}" for n, p in own], width)
            frame_timings |= zip(own, found, strict=True)
        timings = iter(run(jobs, 0) if jobs else [])
    frame_ms: dict[int, dict[int, float]] = {}
    checksums: dict[str, str] = {}
    for num_streams, position in frames:
        timing = frame_timings[num_streams, position]
        by_position = frame_ms.setdefault(num_streams, {})
        by_position[position] = round(timing.median_ms / options.frames, 4)
        checksums[f"{num_streams} at {position}"] = timing.checksum
    figures: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "command": "bench.kernel_timing",
        "model": options.model,
        "frames_per_launch": options.frames,
        "l2_mb": options.l2_mb,
        "frame_ms_by_streams_and_position": frame_ms,
        "prompt_ms_by_positions": {
            length: round(next(timings).median_ms, 4) for length in options.prompts
        },
        "prefill_batch_ms": {
            f"{columns} at {position}": round(next(timings).median_ms, 4)
            for columns, position in options.batches
        },
        "checksums": checksums,
    }
    write(figures, options.json, packages=("torch",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
