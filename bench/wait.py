"""Time and processor use of four ways to wait for a launch.

`event` sleeps until a CUDA event wakes the thread. `spin` waits for the event without sleeping.
`poll` asks for it every 0.1 ms, as the backend does for the last frame of more than eight streams.
`engine` is the backend's own wait for few streams: it sleeps in short intervals until the last
frame, then spins. The model has random weights of the 0.6B size and one stream. A figure covers the
launch and the wait for it.

python -m bench.wait --json bench/results/wait.json
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch

from bench.frames import check_num_frames
from bench.report import write
from bench.step import KernelTimer, random_model
from megakernel_common.devices import wait_for_event
from megakernel_tts import Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest

_FRAME_COUNTS = (1, 2, 8)
_REPEATS = 200


def _sleep_on_event(kernel: Megakernel, num_frames: int) -> None:
    event = torch.cuda.Event(blocking=True)
    event.record()
    event.synchronize()


def _wait_for_event(kernel: Megakernel, num_frames: int, *, spinning: bool) -> None:
    event = torch.cuda.Event()
    event.record()
    wait_for_event(event, spinning=spinning)


_WAYS: dict[str, Callable[[Megakernel, int], None]] = {
    "event": _sleep_on_event,
    "spin": partial(_wait_for_event, spinning=True),
    "poll": partial(_wait_for_event, spinning=False),
    "engine": Megakernel._wait,
    "event_again": _sleep_on_event,
}


def measure(
    timer: KernelTimer, num_frames: int, wait: Callable[[Megakernel, int], None]
) -> dict[str, float]:
    """Times launches with one way of waiting.

    Args:
        timer: Holds the backend.
        num_frames: Frames of each launch.
        wait: Waits for a launch of so many frames.

    Returns:
        Median and 95th percentile of a launch in milliseconds, and the thread's share of a core.

    Raises:
        RuntimeError: A launch made fewer frames than requested.
    """
    kernel = timer.kernel
    kernel.prefill([PrefillRequest(0, timer.prompt, Sampling(seed=0))])
    kernel.feed(0, timer.prompt[:0], True)
    kernel.step([0], 1)  # the first frame of a stream has no talker pass
    times_ms: list[float] = []
    cpu_start_s, start_s = time.thread_time(), time.perf_counter()
    for _ in range(_REPEATS):
        launch_start_s = time.perf_counter()
        kernel._launch([0], num_frames)
        wait(kernel, num_frames)
        times_ms.append(1e3 * (time.perf_counter() - launch_start_s))
        check_num_frames(kernel, 1, num_frames)
    share = (time.thread_time() - cpu_start_s) / (time.perf_counter() - start_s)
    return {
        "step_ms": round(median(times_ms), 3),
        "step_ms_p95": round(quantiles(times_ms, n=20)[-1], 3),
        "share_of_a_core": round(share, 3),
    }


@torch.inference_mode()
def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    timer = KernelTimer(*random_model("0.6B"))
    figures: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "command": "bench.wait"}
    for way, wait in _WAYS.items():
        figures[way] = {n: measure(timer, n, wait) for n in _FRAME_COUNTS}
    write(figures, options.json, packages=("torch",))


if __name__ == "__main__":
    main()
