"""The streaming decoder as CUDA kernels: many streams in a call, samples in host memory.

Every stream has a slot that holds its state between calls. There is one CUDA graph for each size of
a call. It serves any slots and chunk lengths, because the kernels read both from a table. A call of
fewer frames than its size is filled up with frames of a slot that no stream has.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.devices import wait_for_event
from megakernel_common.inference import in_inference_mode
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.decoder import DecodeRequest, PendingDecodeRequest, State
from megakernel_tts.codec.decoder_kernels import DecoderKernels
from megakernel_tts.codec.kernel_layers import MAX_STREAM_FRAMES
from megakernel_tts.kernels.codec import CodecKernels, load_codec_kernels
from megakernel_tts.model.config import CodecConfig

_CAPACITY = 256  # frames of a call, over all streams: a chunk of four frames of 64 streams
_SPIN_FRAMES = 8  # of a call at most, for whose end the host spins: it takes less than 1 ms

Graphs = tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]
Chunk = tuple[int, NDArray[np.int64]]  # a slot and codes [frames, groups]
Samples = list[NDArray[np.int16] | None]


@dataclass(frozen=True)
class SlotState:
    """The state of one stream outside of any slot; about 3 MB at the released size.

    Attributes:
        history: The last rows of every convolution's input, float16 [values].
        kv_cache: Keys and values of the last frames, float16 [layers, 2, ring, channels].
        position: Frames decoded so far.
    """

    history: Tensor
    kv_cache: Tensor
    position: int


class CudaDecoder:
    """A `Vocoder`: codes to 16-bit samples, a few frames of several streams at a time.

    The samples of a stream do not depend on its chunk lengths or on the other streams of a call.
    One thread at a time may call it.

    Attributes:
        slots: Number of slots.
        max_pending_frames: Largest number of frames of a pending request.
        max_pending_total: Largest number of frames of all pending requests.
        capacity: Largest number of frames of a call, over all streams.
        samples_per_frame: Samples of a frame.
        sample_rate: In Hz.
    """

    def __init__(
        self,
        weights: w.DecoderWeights,
        config: CodecConfig,
        *,
        slots: int,
        kernels: CodecKernels | None = None,
    ) -> None:
        """Packs the weights and allocates the slots.

        Args:
            weights: float32 tensors on their device; not needed afterwards.
            config: The codec's configuration.
            slots: Number of streams at a time.
            kernels: The kernels; by default those of csrc/codec, compiled if necessary.

        Raises:
            RuntimeError: The kernels cannot be compiled on this machine.
            ValueError: The kernels are not compiled for these shapes.
        """
        self._device = weights.input.device
        self.max_pending_frames = MAX_STREAM_FRAMES
        self.slots = slots
        self.samples_per_frame, self.sample_rate = config.samples_per_frame, config.sample_rate
        self._codebook_size = config.decoder.codebook_size
        self.capacity = self.max_pending_total = min(_CAPACITY, slots * MAX_STREAM_FRAMES)
        with torch.inference_mode():
            self._kernels = DecoderKernels(
                weights,
                config,
                slots=slots + 1,  # the last one belongs to the frames that fill up a call
                capacity=self.capacity,
                kernels=load_codec_kernels(self._device) if kernels is None else kernels,
            )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the codec has a CUDA stream of its own
        buffers = (self._kernels.num_kept_frames, self._kernels.pcm, self._kernels.non_finite)
        self._num_kept_frames, self._pcm, self._non_finite = (t.numpy() for t in buffers)
        self._positions = np.zeros(slots, np.int64)
        self._new_slots = set[int]()  # whose history is to be cleared before the next call
        self._graphs: dict[int, Graphs] = {}
        self._cuda_stream = _CodecCudaStream(self._device) if self._device.type == "cuda" else None

    def stages(self, num_frames: int) -> list[str]:
        """The part of the network that each kernel of a call of `num_frames` belongs to."""
        return self._kernels.stages(num_frames)

    @property
    def state_bytes(self) -> int:
        """Size of a slot's state."""
        return sum(t[0].nbytes for t in (self._kernels.history, self._kernels.kv_cache))

    def warmup(self) -> None:
        """Records the graphs of all sizes of a call, so that no call has to."""
        if self._cuda_stream is not None:
            for size in {self._call_size(count) for count in range(1, self.capacity + 1)}:
                self.graphs(size)

    def _call_size(self, num_frames: int) -> int:
        """The number of frames for which a call of `num_frames` is launched."""
        multiple = 1 if num_frames <= 16 else 4 if num_frames <= 64 else 16
        return min(-(-num_frames // multiple) * multiple, self.capacity)

    @in_inference_mode
    def load_slot(self, slot: int, state: SlotState | None = None) -> None:
        """Sets the state of a slot; see `Vocoder.load_slot`. The host does not wait.

        Args:
            slot: The slot.
            state: The state; None: that of a new stream.
        """
        if state is None:
            self._new_slots.add(slot)
            self._positions[slot] = 0
            return
        kernels = self._kernels
        self._new_slots.discard(slot)
        with self._use_cuda_stream():
            for target, saved in (
                (kernels.history[slot], state.history),
                (kernels.kv_cache[slot], state.kv_cache),
            ):
                target.copy_(saved)
                if self._cuda_stream is not None:
                    self._cuda_stream.keep(saved)
        self._positions[slot] = state.position

    def _use_cuda_stream(self) -> AbstractContextManager[None]:
        """Has torch launch on the codec's CUDA stream."""
        return nullcontext() if self._cuda_stream is None else self._cuda_stream.use()

    @in_inference_mode
    def _clear_new_slots(self) -> None:
        """Clears the history of new streams; old keys and values are masked by position."""
        if self._new_slots:
            with self._use_cuda_stream():
                for slot in self._new_slots:
                    self._kernels.history[slot].zero_()
            self._new_slots.clear()

    @in_inference_mode
    def save_slot(self, slot: int) -> SlotState:
        """Returns a copy of a slot's state, on the device; see `Vocoder.save_slot`."""
        kernels = self._kernels
        self._clear_new_slots()
        with self._use_cuda_stream():
            history, kv_cache = kernels.history[slot].clone(), kernels.kv_cache[slot].clone()
        if self._cuda_stream is not None:
            self._cuda_stream.synchronize()
        return SlotState(history, kv_cache, int(self._positions[slot]))

    @in_inference_mode
    def prepare_state(self, state: State) -> SlotState | None:
        """Converts the state of one stream of `decoder.Decoder`, on the same device.

        Returns:
            None for a stream without frames.
        """
        if not int(state.position):
            return None
        history, kv_cache = self._kernels.pack_state(state)
        if self._cuda_stream is not None:  # `load_slot` does not wait for torch's current stream
            torch.cuda.current_stream(self._device).synchronize()
        return SlotState(history, kv_cache, int(state.position))

    def decode(self, requests: Sequence[DecodeRequest]) -> Callable[[], Samples]:
        """Starts decoding the next frames of several streams; see `Vocoder.decode`.

        Long requests are split into rounds of at most `MAX_STREAM_FRAMES` frames per stream. Only
        the first round is started here. Later work on torch's current stream is ordered after it,
        because the decode kernel occupies every multiprocessor for a frame.

        Args:
            requests: At most one per slot.

        Returns:
            A function that waits for the samples, and starts and waits for the remaining rounds.
            Until it returns, only `load_slot` of other slots may be called.

        Raises:
            ValueError: A code is outside its codebook, or a slot occurs twice.
        """
        chunks = [(request.slot, request.codes.numpy()) for request in requests]
        slots = [slot for slot, _ in chunks]
        if len(set(slots)) < len(slots):
            raise ValueError(f"A call takes each slot once, found {slots}.")
        codes = np.concatenate([np.empty(0, np.int64), *(codes.ravel() for _, codes in chunks)])
        if codes.size and not 0 <= codes.min() <= codes.max() < self._codebook_size:
            self._raise_invalid_codes(chunks)
        left = [[*map(_without_pending, taken)] for taken in rounds(chunks, self.capacity)]
        if left:
            self._start_round(left[0])
        return partial(self._finish_rounds, slots, left)

    def decode_pending(
        self, requests: Sequence[PendingDecodeRequest]
    ) -> Callable[[Sequence[int]], Callable[[], Samples]]:
        """Starts decoding after the kernels that generate the codes; see `Vocoder.decode_pending`.

        On a CPU there is no CUDA stream to wait for: the codes must have been written.
        """
        self._clear_new_slots()  # not between the frames and the codec
        if self._cuda_stream is not None:
            self._cuda_stream.wait_for_current_stream()
        self._start(requests)
        return partial(self._confirm, requests)

    def _confirm(
        self, requests: Sequence[PendingDecodeRequest], counts: Sequence[int]
    ) -> Callable[[], Samples]:
        self._update_state(requests, counts)
        return partial(self._collect, requests, counts)

    def _raise_invalid_codes(self, chunks: Sequence[Chunk]) -> None:
        for slot, codes in chunks:
            if codes.size and not 0 <= codes.min() <= codes.max() < self._codebook_size:
                raise ValueError(
                    f"Codes must be between 0 and {self._codebook_size - 1}, found {codes.min()} "
                    f"to {codes.max()} in slot {slot}."
                )

    def _finish_rounds(
        self, slots: Sequence[int], left: Sequence[Sequence[PendingDecodeRequest]]
    ) -> Samples:
        """Waits for the first round, which is running, then runs the others."""
        samples: dict[int, Samples] = {slot: [] for slot in slots}
        for i, requests in enumerate(left):
            if i > 0:
                self._start_round(requests)
            made = self._collect(requests, [request.num_frames for request in requests])
            for request, pcm in zip(requests, made, strict=True):
                samples[request.slot].append(pcm)
        return [_joined(samples[slot]) for slot in slots]

    def graphs(self, num_frames: int) -> Graphs:
        """The graphs of a call of `num_frames`: the decoder, and the update of the state."""
        assert self._cuda_stream is not None
        if num_frames not in self._graphs:
            kernels = self._kernels
            self._graphs[num_frames] = (
                self._cuda_stream.record(lambda: kernels.decode(num_frames)),
                self._cuda_stream.record(lambda: kernels.update_state(num_frames)),
            )
        return self._graphs[num_frames]

    def _start_round(self, requests: Sequence[PendingDecodeRequest]) -> None:
        """Starts requests without pending codes and keeps all of their frames."""
        self._start(requests)
        self._update_state(requests, [request.num_frames for request in requests])

    @in_inference_mode
    def _launch(self, num_frames: int) -> None:
        self._clear_new_slots()
        if self._cuda_stream is not None:
            self._cuda_stream.decode(self.graphs(num_frames)[0])
        else:
            self._kernels.decode(num_frames)

    def _start(self, requests: Sequence[PendingDecodeRequest]) -> None:
        """Writes the table of requests and starts the decoder."""
        table = self._kernels.requests
        calls = _RequestTable.of(requests)
        num_frames = len(calls.frame)
        size, rows = self._call_size(num_frames), table[:num_frames]
        rows["slot"], rows["first_frame"] = calls.slot, calls.first
        rows["position"] = self._positions[calls.slot] + calls.frame
        received = calls.frame < calls.num_received
        if received.any():
            rows["codes"][received] = np.concatenate([request.received for request in requests])
        rows["pending_address"] = np.where(received, 0, calls.address)
        filling = table[num_frames:size]
        filling["slot"], filling["first_frame"] = self.slots, np.arange(num_frames, size)
        filling["position"] = filling["codes"] = filling["pending_address"] = 0
        self._non_finite[:num_frames] = 0
        self._launch(size)

    @in_inference_mode
    def _update_state(
        self, requests: Sequence[PendingDecodeRequest], counts: Sequence[int]
    ) -> None:
        """Advances every stream by the number of its frames that are kept."""
        if self._cuda_stream is not None:
            self._cuda_stream.state_updated.synchronize()  # until then the kernel reads the counts
        num_frames = np.array([request.num_frames for request in requests], np.int64)
        ends = np.cumsum(num_frames)
        size = self._call_size(int(num_frames.sum()))
        self._num_kept_frames[:size] = 0  # only a request's first frame has its count
        self._num_kept_frames[ends - num_frames] = counts
        if self._cuda_stream is not None:
            self._cuda_stream.update_state(self.graphs(size)[1])
        else:
            self._kernels.update_state(size)
        slots = np.array([request.slot for request in requests], np.int64)
        self._positions[slots] += np.array(counts, np.int64)

    def _collect(self, requests: Sequence[PendingDecodeRequest], counts: Sequence[int]) -> Samples:
        """Waits for the decoder and copies the samples of requests with frames to keep."""
        num_frames = sum(request.num_frames for request in requests)
        if self._cuda_stream is not None:
            wait_for_event(self._cuda_stream.decoded, spinning=num_frames <= _SPIN_FRAMES)
        all_finite = not self._non_finite[:num_frames].any()
        samples: Samples = []
        first = 0
        for request, count in zip(requests, counts, strict=True):
            end = first + count
            if count:
                finite = all_finite or not self._non_finite[first:end].any()
                pcm = self._pcm[first * self.samples_per_frame : end * self.samples_per_frame]
                samples.append(pcm.copy() if finite else None)
            first += request.num_frames
        return samples


class _CodecCudaStream:
    """The CUDA stream of the codec, beside that of the decode kernel."""

    def __init__(self, device: torch.device) -> None:
        self._cuda_stream = torch.cuda.Stream(device)
        self._codes_written = torch.cuda.Event()
        self.decoded = torch.cuda.Event()
        self.state_updated = torch.cuda.Event()

    def use(self) -> AbstractContextManager[None]:
        """Makes it torch's current stream: work is ordered after the codec's earlier work."""
        return torch.cuda.stream(self._cuda_stream)

    def keep(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory allocated until the work launched so far is done."""
        tensor.record_stream(self._cuda_stream)

    def synchronize(self) -> None:
        """Waits for all work launched so far."""
        self._cuda_stream.synchronize()

    def record(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Captures the launches of a function; other threads may use CUDA during the capture."""
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.stream(self._cuda_stream):
            graph.capture_begin(capture_error_mode="thread_local")
            launch()
            graph.capture_end()
        return graph

    def wait_for_current_stream(self) -> None:
        """Orders later work after all work launched so far on torch's current stream."""
        self._codes_written.record(torch.cuda.current_stream(self._cuda_stream.device))
        self._cuda_stream.wait_event(self._codes_written)

    def decode(self, graph: torch.cuda.CUDAGraph) -> None:
        """Starts the decoder; torch's current stream waits for it."""
        with torch.cuda.stream(self._cuda_stream):
            graph.replay()
            self.decoded.record(self._cuda_stream)
        torch.cuda.current_stream(self._cuda_stream.device).wait_event(self.decoded)

    def update_state(self, graph: torch.cuda.CUDAGraph) -> None:
        """Starts the update of the state; torch's current stream does not wait for it."""
        with torch.cuda.stream(self._cuda_stream):
            graph.replay()
            self.state_updated.record(self._cuda_stream)


def rounds(chunks: Sequence[Chunk], capacity: int) -> Iterator[list[Chunk]]:
    """Splits chunks into rounds: `MAX_STREAM_FRAMES` of a stream and `capacity` in all at most."""
    left = [(slot, codes) for slot, codes in chunks if len(codes)]
    while left:
        taken = [(slot, codes[:MAX_STREAM_FRAMES]) for slot, codes in left]
        ends = list(accumulate(len(codes) for _, codes in taken))
        taken = taken[: sum(end <= capacity for end in ends)]
        yield taken
        rest = [(slot, codes[MAX_STREAM_FRAMES:]) for slot, codes in left[: len(taken)]]
        left = [(slot, codes) for slot, codes in rest if len(codes)] + left[len(taken) :]


def _without_pending(chunk: Chunk) -> PendingDecodeRequest:
    return PendingDecodeRequest(*chunk, np.empty((0, 0), np.int32))


class _RequestTable(NamedTuple):
    """Requests by frame; each is [frames of all requests].

    Attributes:
        slot: The request's slot.
        first: The request's first frame.
        frame: The frame of the request.
        num_received: Codes of the request that are known.
        address: Host address of the frame's codes, where they are pending.
    """

    slot: NDArray[np.int64]
    first: NDArray[np.int64]
    frame: NDArray[np.int64]
    num_received: NDArray[np.int64]
    address: NDArray[np.int64]

    @classmethod
    def of(cls, requests: Sequence[PendingDecodeRequest]) -> "_RequestTable":
        """The table of some requests, without a loop over their frames."""
        numbers = np.array(
            [
                (
                    request.slot,
                    len(request.received),
                    len(request.pending),
                    request.pending.__array_interface__["data"][0],
                    request.pending.strides[0],
                )
                for request in requests
            ],
            np.int64,
        ).reshape(-1, 5)
        counts = numbers[:, 1] + numbers[:, 2]
        slot, num_received, _, address, stride = np.repeat(numbers, counts, axis=0).T
        first = np.repeat(np.cumsum(counts) - counts, counts)
        frame = np.arange(len(first)) - first
        return cls(slot, first, frame, num_received, address + stride * (frame - num_received))


def _joined(samples: Samples) -> NDArray[np.int16] | None:
    """The samples of all rounds, or None if those of one were not finite."""
    finite = [pcm for pcm in samples if pcm is not None]
    if len(finite) < len(samples):
        return None
    return np.concatenate([np.empty(0, np.int16), *finite])
