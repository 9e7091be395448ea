"""A device that takes fixed times, behind the real engine: what is left is the host's own work.

The real `Megakernel` and `CudaDecoder` run on the CPU with operators that compute nothing: they
take their time on one device, one after another, and the engine's thread waits for them without
Python's lock, as it does for a GPU. What a driver takes for a launch or a copy is missing.

python -m bench.timed --json bench/results/timed.json
"""

import argparse
import ctypes
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.report import write
from megakernel_tts import TTS, ModelInfo
from megakernel_tts.backends.megakernel import Megakernel
from megakernel_tts.bench.timing import Request, streaming
from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.codec.decoder import Decoder
from megakernel_tts.codec.weights import decoder_specs
from megakernel_tts.engine.engine import Engine
from megakernel_tts.loader import Loaded
from megakernel_tts.model.checkpoint import Checkpoint
from megakernel_tts.model.config import ModelConfig, read_codec_config, read_model_config
from megakernel_tts.model.hub import find_checkpoint
from megakernel_tts.model.weights import model_specs
from megakernel_tts.sampling import Sampling
from megakernel_tts.text.prompt import Prompter
from megakernel_tts.text.tokenizer import TextTokenizer

_COLUMNS = 8
_POSITIONS = 256
_FRAMES = 50  # of each speech
_TEXT = "Hello, it is good."  # nine tokens, as the benchmark's text has with a released vocabulary
_ROUNDS = 50
_SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of Linux's prctl


@dataclass(frozen=True)
class Times:
    """Milliseconds, by default those of an H200 with the 0.6B (step- and codec-h200.json).

    Attributes:
        frame: Of one stream, and of eight.
        prompt: A pass of up to eight positions.
        codec: A call of one frame, and of eight, whoever's they are.
    """

    frame: tuple[float, float] = (1.40, 2.11)
    prompt: float = 0.59
    codec: tuple[float, float] = (0.36, 0.99)

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
    """

    times: Times
    free: float = 0.0
    busy: float = 0.0

    def run(self, milliseconds: float) -> float:
        """Begins something once all before is over; gives when it ends."""
        begin = max(time.perf_counter(), self.free)
        self.free = begin + 1e-3 * milliseconds
        self.busy += 1e-3 * milliseconds
        return self.free

    def take_back(self, seconds: float) -> None:
        """Ends the last thing sooner."""
        self.free -= seconds
        self.busy -= seconds


def _sleep_until(then: float) -> None:
    if (left := then - time.perf_counter()) > 0:
        time.sleep(left)


class _KernelOps:
    """The operators of `Megakernel`, without its arithmetic: codes are drawn at random."""

    def __init__(self, config: ModelConfig, device: Device) -> None:
        stacks = (config.talker.stack, config.predictor.stack)
        self._shape = [n for s in stacks for n in (s.hidden, s.heads, s.kv_heads, s.intermediate)]
        self._shape += [config.talker.codes, 1, 64, _COLUMNS, _COLUMNS, 128]
        self._groups, self._codes = config.talker.groups, config.talker.codes
        self._device = device
        self._launched = torch.zeros(0), 0.0, 0.0  # the flag to stop, the end, seconds a frame

    def models(self) -> int:
        """One."""
        return 1

    def shape(self, model: int) -> list[int]:
        """Of the config's networks."""
        return self._shape

    def blocks(self, model: int) -> int:
        """One."""
        return 1

    def workspace_words(self, model: int) -> int:
        """Hardly any."""
        return 1

    def prefill(self, *arguments: Any) -> None:
        """Takes the time of the passes."""
        passes = arguments[-1]
        self._device.run(len(passes) * self._device.times.prompt)

    def generate(
        self, model: int, weights: Any, memory: Any, mailbox: Sequence[Tensor], *rest: Any
    ) -> None:
        """Takes the time of the frames, which it writes at once."""
        *_, rows, frames, _ = rest
        streams = len(rows)
        codes = torch.randint(0, self._codes, (streams, frames, 1 + self._groups))
        codes[:, :, 0] = 0
        mailbox[0][: codes.numel()] = codes.flatten()
        mailbox[1][:streams] = frames
        each = self._device.times.frame_of(streams)
        self._device.run(frames * each)
        self._launched = mailbox[2], self._device.free, 1e-3 * each

    def doze(self, published: Tensor) -> bool:
        """Until the last frame; false if it was interrupted before, with the frame at hand."""
        stop, end, each = self._launched
        frames = int(published[0])
        for made in range(1, frames):
            _sleep_until(end - (frames - made) * each)
            if stop[0]:
                published[published > 0] = made
                self._device.take_back((frames - made) * each)
                return False
        return True

    def wait(self) -> None:
        """Until the launch is over."""
        _sleep_until(self._launched[1])


class TimedKernel(Megakernel):
    """The real backend, whose launches take the device's time."""

    def _wait(self, frames: int, on_last_frame: Callable[[], object] = lambda: None) -> None:
        if self._ops.doze(self._mailbox[1]):
            on_last_frame()
            self._ops.wait()


class _CodecOps:
    """The codec's kernels, which do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class TimedCodec(CudaDecoder):
    """The real vocoder, whose calls take the device's time."""

    device: Device
    decoded = 0.0

    def _launch(self, count: int) -> None:
        self.decoded = self.device.run(self.device.times.codec_of(count))

    def _collect(self, parts: Any, counts: Any) -> Any:
        _sleep_until(self.decoded)
        return super()._collect(parts, counts)


def timed_tts(times: Times, slots: int = 8) -> tuple[TTS, Device]:
    """The demo voice's texts and prompts, with a device of these times.

    Its speech is noise, and each of its chunks is as late as the host makes it.
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
    if sys.platform == "linux":  # whose sleepers wake 50 us late; threads take it from this one
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1)
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
    sampling = Sampling(max_frames=_FRAMES, guard=False)
    return TTS(Loaded(config, sampling, tokenizer, engine, None), info), device


@dataclass(frozen=True)
class Figures:
    """Streams that begin together; milliseconds.

    Attributes:
        streams: How many.
        chunk_frames: Frames of every chunk.
        first_chunk: Of the stream that is served first, second, and so on, the medians.
        frame: Of a stream, of its whole time.
        device: How long the device worked for that.
    """

    streams: int
    chunk_frames: int
    first_chunk: tuple[float, ...]
    frame: float
    device: float


def measure(tts: TTS, device: Device, streams: int, chunk: int, rounds: int) -> Figures:
    """Requests of a known voice, to their ends."""
    request = Request(_TEXT, tts.sampling, next(iter(tts.voices)))
    busy = device.busy
    found = streaming(tts, request, chunk, streams, rounds)
    worked = 1e3 * (device.busy - busy) / (found.rounds * _FRAMES)
    return Figures(streams, chunk, found.first_chunk_ms, found.ms_per_frame, round(worked, 3))


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--frame", type=float, default=Times.frame[0], help="ms of one stream")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    logging.disable()  # that speech was cut
    times = Times(frame=(options.frame, Times.frame[1]))
    tts, device = timed_tts(times)
    with tts:
        tts.warmup()
        cells = [(streams, chunk) for streams in (1, 2, 4, 8) for chunk in (1, 8)]
        figures = [asdict(measure(tts, device, *cell, _ROUNDS)) for cell in cells]
    write({"times_ms": asdict(times), "figures": figures}, options.json, packages=("torch",))


if __name__ == "__main__":
    main()
