"""The streaming decoder as CUDA kernels: many streams in a call, PCM in the host's memory.

Every stream has a slot, where its state stays between calls. One CUDA graph for each number of
frames serves any slots and chunk lengths: who speaks is read from a table.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.codec import weights as w
from megakernel_tts.codec.decoder import Part, State
from megakernel_tts.codec.kernels import MOST_FRAMES, Network
from megakernel_tts.config import CodecConfig

_CAPACITY = 64  # frames of a call

Graphs = tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]
Chunk = tuple[int, NDArray[np.int64]]


@dataclass(frozen=True)
class SlotState:
    """What a stream carries, outside of any slot; about 5 MB at the released size.

    Attributes:
        history: The rows that every convolution remembers, float16 [values].
        memory: Keys and values of the last frames, float32 [layers, 2, ring, channels].
        position: Frames decoded so far.
    """

    history: Tensor
    memory: Tensor
    position: int


class CudaDecoder:
    """Codes -> 16-bit samples, a few frames of several streams at a time.

    A stream gives the same bits whatever the chunks and whoever is beside it. One thread at a time
    may call it.

    Attributes:
        slots: Streams at a time.
        frame: Samples of a frame.
        sample_rate: In Hz.
    """

    def __init__(
        self, weights: w.Decoder, config: CodecConfig, *, slots: int, ops: Any = None
    ) -> None:
        """Packs the weights and allocates the slots.

        Args:
            weights: float32 tensors on their device; not needed afterwards.
            config: The codec's numbers.
            slots: Streams at a time.
            ops: The kernels; by default those of csrc/codec, built if need be.

        Raises:
            RuntimeError: The kernels cannot be built here.
            ValueError: They are not compiled for these shapes.
        """
        self._device = weights.input.device
        self.slots, self.frame, self.sample_rate = slots, config.frame, config.sample_rate
        self._codes = config.decoder.codebook
        self.capacity = min(_CAPACITY, slots * MOST_FRAMES)
        with torch.inference_mode():
            self._network = Network(
                weights,
                config,
                slots=slots,
                capacity=self.capacity,
                ops=_built_ops(self._device) if ops is None else ops,
            )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the codec has a stream of its own
        self._position = [0] * slots
        self._graphs: dict[int, Graphs] = {}
        self._queue = _Queue(self._device) if self._device.type == "cuda" else None

    @property
    def stages(self) -> list[str]:
        """What each kernel of a call is part of."""
        return self._network.stages

    @property
    def state_bytes(self) -> int:
        """What a slot keeps between calls."""
        return sum(t[0].nbytes for t in (self._network.history, self._network.memory))

    def warmup(self) -> None:
        """Records the graphs of all numbers of frames, so that no call is slower than another."""
        if self._queue is not None:
            for count in range(1, self.capacity + 1):
                self.graphs(count)

    @torch.inference_mode()
    def open(self, slot: int, state: SlotState | None = None) -> None:
        """Puts a stream into a slot: a new one, or one that goes on from a state.

        The host waits for nothing, and the slot for nothing but the calls before it.
        """
        network = self._network
        with nullcontext() if self._queue is None else self._queue.behind():
            if state is None:
                network.history[slot].zero_()  # keys and values are masked by their position
            else:
                for place, kept in (
                    (network.history[slot], state.history),
                    (network.memory[slot], state.memory),
                ):
                    place.copy_(kept)
                    if self._queue is not None:
                        self._queue.keep(kept)
        self._position[slot] = 0 if state is None else state.position

    @torch.inference_mode()
    def save(self, slot: int) -> SlotState:
        """A copy of a slot's state, on the device."""
        network = self._network
        with nullcontext() if self._queue is None else self._queue.behind():
            history, memory = network.history[slot].clone(), network.memory[slot].clone()
        if self._queue is not None:
            self._queue.finish()
        return SlotState(history, memory, self._position[slot])

    @torch.inference_mode()
    def prepare(self, state: State) -> SlotState:
        """What plain torch (`decoder.Decoder`) carries for one stream, on the same device."""
        history, memory = self._network.adopt(state)
        if self._queue is not None:  # whole when it is given: `open` waits for nobody
            torch.cuda.current_stream(self._device).synchronize()
        return SlotState(history, memory, int(state.position))

    def decode(self, parts: Sequence[Part]) -> Callable[[], list[NDArray[np.int16] | None]]:
        """Begins to decode the next frames of several streams, each as many as it has.

        Long chunks go in rounds of at most `MOST_FRAMES` a stream. What torch's current stream is
        given from now on comes after the first round, since the networks' kernel would take every
        multiprocessor and make it wait for a frame.

        Args:
            parts: Every slot at most once; its codes [frames, groups], on the host.

        Returns:
            What waits for them, and gives for every part its samples, or None if they were not
            finite: a weight is broken. Meanwhile nothing is called but `open` of other slots.

        Raises:
            ValueError: A code is beyond its codebook, or a slot is named twice.
        """
        given = [(slot, codes.numpy()) for slot, codes in parts]
        if len({slot for slot, _ in given}) < len(given):
            raise ValueError(f"A call takes each slot once, found {[slot for slot, _ in given]}.")
        together = np.concatenate([np.empty(0, np.int64), *(codes.ravel() for _, codes in given)])
        if together.size and not 0 <= together.min() <= together.max() < self._codes:
            self._refuse(given)
        left = [*rounds(given, self.capacity)]
        for first in left[:1]:
            self._start(first)
        return partial(self._finish, given, left)

    def _refuse(self, given: Sequence[Chunk]) -> None:
        """Names the first slot with a code that there is not."""
        for slot, codes in given:
            if codes.size and not 0 <= codes.min() <= codes.max() < self._codes:
                raise ValueError(
                    f"Codes must be between 0 and {self._codes - 1}, found {codes.min()} to "
                    f"{codes.max()} in slot {slot}."
                )

    def _finish(
        self, given: Sequence[Chunk], left: Sequence[Sequence[Chunk]]
    ) -> list[NDArray[np.int16] | None]:
        """Waits for the first round, which was started, and goes through the others."""
        made: dict[int, list[NDArray[np.int16] | None]] = {slot: [] for slot, _ in given}
        for i, some in enumerate(left):
            if i > 0:
                self._start(some)
            for (slot, _), samples in zip(some, self._collect(some), strict=True):
                made[slot].append(samples)
        return [_joined(made[slot]) for slot, _ in given]

    def graphs(self, count: int) -> Graphs:
        """The graphs of so many frames: to their samples, and what is left to do then."""
        assert self._queue is not None
        if count not in self._graphs:
            network = self._network
            self._graphs[count] = (
                self._queue.record(lambda: network.decode(count)),
                self._queue.record(lambda: network.remember(count)),
            )
        return self._graphs[count]

    def _launch(self, count: int) -> None:
        if self._queue is not None:
            self._queue.replay(*self.graphs(count))
            return
        with torch.inference_mode():
            self._network.decode(count)
            self._network.remember(count)

    def _start(self, parts: Sequence[Chunk]) -> None:
        """Tells the kernels who speaks, and starts them."""
        table, first = self._network.asked.numpy(), 0
        for slot, codes in parts:
            rows = table[first : first + len(codes)]
            position = self._position[slot]
            rows[:, 0], rows[:, 1] = slot, first
            rows[:, 2] = np.arange(position, position + len(codes))
            rows[:, 3:] = codes
            first += len(codes)
        self._network.broken.numpy()[:first] = 0
        self._launch(first)
        for slot, codes in parts:
            self._position[slot] += len(codes)

    def _collect(self, parts: Sequence[Chunk]) -> list[NDArray[np.int16] | None]:
        """Waits for what was started, and takes its samples."""
        if self._queue is not None:
            self._queue.decoded.synchronize()
        pcm, broken, first = self._network.pcm.numpy(), self._network.broken.numpy(), 0
        made: list[NDArray[np.int16] | None] = []
        for _, codes in parts:
            end = first + len(codes)
            fine = not broken[first:end].any()
            made.append(pcm[first * self.frame : end * self.frame].copy() if fine else None)
            first = end
        return made


class _Queue:
    """The codec's own stream of a GPU, beside that of the networks."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.decoded = torch.cuda.Event()

    def behind(self) -> AbstractContextManager[None]:
        """Work that comes after what the codec was given before."""
        return torch.cuda.stream(self._stream)

    def keep(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory, whoever drops it, until all that was begun is done."""
        tensor.record_stream(self._stream)

    def finish(self) -> None:
        """Waits for all that was begun."""
        self._stream.synchronize()

    def record(self, act: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of what `act` launches; other threads may go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            act()
            graph.capture_end()
        return graph

    def replay(self, decode: torch.cuda.CUDAGraph, rest: torch.cuda.CUDAGraph) -> None:
        """Starts both; the event tells the end of the first, for which the networks wait."""
        with torch.cuda.stream(self._stream):
            decode.replay()
            self.decoded.record(self._stream)
            rest.replay()
        torch.cuda.current_stream(self._stream.device).wait_event(self.decoded)


def rounds(parts: Sequence[Chunk], capacity: int) -> Iterator[list[Chunk]]:
    """Parts of at most `MOST_FRAMES` frames of a stream and `capacity` frames together."""
    left = [(slot, codes) for slot, codes in parts if len(codes)]
    while left:
        taken = [(slot, codes[:MOST_FRAMES]) for slot, codes in left]
        room = list(accumulate(len(codes) for _, codes in taken))
        taken = taken[: sum(end <= capacity for end in room)]
        yield taken
        rest = [(slot, codes[MOST_FRAMES:]) for slot, codes in left[: len(taken)]]
        left = [(slot, codes) for slot, codes in rest if len(codes)] + left[len(taken) :]


def _joined(parts: Sequence[NDArray[np.int16] | None]) -> NDArray[np.int16] | None:
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return None
    return np.concatenate([np.empty(0, np.int16), *whole])


def _built_ops(device: torch.device) -> Any:
    from build_ext import load

    if not hasattr(torch.ops.megakernel_tts, "codec_product"):
        load(device)
    return torch.ops.megakernel_tts
