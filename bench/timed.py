"""Host time per request: the engine over a simulated device whose work takes fixed times.

The real `Megakernel` and `CudaDecoder` run on the CPU with operators that compute nothing. Each
operator occupies a simulated device for a fixed time, one after another. The engine thread waits
without the interpreter lock, as it does for a GPU. The driver's time per launch or copy is missing.

python -m bench.timed --json bench/results/timed.json
"""

import argparse
import ctypes
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.report import write
from megakernel_common.checkpoint import Checkpoint
from megakernel_common.kernels.declarations import DeviceStruct
from megakernel_common.kernels.module import LaunchConfig, Struct
from megakernel_tts import TTS, ModelInfo
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.bench.timing import BenchmarkRequest, time_request, time_streams
from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.weights import decoder_specs
from megakernel_tts.engine.engine import Engine
from megakernel_tts.kernels.codec import CodecKernels
from megakernel_tts.kernels.decode import DecodeKernels, GpuProperties
from megakernel_tts.kernels.structs import NUM_CODE_GROUPS, DecodeInfo, Params, PublishedFrame
from megakernel_tts.loader import LoadedModel
from megakernel_tts.model.config import ModelConfig, read_codec_config, read_model_config
from megakernel_tts.model.hub import find_checkpoint
from megakernel_tts.model.weights import model_specs
from megakernel_tts.sampling import Sampling
from megakernel_tts.text.prompt import PromptBuilder
from megakernel_tts.text.tokenizer import TextTokenizer

_MAX_STREAMS = 8
_POSITIONS = 256
_FRAMES = 50  # of each request
_TEXT = "Hello, it is good."  # nine tokens, as many as the benchmark's text
_ROUNDS = 50
_STAGE_RUNS, _STAGE_FRAMES = 300, 4  # requests whose first chunks are timed by stage; of each
# Between the request and its first chunk, in this order.
_MOMENTS = ("prefill launched", "step launched", "frame read", "codec awaited", "samples ready")
_PR_SET_TIMERSLACK = 29  # option of prctl(2)


@dataclass(frozen=True)
class Times:
    """Milliseconds of device work; the defaults are the 0.6B size on an H200.

    Sources of the defaults: bench/results/step-h200.json and bench/results/codec-h200.json.

    Attributes:
        frame: A frame of one stream, and of eight.
        prompt: A prefill batch of up to eight columns.
        codec: A codec call of one frame, and of eight, of any streams.
    """

    frame: tuple[float, float] = (1.17, 1.82)
    prompt: float = 0.48
    codec: tuple[float, float] = (0.36, 0.99)

    def frame_of(self, num_streams: int) -> float:
        """Time of a frame, interpolated between one and eight streams."""
        return _interpolate(self.frame, num_streams)

    def codec_of(self, num_frames: int) -> float:
        """Time of a codec call, interpolated between one and eight frames."""
        return _interpolate(self.codec, num_frames)


def _interpolate(ends: tuple[float, float], count: int) -> float:
    return ends[0] + (ends[1] - ends[0]) * (count - 1) / (_MAX_STREAMS - 1)


@dataclass
class SimulatedDevice:
    """A simulated device that runs its work in order; seconds of `time.perf_counter`.

    Attributes:
        times: Duration of each kind of work.
        free_s: Time at which all work is over.
        busy_s: Seconds of work so far.
        moments_s: When the host did a thing for the first time since this was cleared.
    """

    times: Times
    free_s: float = 0.0
    busy_s: float = 0.0
    moments_s: dict[str, float] = field(default_factory=dict[str, float])

    def note(self, moment: str) -> None:
        """Records the time of a moment, unless it was recorded."""
        self.moments_s.setdefault(moment, time.perf_counter())

    def run(self, duration_ms: float) -> float:
        """Queues work behind all earlier work; returns the time at which it ends."""
        begin_s = max(time.perf_counter(), self.free_s)
        self.free_s = begin_s + 1e-3 * duration_ms
        self.busy_s += 1e-3 * duration_ms
        return self.free_s

    def shorten(self, seconds: float) -> None:
        """Ends the last work earlier by so many seconds."""
        self.free_s -= seconds
        self.busy_s -= seconds


def _sleep_until(deadline_s: float) -> None:
    if (remaining := deadline_s - time.perf_counter()) > 0:
        time.sleep(remaining)


class _SimulatedModule:
    """A `KernelModule` without arithmetic: codes are random, and launches take time."""

    def __init__(self, config: ModelConfig, device: SimulatedDevice) -> None:
        self._num_codes = config.talker.num_codes
        self._device = device
        self._end_s = 0.0  # of the launch of frames
        self._frame_s = 0.0
        self._num_frames = 0

    def read(self, symbol: str, struct: type[Struct]) -> Struct:
        """Facts of a build that takes any model."""
        assert struct is DecodeInfo
        return struct(
            max_streams=_MAX_STREAMS,
            max_prefill_columns=_MAX_STREAMS,
            small_prefill_columns=2,
            kv_tile_size=16,
            span_size=128,
            page_size=128,
            max_pages=16,
            kv_width=128,
            num_threads=1,
            max_blocks=1,
            max_residual_rows=1 << 20,
            stage_steps=1,
            max_row_groups=64,
        )

    def launch(
        self,
        kernel: str,
        params: DeviceStruct,
        config: LaunchConfig,
        *,
        writes: Sequence[Tensor],
        set_bits: Tensor | None = None,
    ) -> None:
        """Occupies the device for the time of the frames or of the prefill batches."""
        assert isinstance(params, Params)
        if kernel.startswith("prefill"):
            self._device.run(params.num_prefill_batches * self._device.times.prompt)
            self._device.note("prefill launched")
            return
        num_streams, self._num_frames = params.num_streams, params.max_frames
        table = (PublishedFrame * (num_streams * self._num_frames)).from_address(
            params.published_frames.value
        )
        codes = torch.randint(0, self._num_codes, (len(table), NUM_CODE_GROUPS)).tolist()
        for frame, row in zip(table, codes, strict=True):
            frame.end_reason, frame.codes[:] = 0, row
        published = (ctypes.c_uint * num_streams).from_address(params.num_published.value)
        published[:] = [self._num_frames] * num_streams
        frame_ms = self._device.times.frame_of(num_streams)
        self._device.run(self._num_frames * frame_ms)
        self._end_s, self._frame_s = self._device.free_s, 1e-3 * frame_ms
        self._device.note("step launched")

    def poll(self, num_published: NDArray[np.int32], stop_flags: NDArray[np.int32]) -> bool:
        """Sleeps until the last frame; returns False if the launch was interrupted earlier."""
        for made in range(1, self._num_frames):
            remaining_s = (self._num_frames - made) * self._frame_s
            _sleep_until(self._end_s - remaining_s)
            if stop_flags[0]:
                num_published[num_published > 0] = made
                self._device.shorten(remaining_s)
                return False
        return True

    def wait(self) -> None:
        """Sleeps until the launch is over."""
        _sleep_until(self._end_s)
        self._device.note("frame read")


class TimedKernel(Megakernel):
    """The real backend; its launches occupy the simulated device."""

    module: _SimulatedModule

    def _wait(self, num_frames: int, on_last_frame: Callable[[], object] = lambda: None) -> None:
        if self.module.poll(self._buffers.num_published, self._buffers.stop_flags):
            on_last_frame()
            self.module.wait()


class _CodecKernels:
    """Replaces `CodecKernels`; its launches do nothing."""

    has_warpgroups = False

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class TimedCodec(CudaDecoder):
    """The real codec decoder; its calls occupy the simulated device."""

    device: SimulatedDevice
    decoded = 0.0

    def _launch(self, num_frames: int) -> None:
        self.decoded = self.device.run(self.device.times.codec_of(num_frames))

    def _collect(self, requests: Any, counts: Any) -> Any:
        self.device.note("codec awaited")
        _sleep_until(self.decoded)
        self.device.note("samples ready")
        return super()._collect(requests, counts)


def timed_tts(times: Times, slots: int = 8) -> tuple[TTS, SimulatedDevice]:
    """Builds an engine for the demo voice over a simulated device.

    The synthesised audio is noise.

    Args:
        times: Durations of the device's work.
        slots: Concurrent streams.

    Returns:
        The engine, and the simulated device.
    """
    folder = find_checkpoint("demo")
    config = read_model_config(folder / "config.json")
    codec_config = read_codec_config(folder / "speech_tokenizer" / "config.json")
    cpu = torch.device("cpu")
    tokenizer = TextTokenizer(folder, config.talker.text_vocab_size)
    model = Checkpoint(folder).load(model_specs(config), cpu, torch.bfloat16)
    weights = Checkpoint(folder / "speech_tokenizer").load(
        decoder_specs(codec_config.decoder), cpu, torch.float32
    )
    device = SimulatedDevice(times)
    if sys.platform == "linux":  # the default slack of 50 us delays each sleep; threads inherit it
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    prompt_builder = PromptBuilder(model.embeddings, config, tokenizer)
    module = _SimulatedModule(config, device)
    kernel = TimedKernel(
        model,
        config,
        prompt_builder.pad[0],
        num_slots=slots,
        max_positions=_POSITIONS,
        kernels=DecodeKernels(module, GpuProperties(1, 0)),
    )
    kernel.module = module
    codec = TimedCodec(
        weights, codec_config, slots=slots, kernels=cast(CodecKernels, _CodecKernels())
    )
    codec.device = device
    engine = Engine(kernel, prompt_builder, Decoder(weights, codec_config), codec)
    speakers = {name: ("english",) for name in config.talker.speakers}
    info = ModelInfo("custom_voice", speakers, ("english",), False, note=None, name="timed")
    sampling = Sampling(max_frames=_FRAMES, guard=False)
    return TTS(LoadedModel(config, sampling, tokenizer, engine, None), info), device


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
    busy_before_s = device.busy_s
    result = time_streams(tts, request, chunk, streams, rounds)
    device_ms = 1e3 * (device.busy_s - busy_before_s) / (result.rounds * _FRAMES)
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


def measure_stages(tts: TTS, device: SimulatedDevice, runs: int) -> FirstChunkStages:
    """Times the first chunk by stage: the mean of the fastest tenth of the requests.

    Args:
        tts: The engine, without other streams.
        device: Its simulated device.
        runs: Requests.
    """
    sampling = replace(tts.sampling, max_frames=_STAGE_FRAMES)
    request = BenchmarkRequest(_TEXT, sampling, next(iter(tts.voices)))
    splits: list[list[float]] = []
    for seed in range(runs):
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
        "--frame", type=float, default=Times.frame[0], help="milliseconds of a frame of one stream"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    logging.disable()  # every request is cut after 50 frames and would be logged
    times = Times(frame=(options.frame, Times.frame[1]))
    tts, device = timed_tts(times)
    with tts:
        tts.warmup()
        cells = [(streams, chunk) for streams in (1, 2, 4, 8) for chunk in (1, 8)]
        figures = [asdict(measure(tts, device, *cell, _ROUNDS)) for cell in cells]
        stages = asdict(measure_stages(tts, device, _STAGE_RUNS))
    result = {"times_ms": asdict(times), "figures": figures, "first_chunk_stages_ms": stages}
    write(result, options.json, packages=("torch",))


if __name__ == "__main__":
    main()
