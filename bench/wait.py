"""What waiting for a launch costs: asleep until an event wakes the thread, or looking all the time.

Or as the engine does, which dozes until the last frame is being made and looks for its end.
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
from megakernel_tts.backends.protocol import PrefillRequest

_FRAMES = (1, 2, 8)
_REPEATS = 200
_LONG = 1_000_000_000  # nanoseconds, longer than any step


def measure(bench: Bench, frames: int, look: int | None) -> dict[str, float]:
    """Of steps of so many frames.

    Args:
        bench: The kernel.
        frames: Of a launch.
        look: Nanoseconds that it looks before it sleeps; None waits as the engine does.
    """
    kernel = bench.kernel
    assert kernel._done is not None
    kernel.prefill([PrefillRequest(0, bench.prompt, Sampling(seed=0))])
    kernel.feed(0, bench.prompt[:0], True)
    kernel.step([0], 1)  # the first frame of a stream needs no talker
    walls: list[float] = []
    busy, begin = time.thread_time(), time.perf_counter()
    for _ in range(_REPEATS):
        start = time.perf_counter()
        kernel._launch([0], frames)
        if look is None:
            kernel._wait(frames)
        else:
            kernel._ops.wait(kernel._done.cuda_event, look)
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
    ways = {"asleep": 0, "looking": _LONG, "as the engine": None, "asleep again": 0}
    for name, look in ways.items():
        figures[name] = {frames: measure(bench, frames, look) for frames in _FRAMES}
    write(figures, options.json, packages=("torch",))


if __name__ == "__main__":
    main()
