"""Streaming recognition with states in slots: encoder and decoder of a chunk as one CUDA graph."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernel_common.layers import exact_convolutions
from megakernel_stt.engine.chunk_step import ChunkStep, GraphRecorder
from megakernel_stt.engine.recogniser import ChunkRecogniser, Chunks, Features, make_log_mel
from megakernel_stt.engine.slots import Slot, SlotPool
from megakernel_stt.kernels.conformer import ConformerKernels
from megakernel_stt.kernels.encoder import KernelEncoder
from megakernel_stt.kernels.transducer import KernelTransducer, read_results
from megakernel_stt.kernels.transducer_structs import MAX_BATCH
from megakernel_stt.model.checkpoint import Model
from megakernel_stt.network.encoder import StreamingEncoder
from megakernel_stt.network.features import samples_of
from megakernel_stt.network.transducer import Emission


class SlotRecognisers:
    """Makes the recognisers of a model, which share slots and the memory of graphs."""

    def __init__(
        self,
        model: Model,
        transducer: KernelTransducer,
        conformer: ConformerKernels | None,
        num_streams: int,
    ) -> None:
        """Prepares them.

        Args:
            model: The model.
            transducer: Its decoder.
            conformer: Kernels of its encoder; None: torch.
            num_streams: Streams at a time.
        """
        self._model = model
        self._transducer = transducer
        self._conformer = conformer
        self._num_streams = num_streams
        device = model.weights.transducer.embedding.device
        self._recorder = GraphRecorder(device) if device.type == "cuda" else None
        self._pools: dict[torch.Size, SlotPool] = {}  # by the size of keys and values

    def make(self, lookahead: int) -> "SlotRecogniser":
        """A recogniser with one lookahead; records its graphs.

        Args:
            lookahead: Frames of a chunk after its first.
        """
        config, weights = self._model.config.encoder, self._model.weights.encoder
        if self._conformer is None:
            encoder = StreamingEncoder(weights, config, lookahead)
            features = make_log_mel(self._model)
        else:
            encoder = KernelEncoder(self._conformer, lookahead)
            features = self._conformer.log_mel
        start = encoder.start()
        pool = self._pools.get(start.keys.shape)
        if pool is None:
            pool = SlotPool(start, self._transducer.start(), self._num_streams)
            self._pools[start.keys.shape] = pool
        sizes = batch_sizes(self._num_streams)
        return SlotRecogniser(
            self._model, encoder, features, self._transducer, pool, sizes, self._recorder
        )


class SlotRecogniser(ChunkRecogniser[Slot]):
    """A recogniser whose states are slots of a pool.

    Attributes:
        steps: A step for each of the numbers of streams, ascending.
    """

    def __init__(
        self,
        model: Model,
        encoder: StreamingEncoder,
        features: Features,
        transducer: KernelTransducer,
        pool: SlotPool,
        sizes: Sequence[int],
        recorder: GraphRecorder | None,
    ) -> None:
        """Records a graph for every number of streams.

        Args:
            model: The model.
            encoder: Its encoder.
            features: Its features.
            transducer: Its decoder.
            pool: The slots.
            sizes: Numbers of streams of a step, ascending.
            recorder: Records graphs; None on a CPU.
        """
        super().__init__(model, encoder, features)
        self._pool = pool
        num_samples, chunk_size = samples_of(encoder.num_mels), encoder.chunk_size
        self.steps = [
            ChunkStep(
                self._encode_slots, transducer, pool, (size, num_samples), chunk_size, recorder
            )
            for size in sizes
        ]

    def _encode_slots(
        self,
        samples: Tensor,
        num_samples: Tensor,
        lengths: Tensor,
        prompts: Tensor,
        sources: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """Encodes a chunk, and moves the states of the encoder."""
        states = self._pool.encoder
        mels = self.features(samples, num_samples).to(states.keys.dtype)
        with exact_convolutions(mels.device):
            frames = self.encoder.encode_slots(mels, lengths, sources, targets, states)
        return self.with_prompts(frames, prompts)

    def start_state(self) -> Slot:
        """The state of a stream before its first chunk."""
        return self._pool.start

    def compute(
        self, chunks: Chunks, states: list[Slot]
    ) -> tuple[list[Slot], list[list[Emission]]]:
        """Computes chunks; see `ChunkRecogniser.compute`."""
        step = next(step for step in self.steps if step.batch >= len(states))
        targets = [self._pool.take() for _ in states]
        results = step.run(chunks, [s.index for s in states], [t.index for t in targets])
        return targets, read_results(results, chunks.firsts)


def batch_sizes(num_streams: int) -> list[int]:
    """The numbers of streams that have a graph: powers of two, the last for all streams."""
    sizes = [1]
    while sizes[-1] < min(num_streams, MAX_BATCH):
        sizes.append(2 * sizes[-1])
    return sizes
