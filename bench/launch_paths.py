"""Build time and host time per launch of both paths from sources to kernels.

`extension` compiles with nvcc and launches through torch operators; `nvrtc` compiles with NVRTC and
launches through cuda-bindings. The host time covers what the backend does per launch: it fills the
parameters, clears the workspace and launches. The GPU is idle before each launch. The model has
random weights of the 0.6B size. Builds are measured with an empty cache.

python -m bench.launch_paths --json bench/results/launch_paths.json
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from bench.frames import disable_end_of_speech, frame_ms
from bench.report import write
from bench.step import random_model
from megakernel_common.kernels import build, nvrtc
from megakernel_common.kernels.loader import LaunchPath
from megakernel_tts import Sampling
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.protocol import PrefillRequest
from megakernel_tts.kernels.decode import load_decode_kernels
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.weights import Model

_PATHS: tuple[LaunchPath, ...] = ("extension", "nvrtc")
_STREAM_COUNTS = (1, 8)
_REPEATS = 300
_PROMPT = 10  # positions


def _host_us(kernel: Megakernel, num_streams: int) -> float:
    """Median microseconds of the host for a launch of one frame."""
    slots = list(range(num_streams))
    times_us: list[float] = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        kernel._launch(slots, 1)
        times_us.append(1e6 * (time.perf_counter() - start_s))
        kernel._wait(1)
    return round(median(times_us), 1)


def _prefill_us(kernel: Megakernel, prompt: torch.Tensor) -> float:
    """Median microseconds of the host for the prefill of a prompt."""
    times_us: list[float] = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        kernel.prefill([PrefillRequest(0, prompt, Sampling(seed=0))])
        times_us.append(1e6 * (time.perf_counter() - start_s))
        torch.cuda.synchronize()
    return round(median(times_us), 1)


def measure(path: LaunchPath, model: Model, config: ModelConfig) -> dict[str, object]:
    """Measures one path.

    Args:
        path: The path.
        model: bfloat16 weights on the GPU.
        config: Their numbers.

    Returns:
        Seconds of the build; microseconds of the host by streams and of a prefill; GPU
        milliseconds of a frame by streams.

    Raises:
        RuntimeError: A launch made fewer frames than requested.
    """
    hidden = config.talker.stack.hidden_size
    pad = torch.randn(hidden, device="cuda").bfloat16()
    prompt = 0.05 * torch.randn(_PROMPT, hidden).bfloat16()
    start_s = time.perf_counter()
    kernels = load_decode_kernels(config, pad.device, path=path)
    build_s = time.perf_counter() - start_s
    kernel = Megakernel(model, config, pad, num_slots=8, max_positions=2048, kernels=kernels)
    disable_end_of_speech(kernel)
    prefill_us = _prefill_us(kernel, prompt)
    for slot in range(8):
        kernel.prefill([PrefillRequest(slot, prompt, Sampling(seed=slot))])
        kernel.feed(slot, prompt[:0], True)
    slots = list(range(8))
    return {
        "build_s": round(build_s, 1),
        "launch_us_by_streams": {n: _host_us(kernel, n) for n in _STREAM_COUNTS},
        "prefill_us": prefill_us,
        "frame_ms_by_streams": {n: round(frame_ms(kernel, slots[:n]), 4) for n in _STREAM_COUNTS},
    }


@torch.inference_mode()
def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    figures: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "command": "bench.launch_paths",
        "obstacles": {"extension": build.obstacle(), "nvrtc": nvrtc.obstacle()},
    }
    model, config = random_model("0.6B")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for path in _PATHS:
            figures[path] = measure(path, model, config)
    write(figures, options.json, packages=("torch",))


if __name__ == "__main__":
    main()
