"""Host time of the engine with many streams: share of a core, and delays of an event loop.

The engine, with the demo voice's prompts, runs over a simulated device that makes frames and
samples of any number of streams in fixed times. The engine thread waits without the interpreter
lock, as it does for a GPU. Work of the backend and of the codec on the host is not included. With
`--model` it runs on a GPU with random weights of a released size, and that work is included.
Streams run without pauses, as fast as the device allows, or with `--live` at the pace of playback.

python -m bench.host --json bench/results/host-cpu.json
python -m bench.host --model 0.6B --json bench/results/host-0.6B-h200.json
python -m bench.host --model 0.6B --live --requests 2
"""

import argparse
import asyncio
import cProfile
import logging
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.conversations import random_tts
from bench.first_chunk import Pace
from bench.report import write
from megakernel_common.checkpoint import Checkpoint
from megakernel_tts import TTS, ChunkPolicy, ModelInfo
from megakernel_tts.backends.protocol import Frames, PendingCodes, PrefillRequest, PrefillResult
from megakernel_tts.backends.slot_snapshot import SlotSnapshot
from megakernel_tts.bench.event_loop import measure_event_loop
from megakernel_tts.bench.heap import frozen_heap
from megakernel_tts.bench.playback import PlaybackGaps
from megakernel_tts.bench.timing import BenchmarkRequest
from megakernel_tts.codec.decoder import Decoder, DecodeRequest, PendingDecodeRequest, State
from megakernel_tts.codec.vocoder import ConfirmFrames, PendingSamples
from megakernel_tts.codec.weights import decoder_specs
from megakernel_tts.engine.engine import Engine
from megakernel_tts.engine.loop import Loop
from megakernel_tts.loader import LoadedModel
from megakernel_tts.model.config import read_codec_config, read_model_config
from megakernel_tts.model.hub import find_checkpoint
from megakernel_tts.model.random_released import SIZES
from megakernel_tts.model.weights import model_specs
from megakernel_tts.sampling import Sampling
from megakernel_tts.session import FRAME_S
from megakernel_tts.text.prompt import PromptBuilder
from megakernel_tts.text.tokenizer import TextTokenizer

_TEXT = "Hello, it is good to hear you."
_SAMPLING = Sampling(max_frames=50)  # of each request
_FRAME_SAMPLES = 1920
_MAX_FRAMES = 32  # of a step
_CHUNKS = (2, 4, 8)
_STREAMS = 64


@dataclass(frozen=True)
class HostTimes:
    """Milliseconds of device work; the defaults are the targets for 64 streams on an H200.

    Attributes:
        frame: A frame of all streams.
        prompt: A position of a prompt.
        codec: A frame of all streams in the codec.
    """

    frame: float = 4.5
    prompt: float = 0.05
    codec: float = 1.2


class FixedTimeDevice:
    """Runs work in order, without a host's computation."""

    def __init__(self, times: HostTimes) -> None:
        self.times = times
        self._free_s = 0.0

    def run(self, duration_ms: float) -> float:
        """Queues work; returns the time of `time.perf_counter` at which it ends."""
        self._free_s = max(time.perf_counter(), self._free_s) + 1e-3 * duration_ms
        return self._free_s


def _sleep_until(deadline_s: float) -> None:
    if (remaining_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(remaining_s)


class FixedTimeBackend:
    """A `Backend` whose frames have random codes."""

    name = "simulated"
    blocking = False

    def __init__(self, device: FixedTimeDevice, num_slots: int, num_codes: int) -> None:
        self.num_slots = self.max_streams = num_slots
        self.max_positions = 512
        self._device = device
        codes = np.random.default_rng(0).integers(0, num_codes, (num_slots, _MAX_FRAMES, 16))
        self._pending = codes.astype(np.int32)
        self._codes = torch.from_numpy(codes)

    def prepare(self) -> None:
        """Does nothing; see `Backend.prepare`."""

    def reserve(self, slot: int, num_positions: int, *, beginning: bool = False) -> bool:
        """See `Backend.reserve`; nothing takes memory."""
        return True

    def prefill(
        self, requests: Sequence[PrefillRequest], budget: int | None = None
    ) -> PrefillResult:
        """See `Backend.prefill`."""
        lengths = [len(request.prompt) for request in requests]
        num_run = sum(lengths) - sum(request.num_common for request in requests)
        self._device.run(num_run * self._device.times.prompt)
        return PrefillResult(lengths, num_run)

    def clear_prefix_cache(self) -> None:
        """See `Backend.clear_prefix_cache`; there is none."""

    def feed(self, slot: int, text: Tensor, text_complete: bool) -> None:
        """See `Backend.feed`; text has no effect."""

    def step(
        self,
        slots: Sequence[int],
        num_frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        """See `Backend.step`."""
        num_frames = min(num_frames, _MAX_FRAMES)
        end_s = self._device.run(num_frames * self._device.times.frame)
        pending = [self._pending[slot, :num_frames] for slot in slots]
        if num_frames == 1:
            on_last_frame(pending)
        overlap()
        if num_frames > 1:
            _sleep_until(end_s - 1e-3 * self._device.times.frame)
            on_last_frame(pending)
        _sleep_until(end_s)
        return [Frames(self._codes[slot, :num_frames], ended=False) for slot in slots]

    def interrupt(self) -> None:
        """See `Backend.interrupt`; a step is not cut short."""

    def clear_interrupt(self) -> None:
        """See `Backend.clear_interrupt`."""

    def release(self, slot: int) -> None:
        """See `Backend.release`."""

    def swap_out(self, slot: int) -> SlotSnapshot[None]:
        """See `Backend.swap_out`."""
        return SlotSnapshot(None, ())

    def swap_in(self, slot: int, snapshot: SlotSnapshot[None]) -> None:
        """See `Backend.swap_in`."""


class FixedTimeVocoder:
    """A `Vocoder` whose samples are noise."""

    max_pending_frames = 8
    max_pending_total = 1 << 20
    sample_rate = 24_000

    def __init__(self, device: FixedTimeDevice, num_slots: int) -> None:
        self._device, self._num_slots = device, num_slots
        noise = np.random.default_rng(0).integers(-3000, 3000, _MAX_FRAMES * _FRAME_SAMPLES)
        self._samples = noise.astype(np.int16)

    def prepare_state(self, state: State) -> None:
        """See `Vocoder.prepare_state`."""

    def load_slot(self, slot: int, state: Any) -> None:
        """See `Vocoder.load_slot`."""

    def save_slot(self, slot: int) -> None:
        """See `Vocoder.save_slot`."""

    def decode(self, requests: Sequence[DecodeRequest]) -> PendingSamples:
        """See `Vocoder.decode`."""
        return self._start([len(request.codes) for request in requests])

    def decode_pending(self, requests: Sequence[PendingDecodeRequest]) -> ConfirmFrames:
        """See `Vocoder.decode_pending`."""
        wait = self._start([request.num_frames for request in requests])
        return lambda counts: (
            lambda: [samples for samples, count in zip(wait(), counts, strict=True) if count]
        )

    def _start(self, counts: Sequence[int]) -> Callable[[], list[NDArray[np.int16]]]:
        end_s = self._device.run(sum(counts) / self._num_slots * self._device.times.codec)

        def wait() -> list[NDArray[np.int16]]:
            _sleep_until(end_s)
            return [self._samples[: count * _FRAME_SAMPLES].copy() for count in counts]

        return wait


def host_tts(times: HostTimes, slots: int) -> TTS:
    """Builds the engine over a simulated device, with the demo voice's prompts and text."""
    folder, cpu = find_checkpoint("demo"), torch.device("cpu")
    config = read_model_config(folder / "config.json")
    codec_config = read_codec_config(folder / "speech_tokenizer" / "config.json")
    tokenizer = TextTokenizer(folder, config.talker.text_vocab_size)
    embeddings = Checkpoint(folder).load(model_specs(config), cpu, torch.float32).embeddings
    weights = Checkpoint(folder / "speech_tokenizer").load(
        decoder_specs(codec_config.decoder), cpu, torch.float32
    )
    device = FixedTimeDevice(times)
    engine = Engine(
        FixedTimeBackend(device, slots, config.talker.num_codes),
        PromptBuilder(embeddings, config, tokenizer),
        Decoder(weights, codec_config),
        FixedTimeVocoder(device, slots),
    )
    speakers = {name: ("english",) for name in config.talker.speakers}
    info = ModelInfo("custom_voice", speakers, ("english",), False, note=None, name="simulated")
    return TTS(LoadedModel(config, _SAMPLING, tokenizer, engine, None), info)


@dataclass(frozen=True)
class HostFigures:
    """Host time of streams, each of which speaks one request after another.

    Attributes:
        streams: Number of streams at a time.
        pace: How they are read; without pauses they are made as fast as the device can.
        chunk_frames: Frames of every chunk.
        engine_core_share: CPU time of the engine thread, divided by the time.
        process_core_share: The same of all threads: the engine, and the readers on an event loop.
        engine_us_per_frame: CPU time of the engine thread per frame, in microseconds.
        audio_seconds_per_second: Throughput.
    """

    streams: int
    pace: Pace
    chunk_frames: int
    engine_core_share: float
    process_core_share: float
    engine_us_per_frame: float
    audio_seconds_per_second: float


async def _read(tts: TTS, chunks: ChunkPolicy, num_requests: int, pace: Pace) -> int:
    num_frames = 0
    for _ in range(num_requests):
        playback = PlaybackGaps()
        async for chunk in tts.astream(_TEXT, sampling=_SAMPLING, chunks=chunks):
            num_frames += len(chunk.codes)
            if pace == "live":
                played_s = playback.add(time.perf_counter(), len(chunk.codes) * FRAME_S)
                await asyncio.sleep(played_s - time.perf_counter())
    return num_frames


def measure(tts: TTS, streams: int, chunk: int, num_requests: int, pace: Pace) -> HostFigures:
    """Measures CPU time while an event loop reads streams; each reader opens several in a row."""
    engine_clock = time.pthread_getcpuclockid(tts._loaded.engine._thread.ident or 0)
    chunks = ChunkPolicy(chunk, chunk)

    async def run() -> int:
        return sum(
            await asyncio.gather(*(_read(tts, chunks, num_requests, pace) for _ in range(streams)))
        )

    def now() -> NDArray[np.float64]:
        return np.array(
            [time.clock_gettime(engine_clock), time.process_time(), time.perf_counter()]
        )

    with frozen_heap():
        begin = now()
        num_frames = asyncio.run(run())
        engine_s, process_s, wall_s = (now() - begin).tolist()
    return HostFigures(
        streams,
        pace,
        chunk,
        round(engine_s / wall_s, 3),
        round(process_s / wall_s, 3),
        round(1e6 * engine_s / num_frames, 1),
        round(num_frames * FRAME_S / wall_s, 1),
    )


@contextmanager
def _profiled_engine(lines: int) -> Iterator[None]:
    """Profiles the engine threads that begin in this context, and prints the most costly calls."""
    profile, run = cProfile.Profile(), Loop.run

    def profiled(loop: Loop) -> None:
        profile.runcall(run, loop)

    with patch.object(Loop, "run", profiled):
        yield
    pstats.Stats(profile).sort_stats("tottime").print_stats(lines)


def _load(options: argparse.Namespace) -> TTS:
    """The engine that is measured, on a GPU or simulated."""
    if not options.model:
        return host_tts(HostTimes(), options.streams)
    print("weights, kernels and warm-up", flush=True)
    return random_tts(options.model, options.streams)


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", choices=SIZES, help="size of random weights on a GPU (default: simulated)"
    )
    parser.add_argument("--streams", type=int, default=_STREAMS, help="number of streams")
    parser.add_argument("--requests", type=int, default=8, help="requests of each stream")
    parser.add_argument("--live", action="store_true", help="read at the pace of playback")
    parser.add_argument("--profile", type=int, metavar="LINES", help="print a profile instead")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    pace: Pace = "live" if options.live else "without pauses"
    logging.disable()  # every request is cut after 50 frames and would be logged
    if options.profile:
        with _profiled_engine(options.profile), _load(options) as tts:
            measure(tts, options.streams, 2, options.requests, pace)
        return
    with _load(options) as tts:
        if options.model:
            tts.warmup()
        measure(tts, options.streams, 2, 1, "without pauses")
        figures = [measure(tts, options.streams, n, options.requests, pace) for n in _CHUNKS]
        request = BenchmarkRequest(_TEXT, _SAMPLING)
        delays = measure_event_loop(tts, request, options.streams, options.requests)
    content: dict[str, object] = {"command": "bench.host"}
    if options.model:
        content |= {
            "model": f"{options.model}, random weights",
            "gpu": torch.cuda.get_device_name(),
        }
    else:
        content |= {"model": "simulated", "times_ms": asdict(HostTimes())}
    content |= {"host": [asdict(row) for row in figures], "event_loop_ms": asdict(delays)}
    write(content, options.json, packages=("torch",))


if __name__ == "__main__":
    main()
