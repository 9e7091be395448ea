"""The computation of a chunk of several streams with constant addresses, as a CUDA graph on a GPU.

Its inputs, samples and numbers of every stream, are one copy from pinned memory, and its tokens one
to pinned memory, both within the graph: the host writes the inputs, replays the graph and waits
once.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megakernel_stt.engine.recogniser import Chunks
from megakernel_stt.engine.samples import copy_to, size_of
from megakernel_stt.engine.slots import SlotPool
from megakernel_stt.kernels.transducer import KernelTransducer

# Samples, their counts, lengths, prompts, state slots to read and to write -> frames.
Encode = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_NUM_WARMUPS = 2  # of the libraries, before a graph is recorded
_NUM_NUMBERS = 6  # of a stream


class GraphRecorder:
    """Records graphs that share memory and a CUDA stream: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        """Makes the CUDA stream.

        Args:
            device: The GPU.
        """
        # A chunk is short: beside synthesis on the same GPU, it is computed first.
        self._cuda_stream = torch.cuda.Stream(device, priority=-1)
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Records a computation.

        Args:
            compute: Launches it. The host must not wait in it.

        Returns:
            A function that replays it and waits for its end.
        """
        graph = torch.cuda.CUDAGraph()
        self._cuda_stream.wait_stream(torch.cuda.current_stream(self._cuda_stream.device))
        with torch.cuda.stream(self._cuda_stream):
            for _ in range(_NUM_WARMUPS):
                compute()
            self._cuda_stream.synchronize()
            # Other threads may use CUDA during the capture.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            compute()
            graph.capture_end()

        def replay() -> None:
            with torch.cuda.stream(self._cuda_stream):
                graph.replay()
            self._cuda_stream.synchronize()

        return replay


class ChunkStep:
    """A chunk of up to `batch` streams. Rows without a stream begin at the start and have no frame.

    Attributes:
        batch: Streams at most.
        replay: Computes the inputs' results and waits for them.
    """

    def __init__(
        self,
        encode: Encode,
        transducer: KernelTransducer,
        pool: SlotPool,
        shape: tuple[int, int],
        chunk_size: int,
        recorder: GraphRecorder | None,
    ) -> None:
        """Records the computation.

        Args:
            encode: Encodes a chunk, and moves the states of the encoder from slot to slot.
            transducer: The decoder.
            pool: States.
            shape: Streams at most, samples of a chunk.
            chunk_size: Frames of a chunk.
            recorder: None on a CPU, where the computation is run instead of replayed.
        """
        self.batch = shape[0]
        self._shape = shape
        self._encode, self._transducer, self._pool = encode, transducer, pool
        pinned, results = recorder is not None, transducer.results_shape(self.batch, chunk_size)
        size = _NUM_NUMBERS * self.batch + -(-math.prod(shape) // 2)  # two samples in an int64
        self._inputs = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._samples, self._numbers = (part.numpy() for part in self._unpack(self._inputs))
        self._results = torch.zeros(results, dtype=torch.int32, pin_memory=pinned)
        self._missing = np.array([0, 0, 0, 0, pool.start.index, pool.unused])[:, None]
        self._set_numbers([[]] * _NUM_NUMBERS)
        self.replay = self._compute if recorder is None else recorder.record(self._compute)

    def _unpack(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Samples float32 [streams, samples] and numbers int64 [6, streams] of the inputs."""
        numbers, samples = inputs.tensor_split([_NUM_NUMBERS * self.batch])
        samples = samples.view(torch.float32)[: math.prod(self._shape)]
        return samples.view(self._shape), numbers.view(_NUM_NUMBERS, self.batch)

    def _set_numbers(self, rows: Sequence[Sequence[int]]) -> None:
        """Sets the numbers of every stream; the other streams have no frame."""
        count = len(rows[0])
        self._numbers[:, :count] = rows
        self._numbers[:, count:] = self._missing

    def _compute(self) -> None:
        inputs = self._inputs.to(self._pool.device, non_blocking=True)
        samples, numbers = self._unpack(inputs)
        num_samples, lengths, prompts, _, sources, targets = numbers.unbind()
        frames = self._encode(samples, num_samples, lengths, prompts, sources, targets)
        counts, *slots = numbers[3:].int().unbind()
        results = self._transducer.launch(
            self._transducer.project(frames), counts, slots[0], slots[1], self._pool.transducer
        )
        self._results.copy_(results, non_blocking=True)

    def run(self, chunks: Chunks, sources: Sequence[int], targets: Sequence[int]) -> Tensor:
        """Computes chunks and waits for them.

        Args:
            chunks: Of at most `batch` streams.
            sources: Slots of the states before.
            targets: Slots for the states after.

        Returns:
            See `KernelTransducer.launch`; on the host, valid until the next call.
        """
        num_streams = len(sources)
        copy_to(self._samples, chunks.samples)
        num_samples = [size_of(pieces) for pieces in chunks.samples]
        rows = num_samples, chunks.lengths, chunks.prompts, chunks.counts, sources, targets
        self._set_numbers(rows)
        self.replay()
        return self._results[:num_streams]
