"""A device that takes fixed times, behind the real engine: what is left is the host's own work.

The real `Megakernel` and `CudaDecoder` run on the CPU with operators that compute nothing: they
take their time on one device, one after another, and the engine's thread waits for them without
Python's lock, as it does for a GPU.
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megakernel_tts import TTS, ModelInfo
from megakernel_tts.checkpoint import Checkpoint, map_leaves
from megakernel_tts.codec.cuda import CudaDecoder
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.weights import decoder_specs
from megakernel_tts.config import ModelConfig, read_codec_config, read_model_config
from megakernel_tts.cuda import Megakernel
from megakernel_tts.engine import Engine
from megakernel_tts.hub import find_checkpoint
from megakernel_tts.loader import Loaded
from megakernel_tts.prompt import Prompter
from megakernel_tts.sampling import Sampling
from megakernel_tts.text import TextTokenizer
from megakernel_tts.weights import model_specs

_COLUMNS = 8
_POSITIONS = 256
_SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of Linux's prctl


@dataclass(frozen=True)
class Times:
    """Milliseconds, by default those of an H200 with the 0.6B (bench/results/step-h200.json).

    Attributes:
        frame: Of one stream, and of eight.
        prompt: A pass of up to eight positions.
        codec: A call of one frame, and of eight, whoever's they are.
    """

    frame: tuple[float, float] = (1.68, 2.9)
    prompt: float = 0.65
    codec: tuple[float, float] = (0.36, 0.96)

    def frame_of(self, streams: int) -> float:
        """A frame of so many streams."""
        return _between(self.frame, streams)

    def codec_of(self, frames: int) -> float:
        """A call of so many frames."""
        return _between(self.codec, frames)


def _between(ends: tuple[float, float], number: int) -> float:
    return ends[0] + (ends[1] - ends[0]) * (number - 1) / (_COLUMNS - 1)


@dataclass
class Device:
    """Does one thing after another, in seconds of `time.perf_counter`.

    Attributes:
        times: What they take.
        free: When the last of them is over.
        busy: Seconds of work that it was given.
        work: What it did: a name, its begin and its end.
    """

    times: Times
    free: float = 0.0
    busy: float = 0.0
    work: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])

    def run(self, name: str, milliseconds: float) -> float:
        """Begins something once all before is over; gives when it ends."""
        begin = max(time.perf_counter(), self.free)
        self.free = begin + 1e-3 * milliseconds
        self.busy += 1e-3 * milliseconds
        self.work.append((name, begin, self.free))
        return self.free


def _sleep_until(then: float) -> None:
    if (left := then - time.perf_counter()) > 0:
        time.sleep(left)


class _KernelOps:
    """The operators of `Megakernel`, without its arithmetic: codes are drawn at random."""

    def __init__(self, config: ModelConfig, device: Device) -> None:
        stacks = (config.talker.stack, config.predictor.stack)
        self._shape = [n for s in stacks for n in (s.hidden, s.heads, s.kv_heads, s.intermediate)]
        self._shape += [config.talker.codes, 1, 64, _COLUMNS]
        self._groups, self._codes = config.talker.groups, config.talker.codes
        self._device = device
        self._launched: list[tuple[Tensor, float, float]] = []

    def models(self) -> int:
        return 1

    def shape(self, _: int) -> list[int]:
        return self._shape

    def blocks(self, _: int) -> int:
        return 1

    def workspace_words(self, _: int) -> int:
        return 16

    def prefill(self, *arguments: Any) -> None:
        passes = arguments[-1]
        self._device.run("prompt", len(passes) * self._device.times.prompt)

    def generate(self, _: int, __: Any, memory: Any, mailbox: Sequence[Tensor], *rest: Any) -> None:
        """Writes the frames at once; they count as made as time goes by."""
        frames, streams = rest[-2], len(memory[7])
        codes = torch.randint(0, self._codes, (streams, frames, 1 + self._groups))
        codes[:, :, 0] = 0
        mailbox[0][: codes.numel()] = codes.flatten()
        mailbox[1][:streams] = frames
        each = self._device.times.frame_of(streams)
        self._device.run(f"{frames} x {streams}", frames * each)
        self._launched.append((mailbox[2], self._device.free, 1e-3 * each))


    def wait(self, published: Tensor) -> None:
        """Until the launch is over; a host that interrupts it gets the frames made by then."""
        (stop, end, each), self._launched = self._launched[-1], []
        frames = int(published[0])
        for made in range(1, frames):
            _sleep_until(end - (frames - made) * each)
            if stop[0]:
                published[published > 0] = made
                self._device.free -= (frames - made) * each
                self._device.busy -= (frames - made) * each
                return
        _sleep_until(end)


class TimedKernel(Megakernel):
    """The real backend, whose launches take the device's time."""

    def _wait(self, frames: int) -> None:
        self._ops.wait(self._mailbox[1])


class _CodecOps:
    """The codec's kernels, which do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class TimedCodec(CudaDecoder):
    """The real vocoder, whose calls take the device's time."""

    device: Device
    decoded = 0.0

    def _launch(self, count: int) -> None:
        self.decoded = self.device.run(f"codec {count}", self.device.times.codec_of(count))

    def _collect(self, parts: Any) -> Any:
        _sleep_until(self.decoded)
        return super()._collect(parts)


def timed_tts(times: Times, slots: int = 8) -> tuple[TTS, Device]:
    """The demo voice's texts and prompts, with a device of these times.

    Its speech is noise without end. The engine's thread sleeps to the microsecond.
    """
    folder = find_checkpoint("demo")
    config = read_model_config(folder / "config.json")
    codec_config = read_codec_config(folder / "speech_tokenizer" / "config.json")
    cpu = torch.device("cpu")
    tokenizer = TextTokenizer(folder, config.talker.text_vocab)
    model = Checkpoint(folder).load(model_specs(config), cpu, torch.bfloat16)
    weights = Checkpoint(folder / "speech_tokenizer").load(
        decoder_specs(codec_config.decoder), cpu, torch.float32
    )
    device = Device(times)
    prompter = Prompter(model.embeddings, config, tokenizer)
    kernel = TimedKernel(
        model,
        config,
        prompter.pad[0],
        slots=slots,
        positions=_POSITIONS,
        ops=_KernelOps(config, device),
    )
    codec = TimedCodec(weights, codec_config, slots=slots, ops=_CodecOps())
    codec.device = device
    engine = Engine(kernel, prompter, Decoder(weights, codec_config), codec)
    speakers = {name: ("english",) for name in config.talker.speakers}
    info = ModelInfo("custom_voice", speakers, ("english",), takes_instruct=False, note=None)
    sampling = Sampling(max_frames=50, guard=False)
    return TTS(Loaded(config, sampling, tokenizer, engine, None), info), device
