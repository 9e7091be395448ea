"""Host time per request: the engine over a simulated device whose work takes fixed times.

The real `Megakernel` and `CudaDecoder` run on the CPU with operators that compute nothing. Each
operator occupies a simulated device for a fixed time, one after another. The engine thread waits
without the interpreter lock, as it does for a GPU. The driver's time per launch or copy is missing.

python -m bench.timed --json bench/results/timed.json
"""

import argparse
import logging
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

from bench.report import write
from bench.timed_device import H200_TIMES, REQUEST_FRAMES, SimulatedDevice, timed_tts
from bench.timed_many import measure_many_streams
from megakernel_tts import TTS
from megakernel_tts.bench.timing import BenchmarkRequest, time_request, time_streams

_TEXT = "Hello, it is good."  # nine tokens, as many as the benchmark's text
_ROUNDS = 50
_STAGE_RUNS, _STAGE_FRAMES = 300, 4  # requests whose first chunks are timed by stage; of each
_PAUSED_RUNS, _PAUSE_S = 100, 0.1  # the same, each after a pause
# Between the request and its first chunk, in this order.
_MOMENTS = ("prefill launched", "step launched", "frame read", "codec awaited", "samples ready")


@dataclass(frozen=True)
class Figures:
    """Times of streams that start together, in milliseconds.

    Attributes:
        streams: Number of streams.
        chunk_frames: Frames of every chunk.
        first_chunk: Median time to the first chunk of the first stream served, the second, and
            so on.
        frame: Time of a request divided by its frames, the median.
        device: Device work per frame.
    """

    streams: int
    chunk_frames: int
    first_chunk: tuple[float, ...]
    frame: float
    device: float


def measure(tts: TTS, device: SimulatedDevice, streams: int, chunk: int, rounds: int) -> Figures:
    """Times whole requests of the first voice, whose prefix is cached.

    Args:
        tts: The engine.
        device: Its simulated device.
        streams: Concurrent requests of a round.
        chunk: Frames of every chunk.
        rounds: Most rounds.
    """
    request = BenchmarkRequest(_TEXT, tts.sampling, next(iter(tts.voices)))
    busy_before_s = sum(device.busy_s.values())
    result = time_streams(tts, request, chunk, streams, rounds)
    busy_s = sum(device.busy_s.values()) - busy_before_s
    device_ms = 1e3 * busy_s / (result.rounds * REQUEST_FRAMES)
    return Figures(streams, chunk, result.first_chunk_ms, result.ms_per_frame, round(device_ms, 3))


@dataclass(frozen=True)
class FirstChunkStages:
    """Milliseconds of the first chunk of a single stream: of the host, or of the device and host.

    Attributes:
        prefill_launched: From the request on: tokens, session, wake-up, prompt.
        step_launched: Beside the prefill on the device.
        frame_read: Prefill and frame on the device, as far as they are left.
        codec_awaited: Beside the codec on the device: codes, the next step's launch.
        samples_ready: The codec, as far as it is left.
        chunk_read: Delivery, and the wake-up of the reader.
    """

    prefill_launched: float
    step_launched: float
    frame_read: float
    codec_awaited: float
    samples_ready: float
    chunk_read: float


def measure_stages(
    tts: TTS, device: SimulatedDevice, runs: int, pause_s: float = 0.0
) -> FirstChunkStages:
    """Times the first chunk by stage: the mean of the fastest tenth of the requests.

    Args:
        tts: The engine, without other streams.
        device: Its simulated device.
        runs: Requests.
        pause_s: Seconds before each.
    """
    sampling = replace(tts.sampling, max_frames=_STAGE_FRAMES)
    request = BenchmarkRequest(_TEXT, sampling, next(iter(tts.voices)))
    splits: list[list[float]] = []
    for seed in range(runs):
        if pause_s:
            time.sleep(pause_s)
        device.moments_s.clear()
        timing = time_request(tts, request, 1, seed)
        moments_s = [timing.start_s, *map(device.moments_s.__getitem__, _MOMENTS), timing.first_s]
        splits.append([1e3 * (end_s - begin_s) for begin_s, end_s in pairwise(moments_s)])
    fastest = sorted(splits, key=sum)[: max(1, runs // 10)]
    return FirstChunkStages(*(round(mean(stage), 3) for stage in zip(*fastest, strict=True)))


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", choices=("few", "many"), help="only up to eight streams, or only 64"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    logging.disable()  # every request is cut after 50 frames and would be logged
    result: dict[str, object] = {}
    if options.only != "many":
        result |= _measure_few()
    if options.only != "few":
        result["many_streams"] = asdict(measure_many_streams())
    write(result, options.json, packages=("torch",))


def _measure_few() -> dict[str, object]:
    """Figures of up to eight streams."""
    tts, device = timed_tts(H200_TIMES)
    with tts:
        tts.warmup()
        cells = [(streams, chunk) for streams in (1, 2, 4, 8) for chunk in (1, 8)]
        figures = [asdict(measure(tts, device, *cell, _ROUNDS)) for cell in cells]
        stages = measure_stages(tts, device, _STAGE_RUNS)
        paused = measure_stages(tts, device, _PAUSED_RUNS, _PAUSE_S)
    return {
        "times_ms": asdict(H200_TIMES),
        "figures": figures,
        "first_chunk_stages_ms": asdict(stages),
        "first_chunk_stages_after_a_pause_ms": asdict(paused),
    }


if __name__ == "__main__":
    main()
