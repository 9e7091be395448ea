"""What waiting for a launch costs: asleep until an event wakes the thread, or looking all the time.

Random weights of the 0.6B's size, one stream: milliseconds of a launch and of waiting for it, and
the share of a core that the thread uses meanwhile.

python -m bench.wait --json bench/results/wait.json
"""

import argparse
import time
from pathlib import Path
from statistics import median, quantiles

import torch

from bench.report import write
from bench.step import Bench, random_model
from megakernel_tts import Sampling
from megakernel_tts.frames import Start

_FRAMES = (1, 2, 8)
_REPEATS = 200


def measure(bench: Bench, frames: int) -> dict[str, float]:
    """Of steps of so many frames."""
    kernel = bench.kernel
    kernel.prefill([Start(0, bench.prompt, Sampling(seed=0))])
    kernel.feed(0, bench.pad[None][:0], True)
    kernel.step([0], 1)  # the first frame of a stream needs no talker
    walls: list[float] = []
    busy, begin = time.thread_time(), time.perf_counter()
    for _ in range(_REPEATS):
        start = time.perf_counter()
        kernel._launch([0], frames)
        kernel._wait()
        walls.append(1e3 * (time.perf_counter() - start))
    core = (time.thread_time() - busy) / (time.perf_counter() - begin)
    return {
        "step_ms": round(median(walls), 3),
        "step_ms_p95": round(quantiles(walls, n=20)[-1], 3),
        "share_of_a_core": round(core, 3),
    }


@torch.inference_mode()
def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    bench = Bench(*random_model("0.6B"))
    figures: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "command": "bench.wait"}
    for name, blocking in (("asleep", True), ("looking", False), ("asleep again", True)):
        bench.kernel._done = torch.cuda.Event(blocking=blocking)
        figures[name] = {frames: measure(bench, frames) for frames in _FRAMES}
    write(figures, options.json, packages=("torch",))


if __name__ == "__main__":
    main()
