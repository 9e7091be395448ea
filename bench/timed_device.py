"""A simulated device behind the real backend and codec: work without arithmetic takes fixed times.

The real `Megakernel` and `CudaDecoder` run on the CPU with operators that compute nothing. Each
operator occupies the device for a fixed time, one after another. The engine thread waits without
the interpreter lock, as it does for a GPU. The driver's time per launch or copy is missing.
"""

import ctypes
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.checkpoint import Checkpoint
from megakernel_common.kernels.declarations import DeviceStruct
from megakernel_common.kernels.module import LaunchConfig, Struct
from megakernel_tts import TTS, ModelInfo
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.backends.memory import MAX_FRAMES
from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.weights import decoder_specs
from megakernel_tts.engine.engine import Engine
from megakernel_tts.kernels.codec import CodecKernels
from megakernel_tts.kernels.decode import DecodeKernels, GpuProperties
from megakernel_tts.kernels.structs import (
    ARGUMENT_STREAMS,
    NUM_CODE_GROUPS,
    DecodeInfo,
    Params,
    PrefillBatch,
    PublishedFrame,
)
from megakernel_tts.kernels.wide import compiled_widths, needed_widths
from megakernel_tts.loader import LoadedModel
from megakernel_tts.model.config import read_codec_config, read_model_config
from megakernel_tts.model.hub import find_checkpoint
from megakernel_tts.model.weights import model_specs
from megakernel_tts.sampling import Sampling
from megakernel_tts.text.prompt import PromptBuilder
from megakernel_tts.text.tokenizer import TextTokenizer

REQUEST_FRAMES = 50
_ARCHITECTURE = "90a"  # whose widths of kernels the device has
_MAX_STREAMS = compiled_widths(_ARCHITECTURE)[-1]
_POSITIONS = 256
_PR_SET_TIMERSLACK = 29  # option of prctl(2)


@dataclass(frozen=True)
class Times:
    """Milliseconds of device work, interpolated between the numbers that are given.

    Attributes:
        frame: Of a frame, by streams.
        prompt: Of a prefill batch, by columns; the largest number is that of a full batch.
        codec: Of a codec call of any streams, by frames.
    """

    frame: Mapping[int, float]
    prompt: Mapping[int, float]
    codec: Mapping[int, float]

    def frame_of(self, num_streams: int) -> float:
        """Time of a frame of so many streams."""
        return _interpolate(self.frame, num_streams)

    def prompt_of(self, num_columns: int) -> float:
        """Time of a prefill batch of so many columns."""
        return _interpolate(self.prompt, num_columns)

    def codec_of(self, num_frames: int) -> float:
        """Time of a codec call of so many frames."""
        return _interpolate(self.codec, num_frames)


# The 0.6B on an H200, an earlier version: step-h200.json and codec-h200.json at 143f0a5.
H200_TIMES = Times(
    frame={1: 1.16, 2: 1.43, 4: 1.55, 8: 1.83, 16: 2.02, 32: 2.71, 64: 4.45},
    prompt={8: 0.48},
    codec={1: 0.31, 8: 0.64, 16: 0.88, 32: 1.15, 64: 1.69, 128: 2.92, 256: 5.7},
)


def _interpolate(times_ms: Mapping[int, float], count: int) -> float:
    return float(np.interp(count, [*times_ms], [*times_ms.values()]))


@dataclass
class SimulatedDevice:
    """A simulated device that runs its work in order; seconds of `time.perf_counter`.

    Attributes:
        times: Duration of each kind of work.
        free_s: Time at which all work is over.
        busy_s: Seconds of work so far, by kind.
        num_launches: How often there was work, by kind.
        idle_s: Seconds without work between launches, by what the host did then.
        moments_s: When the host did a thing for the first time since this was cleared.
    """

    times: Times
    free_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    num_launches: Counter[str] = field(default_factory=Counter[str])
    idle_s: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    moments_s: dict[str, float] = field(default_factory=dict[str, float])
    _activities: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])

    def note(self, moment: str) -> None:
        """Records the time of a moment, unless it was recorded."""
        self.moments_s.setdefault(moment, time.perf_counter())

    def enter(self, activity: str) -> str:
        """Records what the host does from now on; returns what it did before."""
        left = self._activities[-1][1] if self._activities else ""
        self._activities.append((time.perf_counter(), activity))
        return left

    def run(self, kind: str, duration_ms: float) -> float:
        """Queues work behind all earlier work; returns the time at which it ends."""
        now_s = time.perf_counter()
        activities = [*self._activities, (now_s, "")]
        for (begin_s, activity), (end_s, _) in pairwise(activities if self.num_launches else ()):
            self.idle_s[activity] += max(0.0, end_s - max(begin_s, self.free_s))
        self._activities = [(now_s, self._activities[-1][1])] if self._activities else []
        self.free_s = max(now_s, self.free_s) + 1e-3 * duration_ms
        self.busy_s[kind] += 1e-3 * duration_ms
        self.num_launches[kind] += 1
        return self.free_s

    def shorten(self, kind: str, seconds: float) -> None:
        """Ends the last work earlier by so many seconds."""
        self.free_s -= seconds
        self.busy_s[kind] -= seconds


def _sleep_until(deadline_s: float) -> None:
    if (remaining := deadline_s - time.perf_counter()) > 0:
        time.sleep(remaining)


class _SimulatedKernels:
    """Decode kernels without arithmetic: codes are random, and launches take time."""

    def __init__(self, num_codes: int, device: SimulatedDevice) -> None:
        self._device = device
        self._end_s = 0.0  # of the launch of frames
        self._frame_s = 0.0
        self._num_frames = 0
        # Frames of a launch [streams * frames, end reason and codes], copied by each.
        shape = (_MAX_STREAMS * MAX_FRAMES, 1 + NUM_CODE_GROUPS)
        self._frames = np.random.default_rng(0).integers(0, num_codes, shape, np.int32)
        self._frames[:, 0] = 0

    def prefill(self, params: Params) -> None:
        """Occupies the device for the time of the batches."""
        batches = (PrefillBatch * params.num_prefill_batches).from_address(
            params.prefill_batches.value
        )
        times_ms = (self._device.times.prompt_of(batch.num_columns) for batch in batches)
        self._device.note("prefill launched")  # at the earliest start of the work
        self._device.run("prompts", sum(times_ms))

    def generate(self, params: Params) -> None:
        """Occupies the device for the time of the frames."""
        num_streams, self._num_frames = params.num_streams, params.max_frames
        num_bytes = num_streams * self._num_frames * ctypes.sizeof(PublishedFrame)
        ctypes.memmove(params.published_frames.value, self._frames.ctypes.data, num_bytes)
        published = (ctypes.c_uint * num_streams).from_address(params.num_published.value)
        published[:] = [self._num_frames] * num_streams
        frame_ms = self._device.times.frame_of(num_streams)
        self._device.note("step launched")
        self._end_s = self._device.run("frames", self._num_frames * frame_ms)
        self._frame_s = 1e-3 * frame_ms

    def poll(self, num_published: NDArray[np.int32], stop_flags: NDArray[np.int32]) -> bool:
        """Sleeps until the last frame; returns False if the launch was interrupted earlier."""
        for made in range(1, self._num_frames):
            remaining_s = (self._num_frames - made) * self._frame_s
            _sleep_until(self._end_s - remaining_s)
            if stop_flags[0]:
                num_published[num_published > 0] = made
                self._device.shorten("frames", remaining_s)
                return False
        return True

    def wait(self) -> None:
        """Sleeps until the launch is over."""
        _sleep_until(self._end_s)
        self._device.note("frame read")


@dataclass(frozen=True)
class _SimulatedModule:
    """A `KernelModule` of simulated kernels for so many streams, and columns of prompts."""

    kernels: _SimulatedKernels
    max_streams: int
    max_columns: int

    def read(self, symbol: str, struct: type[Struct]) -> Struct:
        """Facts of a build that takes any model."""
        assert struct is DecodeInfo
        return struct(
            max_streams=self.max_streams,
            max_prefill_columns=self.max_columns,
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
        """Occupies the device."""
        assert isinstance(params, Params)
        if kernel.startswith("prefill"):
            self.kernels.prefill(params)
        else:
            self.kernels.generate(params)


class TimedKernel(Megakernel):
    """The real backend; its launches occupy the simulated device."""

    simulated: _SimulatedKernels

    def _wait(self, num_frames: int, on_last_frame: Callable[[], object] = lambda: None) -> None:
        if self.simulated.poll(self._buffers.num_published, self._buffers.stop_flags):
            on_last_frame()
            self.simulated.wait()


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
        self.decoded = self.device.run("codec", self.device.times.codec_of(num_frames))

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
        slots: Concurrent streams, of which a launch takes 64.

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
    simulated = _SimulatedKernels(config.talker.num_codes, device)
    narrow = _SimulatedModule(simulated, ARGUMENT_STREAMS, max(times.prompt))
    kernels = DecodeKernels(narrow, GpuProperties(1, 0))
    for width in needed_widths(_ARCHITECTURE, slots, ARGUMENT_STREAMS):
        # The times lack wide prefills.
        kernels.add_wide(_SimulatedModule(simulated, width, max_columns=0), config)
    kernel = TimedKernel(
        model,
        config,
        prompt_builder.pad[0],
        num_slots=slots,
        max_positions=_POSITIONS,
        kernels=kernels,
    )
    kernel.simulated = simulated
    codec = TimedCodec(
        weights, codec_config, slots=slots, kernels=cast(CodecKernels, _CodecKernels())
    )
    codec.device = device
    engine = Engine(kernel, prompt_builder, Decoder(weights, codec_config), codec)
    speakers = {name: ("english",) for name in config.talker.speakers}
    info = ModelInfo("custom_voice", speakers, ("english",), False, note=None, name="timed")
    sampling = Sampling(max_frames=REQUEST_FRAMES, guard=False)
    return TTS(LoadedModel(config, sampling, tokenizer, engine, None), info), device
