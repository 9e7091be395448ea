"""A million exchanges between thread blocks, alone and beside other work on the same GPU.

An engine synthesises on all its streams twice: alone, then while matrix products run on another
CUDA stream and a second engine synthesises. Every code must be the same both times. The model has
random weights of the 0.6B size, unless --model names one.

python -m bench.exchange_soak --json bench/results/exchange-soak.json
python -m bench.exchange_soak --slots 4  # the kernels for few streams instead of a wide one
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.report import write
from megakernel_tts import TTS, ChunkPolicy, Sampling
from megakernel_tts.cli.console import positive_integer
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.random_released import write_released_checkpoint

_TEXT = "All of this is said twice, at first in peace and then beside others."
_MAX_FRAMES = 1500  # of one stream
_MATRIX_SIZE = 2048
_PRODUCTS_PER_ROUND = 4


@dataclass(frozen=True)
class ExchangeSoakReport:
    """Result of a soak.

    Attributes:
        backend: Name of the backend.
        streams: Concurrent streams.
        frames: Frames of the longest stream, summed over the rounds beside other work.
        exchanges: Exchanges between thread blocks in these frames.
        quiet_seconds: Duration of the rounds alone.
        seconds: Duration of the rounds beside other work.
        products: Matrix products that ran beside them.
        other_frames: Frames of the second engine that ran beside them.
        differing: Streams with a code that is not the same in both rounds.
    """

    backend: str
    streams: int
    frames: int
    exchanges: int
    quiet_seconds: float
    seconds: float
    products: int
    other_frames: int
    differing: int


def exchanges_per_frame(config: ModelConfig) -> int:
    """Exchanges of a frame: five per layer (one per phase), two per sampled code."""
    groups = config.talker.num_groups
    num_layers = config.talker.stack.num_layers + groups * config.predictor.stack.num_layers
    return 5 * num_layers + 2 * groups


def _synthesise_round(tts: TTS, seed: int, max_frames: int) -> list[NDArray[np.int64]]:
    """Synthesises on all slots at once; returns the codes of each stream, [frames, groups]."""
    chunks = ChunkPolicy(first=1, largest=8)
    num_slots = tts._loaded.engine.backend.num_slots
    samplings = [
        Sampling(seed=seed + i, max_frames=max_frames, guard=False) for i in range(num_slots)
    ]

    def synthesise(sampling: Sampling) -> NDArray[np.int64]:
        stream = tts.stream(_TEXT, sampling=sampling, chunks=chunks)
        return np.concatenate([chunk.codes for chunk in stream])

    with ThreadPoolExecutor(num_slots) as pool:
        return list(pool.map(synthesise, samplings))


def _max_length(codes: Sequence[NDArray[np.int64]]) -> int:
    return max(map(len, codes))


@contextmanager
def _background(work: Callable[[], int]) -> Iterator[list[int]]:
    """Repeats `work` on a thread until the block ends; yields the running sum of its results."""
    stop, total = threading.Event(), [0]

    def repeat() -> None:
        while not stop.is_set():
            total[0] += work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield total
    finally:
        stop.set()
        thread.join()


def _matrix_products(device: torch.device) -> Callable[[], int]:
    """Returns a function that runs a few matrix products on a CUDA stream of its own."""
    matrix = torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, device=device)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def multiply() -> int:
        with torch.cuda.stream(stream):
            for _ in range(_PRODUCTS_PER_ROUND):
                torch.mm(matrix, matrix)
            if stream is not None:
                stream.synchronize()
        return _PRODUCTS_PER_ROUND

    return multiply


def soak(tts: TTS, other: TTS, num_exchanges: int) -> ExchangeSoakReport:
    """Synthesises alone, then beside other work, and compares the codes.

    Args:
        tts: Engine whose codes are compared.
        other: Engine that synthesises beside it on the same device.
        num_exchanges: Least number of exchanges between thread blocks in each half.
    """
    per_frame = exchanges_per_frame(tts._loaded.config)
    num_frames = ceil(num_exchanges / per_frame)
    max_frames = min(num_frames, _MAX_FRAMES)
    backend, device = tts._loaded.engine.backend, tts._loaded.engine.prompt_builder.device
    for engine in (tts, other):
        engine.warmup()

    start_s = time.perf_counter()
    quiet: list[list[NDArray[np.int64]]] = []
    while sum(map(_max_length, quiet)) < num_frames:  # speech may end early
        quiet.append(_synthesise_round(tts, 1000 * len(quiet), max_frames))
    quiet_seconds = time.perf_counter() - start_s
    sampling = Sampling(seed=7, max_frames=20, guard=False)
    with (
        _background(_matrix_products(device)) as products,
        _background(lambda: len(other.say(_TEXT, sampling=sampling).codes)) as other_frames,
    ):
        start_s = time.perf_counter()
        loaded = [_synthesise_round(tts, 1000 * i, max_frames) for i in range(len(quiet))]
        seconds = time.perf_counter() - start_s
    frames = sum(map(_max_length, loaded))
    pairs = [
        pair for rounds in zip(quiet, loaded, strict=True) for pair in zip(*rounds, strict=True)
    ]
    return ExchangeSoakReport(
        backend=backend.name,
        streams=backend.num_slots,
        frames=frames,
        exchanges=frames * per_frame,
        quiet_seconds=round(quiet_seconds, 1),
        seconds=round(seconds, 1),
        products=products[0],
        other_frames=other_frames[0],
        differing=sum(not np.array_equal(*pair) for pair in pairs),
    )


def main() -> int:
    """Prints the report; writes it with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--exchanges", type=int, default=1_000_000)
    parser.add_argument("--model", help="checkpoint folder or name, instead of random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--slots", type=positive_integer, default=8, help="concurrent streams (default: 8)"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or folder
        if options.model is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            write_released_checkpoint(Path(folder), "0.6B", device)
        with (
            TTS.load(model, options.device, slots=options.slots) as tts,
            TTS.load(model, options.device, slots=2) as other,
        ):
            report = soak(tts, other, options.exchanges)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    write({"gpu": gpu, "command": "bench.exchange_soak"} | asdict(report), options.json, ("torch",))
    return int(report.differing > 0)


if __name__ == "__main__":
    sys.exit(main())
