"""A million hand-overs between the kernel's blocks, beside other work on the same device.

All streams of an engine speak, at first alone, then while products of matrices run on a stream of
their own and a second engine speaks: every code must be the same. Random weights of the 0.6B's
size, unless a model is named.

python -m bench.handovers --json bench/results/handovers.json
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
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.random_released import write_released

_TEXT = "All of this is said twice, at first in peace and then beside others."
_LONGEST = 1500  # frames of a stream
_WIDTH = 2048  # of the matrices


@dataclass(frozen=True)
class Report:
    """What was seen.

    Attributes:
        backend: That made the frames.
        streams: That spoke at a time.
        frames: Of the longest stream of every round: steps of all streams.
        handovers: Between the blocks, in these.
        quiet_seconds: That they took alone.
        seconds: That they took beside the others.
        products: Of matrices, meanwhile.
        other_frames: Of the second engine, meanwhile.
        differing: Streams with another code anywhere.
    """

    backend: str
    streams: int
    frames: int
    handovers: int
    quiet_seconds: float
    seconds: float
    products: int
    other_frames: int
    differing: int


def handovers_a_frame(config: ModelConfig) -> int:
    """Five a layer (queries, attended values, output, gate and up, down), two a draw."""
    groups = config.talker.groups
    layers = config.talker.stack.layers + groups * config.predictor.stack.layers
    return 5 * layers + 2 * groups


def _round(tts: TTS, seed: int, frames: int) -> list[NDArray[np.int64]]:
    """Codes of as many streams as there are slots, which speak together."""
    chunks = ChunkPolicy(first=1, largest=8)
    slots = tts._loaded.engine.backend.slots
    rules = [Sampling(seed=seed + i, max_frames=frames, guard=False) for i in range(slots)]

    def say(rule: Sampling) -> NDArray[np.int64]:
        stream = tts.stream(_TEXT, sampling=rule, chunks=chunks)
        return np.concatenate([chunk.codes for chunk in stream])

    with ThreadPoolExecutor(slots) as pool:
        return list(pool.map(say, rules))


def _longest(codes: Sequence[NDArray[np.int64]]) -> int:
    return max(map(len, codes))


@contextmanager
def _meanwhile(act: Callable[[], int]) -> Iterator[list[int]]:
    """Does something again and again on a thread of its own; gives what it made, at the end."""
    done, made = threading.Event(), [0]

    def work() -> None:
        while not done.is_set():
            made[0] += act()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield made
    finally:
        done.set()
        worker.join()


def _products(device: torch.device) -> Callable[[], int]:
    """Products of matrices on a stream of their own, a few at a time."""
    a = torch.randn(_WIDTH, _WIDTH, device=device)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def multiply() -> int:
        with torch.cuda.stream(stream):
            for _ in range(4):
                torch.mm(a, a)
            if stream is not None:
                stream.synchronize()
        return 4

    return multiply


def soak(tts: TTS, other: TTS, handovers: int) -> Report:
    """Speaks alone and beside others.

    Args:
        tts: Whose codes are compared.
        other: Speaks meanwhile, on the same device.
        handovers: At least so many.
    """
    each = handovers_a_frame(tts._loaded.config)
    steps = ceil(handovers / each)
    backend, device = tts._loaded.engine.backend, tts._loaded.engine.prompter.device
    for one in (tts, other):
        one.warmup()

    start = time.perf_counter()
    quiet: list[list[NDArray[np.int64]]] = []
    while sum(map(_longest, quiet)) < steps:  # speech may end early
        quiet.append(_round(tts, 1000 * len(quiet), min(steps, _LONGEST)))
    quiet_seconds = time.perf_counter() - start
    rule = Sampling(seed=7, max_frames=20, guard=False)
    with (
        _meanwhile(_products(device)) as products,
        _meanwhile(lambda: len(other.say(_TEXT, sampling=rule).codes)) as frames,
    ):
        start = time.perf_counter()
        beside = [_round(tts, 1000 * i, min(steps, _LONGEST)) for i in range(len(quiet))]
        seconds = time.perf_counter() - start
    longest = sum(map(_longest, beside))
    pairs = [
        pair for rounds in zip(quiet, beside, strict=True) for pair in zip(*rounds, strict=True)
    ]
    return Report(
        backend=backend.name,
        streams=backend.slots,
        frames=longest,
        handovers=longest * each,
        quiet_seconds=round(quiet_seconds, 1),
        seconds=round(seconds, 1),
        products=products[0],
        other_frames=frames[0],
        differing=sum(not np.array_equal(*pair) for pair in pairs),
    )


def main() -> int:
    """Prints the report; writes it with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--handovers", type=int, default=1_000_000)
    parser.add_argument("--model", help="a folder or a name, instead of random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or folder
        if options.model is None:
            place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            write_released(Path(folder), "0.6B", place)
        with (
            TTS.load(model, options.device, slots=8) as tts,
            TTS.load(model, options.device, slots=2) as other,
        ):
            report = soak(tts, other, options.handovers)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    write({"gpu": gpu, "command": "bench.handovers"} | asdict(report), options.json, ("torch",))
    return int(report.differing > 0)


if __name__ == "__main__":
    sys.exit(main())
