"""The transducer's kernels: their program, weights in operand order, launches, results."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.kernels.addresses import device_address
from megakernel_common.kernels.loader import LaunchPath, load_module
from megakernel_common.kernels.module import KernelModule, LaunchConfig
from megakernel_common.kernels.program import Program
from megakernel_stt.kernels.transducer_structs import (
    MAX_BATCH,
    MAX_COLUMNS,
    MAX_LAYERS,
    NUM_KEY_BUFFERS,
    STEP_K,
    TILE_ROWS,
    TRANSDUCER_DECLARATIONS,
    UNITS_PER_TILE,
    LstmLayerPointers,
    Result,
    States,
    TransducerInfo,
    TransducerParams,
    WeightPointers,
    Workspace,
)
from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.network.layers import apply
from megakernel_stt.network.transducer import (
    Emission,
    Transducer,
    TransducerState,
    least_certainty,
)

if TYPE_CHECKING:
    from megakernel_stt.model.weights import Linear, TransducerWeights

RELEASED_HIDDEN = 640  # of all released models; the largest for which shared memory has room
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_RESULT: np.dtype[Any] = np.dtype(Result)


def transducer_program(hidden_size: int) -> Program:
    """The program of the kernels.

    Args:
        hidden_size: Width of prediction and joint network.
    """
    return Program(
        "transducer",
        "transducer/kernels.cu",
        tuple(f"transduce_{name}" for name in _NAMES.values()),
        TRANSDUCER_DECLARATIONS,
        (("MEGAKERNEL_TRANSDUCER_HIDDEN", str(hidden_size)),),
    )


def kernel_obstacle(config: TransducerConfig) -> str | None:
    """Returns why the kernels do not fit a model, as a sentence, or None."""
    if config.hidden_size % STEP_K or config.hidden_size > RELEASED_HIDDEN:
        return (
            f"The kernels take widths of the decoder that are multiples of {STEP_K} up to "
            f"{RELEASED_HIDDEN}; this model has {config.hidden_size}."
        )
    if config.num_layers > MAX_LAYERS:
        return f"The kernels take {MAX_LAYERS} layers; this model has {config.num_layers}."
    return None


def load_transducer(
    weights: "TransducerWeights", config: TransducerConfig, path: LaunchPath | None = None
) -> "KernelTransducer":
    """Compiles the kernels for a model unless they are cached, and loads them.

    Args:
        weights: Its tensors, on the GPU.
        config: Its sizes.
        path: How to compile and launch; by default what `support` finds. For tests.

    Raises:
        RuntimeError: The kernels cannot be compiled on this machine.
    """
    device = weights.embedding.device
    module = load_module(transducer_program(config.hidden_size), device, path)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return KernelTransducer(weights, config, module, num_sms)


class KernelTransducer(Transducer):
    """Greedy decoding in one launch; the same interface as the decoder in torch."""

    def __init__(
        self,
        weights: "TransducerWeights",
        config: TransducerConfig,
        module: KernelModule,
        num_blocks: int,
    ) -> None:
        """Packs the weights.

        Args:
            weights: The tensors.
            config: The sizes.
            module: The kernels.
            num_blocks: Thread blocks of a launch, all of which must be resident together.
        """
        super().__init__(weights, config)
        self._module = module
        self._num_blocks = num_blocks
        self._dtype, self._device = weights.embedding.dtype, weights.embedding.device
        info = module.read("transducer_info", TransducerInfo)
        shared_bytes = getattr(info, f"{_NAMES[self._dtype]}_shared_bytes")
        self._launch_config = LaunchConfig(
            num_blocks, info.num_threads, shared_bytes, cooperative=True
        )
        self._tensors: list[Tensor] = []  # that the parameters point to
        durations = config.durations or ()
        layers = (LstmLayerPointers * MAX_LAYERS)()
        for i, layer in enumerate(weights.lstm):
            layers[i] = LstmLayerPointers(
                self._pack_gates(layer.input), self._pack_gates(layer.hidden)
            )
        self._params = TransducerParams(
            embedding=self._keep(weights.embedding.contiguous()),
            layers=layers,
            projector=self._pack(weights.projector.weight, weights.projector.bias),
            head=self._pack(weights.head.weight, weights.head.bias),
            durations=self._keep(torch.tensor(durations, dtype=torch.int32, device=self._device)),
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            num_durations=len(durations),
            blank_id=config.blank_id,
            max_symbols=config.max_symbols,
            least_certainty=least_certainty(config.vocab_size),
        )

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor, which is kept alive."""
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _pack_gates(self, layer: "Linear") -> WeightPointers:
        """Rows of gates [4, units], such that a tile has the gates of its units."""
        order = torch.arange(len(layer.weight)).view(4, -1, UNITS_PER_TILE).transpose(0, 1)
        rows = order.flatten().to(self._device)
        bias = None if layer.bias is None else layer.bias[rows]
        return self._pack(layer.weight[rows], bias)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> WeightPointers:
        missing = -len(weight) % TILE_ROWS
        if bias is None:
            bias = weight.new_zeros(len(weight))
        data = pack_tiles(F.pad(weight, (0, 0, 0, missing)))
        return WeightPointers(self._keep(data), self._keep(F.pad(bias, (0, missing)).contiguous()))

    def project(self, frames: Tensor) -> Tensor:
        """Frames of the encoder [batch, frames, in], projected for the joint network."""
        return apply(self._weights.encoder_projector, frames)

    def decode(
        self, frames: Tensor, lengths: list[int], state: TransducerState
    ) -> tuple[list[list[Emission]], TransducerState]:
        """Decodes the next frames of at most `MAX_BATCH` streams; see `Transducer.decode`."""
        after = TransducerState.join([state])  # a copy, which the launch changes in place
        slots = torch.arange(len(lengths), dtype=torch.int32, device=self._device)
        counts = torch.tensor(lengths, dtype=torch.int32, device=self._device)
        results = self.launch(self.project(frames), counts, slots, slots, after)
        firsts = state.num_frames.tolist()
        return read_results(results.cpu(), firsts), after

    def launch(
        self,
        frames: Tensor,
        lengths: Tensor,
        sources: Tensor,
        targets: Tensor,
        states: TransducerState,
    ) -> Tensor:
        """Decodes the next frames of every stream; does not wait.

        Args:
            frames: [batch, frames, hidden], projected.
            lengths: [batch] int32, frames of every stream.
            sources: [batch] int32, slots of the streams' states.
            targets: [batch] int32, slots for the new states.
            states: States by slot, changed in place.

        Returns:
            int32 of `results_shape`, for `read_results`.
        """
        batch, num_frames = frames.shape[:2]
        assert 0 < batch <= MAX_BATCH, f"a launch takes at most {MAX_BATCH} streams"
        results = lengths.new_empty(self.results_shape(batch, num_frames))
        params = TransducerParams.from_buffer_copy(self._params)
        params.frames = self._address(frames, "frames")
        for name, tensor in (("lengths", lengths), ("sources", sources), ("targets", targets)):
            setattr(params, name, device_address(tensor, torch.int32, name, self._device))
        params.states = States(
            *(self._address(getattr(states, name), name) for name in ("hidden", "cell", "output")),
            device_address(states.num_frames, torch.int64, "num_frames", self._device),
            device_address(states.frame, torch.int64, "frame", self._device),
        )
        params.results = results.data_ptr()
        params.batch, params.num_frames, params.max_results = (
            batch,
            num_frames,
            results.shape[1] - 1,
        )
        barrier = lengths.new_empty(1)
        keys = torch.empty(
            NUM_KEY_BUFFERS * 2 * MAX_COLUMNS, dtype=torch.int64, device=self._device
        )
        partials = torch.empty(MAX_COLUMNS, self._num_blocks, 4, device=self._device)
        layers, size = self._config.num_layers, self._config.hidden_size
        hidden = frames.new_empty(2, batch, layers, size)
        cell, output = frames.new_empty(batch, layers, size), frames.new_empty(batch, size)
        buffers = [barrier, keys, partials, hidden, cell, output]
        params.workspace = Workspace(*(buffer.data_ptr() for buffer in buffers))
        self._module.launch(
            f"transduce_{_NAMES[self._dtype]}",
            params,
            self._launch_config,
            writes=[
                results,
                *(states.hidden, states.cell, states.output, states.num_frames, states.frame),
                *buffers,
            ],
            set_bits=barrier,
        )
        return results

    def results_shape(self, batch: int, num_frames: int) -> tuple[int, int, int]:
        """Shape of the results of a launch: streams, a header and tokens, fields of `Result`."""
        return batch, 1 + self._config.max_symbols * num_frames, len(Result._fields_)

    def _address(self, tensor: Tensor, name: str) -> int:
        return device_address(tensor, self._dtype, name, self._device)


def pack_tiles(weight: Tensor) -> Tensor:
    """Rows of weights in operand order; csrc/transducer/tiles.cuh reads it.

    Args:
        weight: float32 or bfloat16 [16 tiles, 16 steps].

    Returns:
        [tiles, steps, 32 lanes, 8].
    """
    tiles, steps = weight.shape[0] // TILE_ROWS, weight.shape[1] // STEP_K
    if weight.dtype == torch.float32:
        split = weight.reshape(tiles, 2, 8, steps, 4, 4).permute(0, 3, 2, 4, 1, 5)
    else:
        split = weight.reshape(tiles, 2, 8, steps, 2, 4, 2).permute(0, 3, 2, 5, 4, 1, 6)
    return split.reshape(tiles, steps, 32, 8).contiguous()


def read_results(results: Tensor, firsts: Sequence[int]) -> list[list[Emission]]:
    """The tokens of a launch.

    Args:
        results: What `launch` returned, on the host: int32 [streams, records, fields], contiguous.
        firsts: Index of every stream's first frame of the launch.
    """
    records: NDArray[Any] = results.numpy().view(_RESULT)[..., 0]
    counts = records["token"][:, 0].tolist()  # the first record of a stream is a header
    found: list[list[Emission]] = []
    for stream, count, first in zip(records, counts, firsts, strict=True):
        if not count:  # most streams: a token is decoded every three frames
            found.append([])
            continue
        tokens = stream[1 : 1 + count]
        fields = tokens["token"], first + tokens["frame"], tokens["duration"], tokens["confidence"]
        values = zip(*(field.tolist() for field in fields), strict=True)
        found.append([Emission(*one) for one in values])
    return found
