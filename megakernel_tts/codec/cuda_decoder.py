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
from megakernel_tts.codec.cuda_network import MOST_FRAMES, Network
from megakernel_tts.codec.decoder import DecodeRequest, PendingDecodeRequest, State
from megakernel_tts.model.config import CodecConfig

_CAPACITY = 64  # frames of a call

Graphs = tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]
Chunk = tuple[int, NDArray[np.int64]]
Samples = list[NDArray[np.int16] | None]


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
        max_pending_frames: Largest number of frames of a pending request.
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
        self.max_pending_frames = MOST_FRAMES
        self.slots, self.frame, self.sample_rate = (
            slots,
            config.samples_per_frame,
            config.sample_rate,
        )
        self._codes = config.decoder.codebook_size
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
    def load_slot(self, slot: int, state: SlotState | None = None) -> None:
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
    def save_slot(self, slot: int) -> SlotState:
        """A copy of a slot's state, on the device."""
        network = self._network
        with nullcontext() if self._queue is None else self._queue.behind():
            history, memory = network.history[slot].clone(), network.memory[slot].clone()
        if self._queue is not None:
            self._queue.finish()
        return SlotState(history, memory, self._position[slot])

    @torch.inference_mode()
    def prepare_state(self, state: State) -> SlotState:
        """What plain torch (`decoder.Decoder`) carries for one stream, on the same device."""
        history, memory = self._network.adopt(state)
        if self._queue is not None:  # whole when it is given: `load_slot` waits for nobody
            torch.cuda.current_stream(self._device).synchronize()
        return SlotState(history, memory, int(state.position))

    def decode(self, requests: Sequence[DecodeRequest]) -> Callable[[], Samples]:
        """Begins to decode the next frames of several streams, each as many as it has.

        Long chunks go in rounds of at most `MOST_FRAMES` a stream. What torch's current stream is
        given from now on comes after the first round, since the networks' kernel would take every
        multiprocessor and make it wait for a frame.

        Args:
            requests: Every slot at most once; its codes [frames, groups], on the host.

        Returns:
            What waits for them, and gives for every request its samples, or None if they were not
            finite: a weight is broken. Meanwhile nothing is called but `load_slot` of other slots.

        Raises:
            ValueError: A code is beyond its codebook, or a slot is named twice.
        """
        given = [(slot, codes.numpy()) for slot, codes in requests]
        if len({slot for slot, _ in given}) < len(given):
            raise ValueError(f"A call takes each slot once, found {[slot for slot, _ in given]}.")
        together = np.concatenate([np.empty(0, np.int64), *(codes.ravel() for _, codes in given)])
        if together.size and not 0 <= together.min() <= together.max() < self._codes:
            self._refuse(given)
        left = [[*map(_known, chunks)] for chunks in rounds(given, self.capacity)]
        for first in left[:1]:
            self._decode(first)
        return partial(self._finish, [slot for slot, _ in given], left)

    def decode_pending(
        self, requests: Sequence[PendingDecodeRequest]
    ) -> Callable[[Sequence[int]], Callable[[], Samples]]:
        """Begins to decode frames behind what makes them; see `Vocoder.decode_pending`.

        Without a GPU there is nothing to be behind of: the codes must be there already.
        """
        if self._queue is not None:
            self._queue.follow()
        self._start(requests)
        return partial(self._settle, requests)

    def _settle(
        self, requests: Sequence[PendingDecodeRequest], counts: Sequence[int]
    ) -> Callable[[], Samples]:
        """So many frames of each request count."""
        self._remember(requests, counts)
        return partial(self._collect, requests, counts)

    def _refuse(self, given: Sequence[Chunk]) -> None:
        """Names the first slot with a code that there is not."""
        for slot, codes in given:
            if codes.size and not 0 <= codes.min() <= codes.max() < self._codes:
                raise ValueError(
                    f"Codes must be between 0 and {self._codes - 1}, found {codes.min()} to "
                    f"{codes.max()} in slot {slot}."
                )

    def _finish(
        self, slots: Sequence[int], left: Sequence[Sequence[PendingDecodeRequest]]
    ) -> Samples:
        """Waits for the first round, which was started, and goes through the others."""
        made: dict[int, Samples] = {slot: [] for slot in slots}
        for i, requests in enumerate(left):
            if i > 0:
                self._decode(requests)
            found = self._collect(requests, [request.num_frames for request in requests])
            for request, samples in zip(requests, found, strict=True):
                made[request.slot].append(samples)
        return [_joined(made[slot]) for slot in slots]

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

    def _decode(self, requests: Sequence[PendingDecodeRequest]) -> None:
        """A round of frames that are known, all of which count."""
        self._start(requests)
        self._remember(requests, [request.num_frames for request in requests])

    def _launch(self, count: int) -> None:
        if self._queue is not None:
            self._queue.decode(self.graphs(count)[0])
            return
        with torch.inference_mode():
            self._network.decode(count)

    def _start(self, requests: Sequence[PendingDecodeRequest]) -> None:
        """Tells the kernels who speaks, and starts them."""
        table, first = self._network.asked, 0
        for request in requests:
            rows, there = table[first : first + request.num_frames], len(request.known)
            rows["slot"], rows["first"] = request.slot, first
            rows["position"] = self._position[request.slot] + np.arange(request.num_frames)
            rows["codes"][:there] = request.known
            rows["coming"][:there] = 0
            rows["coming"][there:] = _addresses(request.pending)
            first += request.num_frames
        self._network.broken.numpy()[:first] = 0
        self._launch(first)

    def _remember(self, requests: Sequence[PendingDecodeRequest], counts: Sequence[int]) -> None:
        """After what was started: streams go on behind so many frames of each request."""
        if self._queue is not None:
            self._queue.remembered.synchronize()  # `kept` is read until then
        kept, first = self._network.kept.numpy(), 0
        for request, count in zip(requests, counts, strict=True):
            kept[first] = count
            first += request.num_frames
        if self._queue is not None:
            self._queue.remember(self.graphs(first)[1])
        else:
            with torch.inference_mode():
                self._network.remember(first)
        for request, count in zip(requests, counts, strict=True):
            self._position[request.slot] += count

    def _collect(self, requests: Sequence[PendingDecodeRequest], counts: Sequence[int]) -> Samples:
        """Waits for what was started, and takes the samples of the requests that count."""
        if self._queue is not None:
            self._queue.decoded.synchronize()
        pcm, broken, first = self._network.pcm.numpy(), self._network.broken.numpy(), 0
        made: Samples = []
        for request, count in zip(requests, counts, strict=True):
            end = first + count
            if count:
                fine = not broken[first:end].any()
                made.append(pcm[first * self.frame : end * self.frame].copy() if fine else None)
            first += request.num_frames
        return made


class _Queue:
    """The codec's own stream of a GPU, beside that of the networks."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._made = torch.cuda.Event()
        self.decoded = torch.cuda.Event()
        self.remembered = torch.cuda.Event()

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

    def follow(self) -> None:
        """What comes next waits for the networks, for all that they were given so far."""
        self._made.record(torch.cuda.current_stream(self._stream.device))
        self._stream.wait_event(self._made)

    def decode(self, graph: torch.cuda.CUDAGraph) -> None:
        """Starts it; the networks wait for its end, of which the event tells."""
        with torch.cuda.stream(self._stream):
            graph.replay()
            self.decoded.record(self._stream)
        torch.cuda.current_stream(self._stream.device).wait_event(self.decoded)

    def remember(self, graph: torch.cuda.CUDAGraph) -> None:
        """Starts it, for which nobody waits."""
        with torch.cuda.stream(self._stream):
            graph.replay()
            self.remembered.record(self._stream)


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


def _known(chunk: Chunk) -> PendingDecodeRequest:
    """Frames that are all made."""
    return PendingDecodeRequest(*chunk, np.empty((0, 0), np.int32))


def _addresses(rows: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Where each of them lies."""
    return np.uint64(rows.ctypes.data) + np.uint64(rows.strides[0]) * np.arange(
        len(rows), dtype=np.uint64
    )


def _joined(parts: Samples) -> NDArray[np.int16] | None:
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return None
    return np.concatenate([np.empty(0, np.int16), *whole])


def _built_ops(device: torch.device) -> Any:
    from megakernel_tts.kernels.build import load

    if not hasattr(torch.ops.megakernel_tts, "codec_product"):
        load(device)
    return torch.ops.megakernel_tts
