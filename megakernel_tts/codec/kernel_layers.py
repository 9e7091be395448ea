"""Layers of the codec's decoder as kernel launches: buffers, parameters, state.

csrc/codec/params.cuh describes the kernels' parameters and equations.
"""

from ctypes import sizeof
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.codec import weight_packing as packing
from megakernel_tts.codec import weights as w
from megakernel_tts.codec.activation_buffers import ActivationBuffer, ActivationBuffers
from megakernel_tts.codec.decoder import codebook_tables
from megakernel_tts.codec.kernel_launches import (
    ActivationLayouts,
    ActivationReader,
    Launch,
    LayerLaunches,
    ProjectionLaunch,
    ResidualUnitLaunch,
)
from megakernel_tts.kernels.codec import CodecKernels
from megakernel_tts.kernels.codec_structs import (
    ATTENTION_WINDOW,
    MAX_HISTORIES,
    SAMPLE_TAPS,
    Activations,
    AttentionParams,
    DepthwiseParams,
    EmbedParams,
    Epilogue,
    Frame,
    ProjectionParams,
    SamplesParams,
    StateUpdateParams,
)
from megakernel_tts.kernels.codec_tiles import num_k_splits
from megakernel_tts.kernels.codec_unit_tiles import RESIDUAL_UNIT_TILES
from megakernel_tts.kernels.codec_warpgroup_tiles import WarpgroupTile, warpgroup_columns
from megakernel_tts.model.config import CodecConfig

MAX_STREAM_FRAMES = 8  # of one stream in a call
FRAME = np.dtype[np.void](Frame)
_NORM_EPS = 1e-6  # of the layer norms; not in the configuration
_ALIGNMENT = 16  # bytes


class KernelLayers:
    """Launches of layers, their buffers, and the state of every slot.

    A subclass appends the layers of a network, then calls `finish`.

    Attributes:
        requests: FRAME [capacity], on the host: the frames of a call.
        num_kept_frames: int32 [capacity], on the host: in the row of a stream's first frame, how
            many of its frames `update_state` keeps.
        pcm: int16 [capacity * samples per frame], on the host.
        non_finite: int32 [capacity], on the host: 1 where a frame's samples were not finite.
        history: float16 [slots, values]: the history of every layer.
        kv_cache: float16 [slots, layers, 2, ring, heads * head_dim]: keys and values.
        ring_size: Frames of the KV cache.
        stage: The part of the network that the next layers belong to.
        layers: The layers in the order of their launches.
        buffers: The activations of all layers.
    """

    def __init__(
        self,
        config: CodecConfig,
        device: torch.device,
        *,
        slots: int,
        capacity: int,
        kernels: CodecKernels,
    ) -> None:
        """Allocates the buffers that the layers share.

        Args:
            config: The codec's configuration.
            device: The device of the weights.
            slots: Number of streams whose state is kept.
            capacity: Largest number of frames of a call, over all streams.
            kernels: The compiled kernels.
        """
        stack = config.decoder.stack
        self._kernels, self._capacity = kernels, capacity
        self._layouts = ActivationLayouts()
        self._device, self._stack, self._slots = device, stack, slots
        self.stage = ""
        self.buffers = ActivationBuffers(capacity, device)
        self.layers: list[LayerLaunches] = []
        self._structs_with_history: list[tuple[Activations, ActivationBuffer]] = []
        self._tensors: list[Tensor] = []  # whose addresses the parameters hold
        width = stack.num_heads * stack.head_dim
        self.ring_size = ATTENTION_WINDOW - 1 + MAX_STREAM_FRAMES
        requests = self._host_buffer(capacity * sizeof(Frame) // 4, torch.int32)
        self._requests = requests.view(capacity, -1)
        self.requests: NDArray[Any] = self._requests.numpy().view(FRAME)[:, 0]
        self._frames = torch.zeros_like(self._requests, device=device)
        self.num_kept_frames = self._host_buffer(capacity, torch.int32)
        self.pcm = self._host_buffer(capacity * config.samples_per_frame, torch.int16)
        self.non_finite = self._host_buffer(capacity, torch.int32)
        kv_shape = (slots, stack.num_layers, 2, self.ring_size, width)
        self.kv_cache = torch.zeros(kv_shape, dtype=torch.float16, device=device)
        self._rope = self.floats(capacity, stack.head_dim // 2, 2)
        self._queries = self.floats(capacity, width)
        self.history = torch.empty(0, dtype=torch.float16, device=device)

    def finish(self) -> None:
        """Allocates the histories, once all layers are appended.

        Raises:
            ValueError: There are more histories than the kernels take.
        """
        self.history = torch.zeros(
            self._slots, self.buffers.history_size, dtype=torch.float16, device=self._device
        )
        self._state_update = self._build_state_update()
        for struct, x in self._structs_with_history:
            struct.history = self.history.data_ptr() + x.offset * self.history.element_size()
            struct.history_stride = self.buffers.history_size

    def decode(self, num_frames: int) -> None:
        """Decodes the first `num_frames` requests into `pcm`, on the current stream."""
        for layer in self.layers:
            for launch in layer.launches(num_frames):
                launch(num_frames)

    def stages(self, num_frames: int) -> list[str]:
        """The part of the network that each kernel of `decode` belongs to."""
        return [layer.stage for layer in self.layers for _ in layer.launches(num_frames)]

    def update_state(self, num_frames: int) -> None:
        """After `decode`: moves the last kept rows of every layer into the histories."""
        self._state_update.num_frames = num_frames
        self._kernels.update_state(self._state_update, [self.history])

    def _host_buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the kernels read and write."""
        return torch.zeros(size, dtype=dtype, pin_memory=self._device.type == "cuda")

    def floats(self, *shape: int) -> Tensor:
        """Allocates float32 zeros on the device."""
        return torch.zeros(shape, device=self._device)

    def _append(self, launch: Launch) -> None:
        self.layers.append(LayerLaunches(self.stage, (launch,)))

    def _address(self, tensor: Tensor | None) -> int | None:
        """The address of a tensor, which is kept alive."""
        if tensor is None:
            return None
        address = tensor.data_ptr()
        if address % _ALIGNMENT or not tensor.is_contiguous():
            raise ValueError(
                f"The codec's kernels take contiguous tensors at multiples of {_ALIGNMENT} bytes, "
                f"found {list(tensor.shape)} with strides {tensor.stride()} at {address:#x}."
            )
        self._tensors.append(tensor)
        return address

    def _kv_cache_of(self, layer: int) -> int:
        """The address of a layer's keys and values of slot 0."""
        offset = layer * self.kv_cache.stride(1)
        return self.kv_cache.data_ptr() + offset * self.kv_cache.element_size()

    def _fill(self, struct: Activations, x: ActivationBuffer) -> None:
        """Fills a struct that is part of a kernel's parameters."""
        struct.data = self._address(x.data)
        struct.num_planes, struct.num_channels = x.planes, x.channels
        struct.history_rows, struct.rows_per_frame = x.history_rows, x.rows_per_frame
        if x.history_rows:
            self._structs_with_history.append((struct, x))

    def embed(self, weights: w.DecoderWeights, output: ActivationBuffer) -> None:
        """Appends the embedding of the codes and the rope table of the call."""
        stack = self._stack
        codebooks = codebook_tables(weights).contiguous()
        exponents = torch.arange(0, stack.head_dim, 2, device=self._device).float()
        frequencies = 1.0 / stack.rope_theta ** (exponents / stack.head_dim)
        params = EmbedParams(
            requests=self._address(self._requests),
            frames=self._address(self._frames),
            codebook_size=codebooks.shape[1],
            codebooks=self._address(codebooks),
            inverse_frequencies=self._address(frequencies),
            rope=self._address(self._rope),
            half_head_dim=stack.head_dim // 2,
        )
        self._fill(params.output, output)

        def launch(num_frames: int) -> None:
            params.num_frames = num_frames
            self._kernels.embed(params, [self._frames, self._rope, output.data])

        self._append(launch)

    def attend(self, layer: int, output: ActivationBuffer) -> None:
        """Appends the attention of a transformer layer."""
        params = AttentionParams(
            frames=self._address(self._frames),
            num_heads=self._stack.num_heads,
            head_dim=self._stack.head_dim,
            queries=self._address(self._queries),
            kv_cache=self._kv_cache_of(layer),
            kv_slot_stride=self.kv_cache.stride(0),
            kv_ring_size=self.ring_size,
        )
        self._fill(params.output, output)

        def launch(num_frames: int) -> None:
            params.num_frames = num_frames
            self._kernels.attend(params, [output.data])

        self._append(launch)

    def depthwise(
        self, x: ActivationBuffer, convnext: w.ConvNext, output: ActivationBuffer
    ) -> None:
        """Appends a depthwise convolution and its layer norm."""
        assert convnext.depthwise.bias is not None
        assert x.planes == 2
        params = DepthwiseParams(
            frames=self._address(self._frames),
            weights=self._address(convnext.depthwise.weight[:, 0].t().contiguous()),
            bias=self._address(convnext.depthwise.bias.clone()),  # an aligned allocation
            norm=self._address(torch.stack([convnext.norm.weight, convnext.norm.bias])),
            eps=_NORM_EPS,
        )
        self._fill(params.input, x)
        self._fill(params.output, output)

        def launch(num_frames: int) -> None:
            params.num_rows = num_frames * x.rows_per_frame
            self._layouts.choose(params.output, num_frames, writes_tiles=True)
            self._kernels.depthwise(params, [output.data])

        self._append(launch)

    def samples(self, x: ActivationBuffer, convolution: w.Conv) -> None:
        """Appends the last convolution, to one channel."""
        assert convolution.bias is not None
        assert x.planes == 1
        weights = packing.pad_last(convolution.weight[0].t())
        assert len(weights) == SAMPLE_TAPS
        params = SamplesParams(
            frames=self._address(self._frames),
            weights=self._address(weights.contiguous()),
            bias=convolution.bias.item(),
            pcm=self._address(self.pcm),
            non_finite=self._address(self.non_finite),
        )
        self._fill(params.input, x)

        def launch(num_frames: int) -> None:
            params.num_rows = num_frames * x.rows_per_frame
            self._kernels.samples(params, [x.data, self.pcm, self.non_finite])

        self._append(launch)

    def project(
        self,
        x: ActivationBuffer,
        packed: packing.Packed,
        output: ActivationBuffer | None = None,
        *,
        residual: Tensor | None = None,
        residual_out: Tensor | None = None,
        norm: bool = False,
        epilogue: Epilogue = Epilogue.LINEAR,
        layer: int = 0,
    ) -> None:
        """Appends a convolution or linear layer; see ProjectionParams in csrc/codec/params.cuh.

        Args:
            x: The input.
            packed: The weights.
            output: Receives the output, unless the epilogue writes elsewhere.
            residual: float32 [rows, columns], added before the epilogue.
            residual_out: float32 [rows, columns], the sum before the epilogue; may be `residual`.
            norm: Whether the input is divided by its root mean square.
            epilogue: The function applied to the sums.
            layer: Transformer layer whose KV cache is written (`ROPE_QKV`).
        """
        projection = self._projection(
            x,
            packed,
            output,
            residual=residual,
            residual_out=residual_out,
            norm=norm,
            epilogue=epilogue,
            layer=layer,
        )
        self._layouts.add_reader(projection)
        self._append(self._launch(projection))

    def residual_unit(
        self,
        x: ActivationBuffer,
        convolution: packing.Packed,
        middle: ActivationBuffer,
        pointwise: packing.Packed,
        output: ActivationBuffer,
        *,
        residual: Tensor,
        residual_out: Tensor | None,
        is_reversed: bool,
    ) -> None:
        """Appends a convolution and the one of one tap behind it, each followed by a snake.

        They are one launch where that takes less time; it does not write `middle`.

        Args:
            x: The input.
            convolution: The weights of the first convolution.
            middle: Receives its output.
            pointwise: The weights of the second one.
            output: Receives its output.
            residual: float32 [rows, columns], added before the last snake.
            residual_out: float32 [rows, columns], the sum before the last snake; may be `residual`.
            is_reversed: Whether one launch computes the last rows first.
        """
        first = self._projection(x, convolution, middle, epilogue=Epilogue.SNAKE)
        second = self._projection(
            middle,
            pointwise,
            output,
            residual=residual,
            residual_out=residual_out,
            epilogue=Epilogue.SNAKE,
        )
        weights = None
        columns = second.params.warpgroup_columns
        if columns and any(tile.columns == pointwise.num_columns for tile in RESIDUAL_UNIT_TILES):
            weights = self._address(packing.for_warpgroups(pointwise, columns, rows="registers"))
        unit = ResidualUnitLaunch(first, second, weights, is_reversed, self._kernels, self._layouts)
        self._layouts.add_reader(unit)
        separate = (self._launch(first, reader=second), self._launch(second))
        self.layers.append(LayerLaunches(self.stage, separate, unit.launch, unit.is_one_launch))

    def _projection(
        self,
        x: ActivationBuffer,
        packed: packing.Packed,
        output: ActivationBuffer | None = None,
        *,
        residual: Tensor | None = None,
        residual_out: Tensor | None = None,
        norm: bool = False,
        epilogue: Epilogue = Epilogue.LINEAR,
        layer: int = 0,
    ) -> ProjectionLaunch:
        """Builds a convolution or linear layer; the arguments are those of `project`."""
        assert packed.channels == x.channels
        assert packed.taps == 1 or x.history_rows, "a convolution needs the rows before the call"
        params = ProjectionParams(
            frames=self._address(self._frames),
            num_taps=packed.taps,
            dilation=packed.dilation,
            weights=self._address(packed.weights),
            column_params=self._address(packed.columns),
            num_columns=packed.num_columns,
            norm_channels=self._stack.hidden_size if norm else 0,
            eps=self._stack.norm_eps,
            residual=self._address(residual),
            residual_out=self._address(residual_out),
            epilogue=epilogue,
            rope=self._address(self._rope),
            queries=self._address(self._queries),
            kv_cache=self._kv_cache_of(layer),
            kv_slot_stride=self.kv_cache.stride(0),
            kv_ring_size=self.ring_size,
            head_dim=self._stack.head_dim,
        )
        self._fill(params.input, x)
        if output is not None:
            self._fill(params.output, output)
        params.num_k_splits = num_k_splits(params)
        if self._kernels.has_warpgroups:
            self._pack_for_warpgroups(params, packed)
        writes = [self._queries, self.kv_cache]
        if output is not None:
            writes.append(output.data)
        if residual_out is not None:
            writes.append(residual_out)
        return ProjectionLaunch(params, x.rows_per_frame, writes, self._kernels)

    def _launch(
        self, projection: ProjectionLaunch, *, reader: ActivationReader | None = None
    ) -> Launch:
        """The launch of a projection that is appended next.

        Args:
            projection: The projection.
            reader: As in `ActivationLayouts.choose`.
        """
        # The first kernel completes earlier calls, and writes the frames.
        overlap_previous = len(self.layers) > 1

        def launch(num_frames: int) -> None:
            params = projection.params_of(num_frames)
            tile = self._kernels.tile(params)
            is_one_row = params.num_columns == params.output.num_channels  # not of several
            writes_tiles = isinstance(tile, WarpgroupTile) and is_one_row
            self._layouts.choose(
                params.output, num_frames, writes_tiles=writes_tiles, reader=reader
            )
            self._kernels.project(
                params, tile, projection.writes, overlap_previous=overlap_previous
            )

        return launch

    def _pack_for_warpgroups(self, params: ProjectionParams, packed: packing.Packed) -> None:
        """Adds the weights for the tiles of sm_90a to a projection, if there are such tiles."""
        columns = warpgroup_columns(params)
        if columns == 0:
            return
        weights = packing.for_warpgroups(packed, columns, rows="shared memory")
        params.warpgroup_columns = columns
        params.warpgroup_weights = self._address(weights)
        params.warpgroup_column_params = self._address(packing.columns_for_warpgroups(packed))

    def _build_state_update(self) -> StateUpdateParams:
        num_layers = len(self.buffers.with_history)
        if num_layers > MAX_HISTORIES:
            raise ValueError(
                f"The codec's kernels take at most {MAX_HISTORIES} convolutions with history, "
                f"found {num_layers}; use the decoder in plain torch."
            )
        params = StateUpdateParams(
            frames=self._address(self._frames),
            num_kept_frames=self._address(self.num_kept_frames),
            num_layers=num_layers,
        )
        for i, x in enumerate(self.buffers.with_history):
            self._fill(params.activations[i], x)
            self._layouts.add_update(params.activations[i])
        return params
