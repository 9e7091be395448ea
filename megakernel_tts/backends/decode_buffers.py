"""The tensors that the decode kernels use, and the `Params` that hold their addresses."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.kernels.addresses import device_address, host_address
from megakernel_tts.backends.memory import MAX_FRAMES
from megakernel_tts.backends.weight_packing import Packer
from megakernel_tts.kernels.decode import DecodeKernels
from megakernel_tts.kernels.structs import (
    HEAD_DIM,
    MAX_CAPTURED_HEADS,
    NUM_CODE_GROUPS,
    Network,
    Params,
    Phase,
    PhaseInterval,
    StreamParams,
)
from megakernel_tts.model.config import ModelConfig, StackConfig
from megakernel_tts.model.weights import Model, Stack

FRAME_SIZE = 1 + NUM_CODE_GROUPS  # int32 values of a `PublishedFrame`: end reason, codes
PHASES = tuple(phase.name.lower() for phase in Phase if phase != Phase.NUM_PHASES)
PHASE_INTERVALS = tuple(
    interval.name.lower()
    for interval in PhaseInterval
    if interval != PhaseInterval.NUM_PHASE_INTERVALS
)


class DecodeBuffers:
    """Packed weights, KV caches, workspace and the memory that host and kernels share.

    Attributes:
        params: The argument of the kernels. What changes from launch to launch is set by the
            backend: streams, prompts, the timeout.
        keys: bfloat16 [pages, layers, kv heads, positions of a page, width].
        values: bfloat16 [pages, layers, kv heads, KV tiles of a page, positions of a tile * width].
        page_table: int32 [slots, pages of a slot at most].
        text: bfloat16 [slots, positions, hidden], text vectors.
        prompt_hidden: float32 [slots, hidden], the talker's last hidden state of each prompt.
        workspace: int32, what thread blocks exchange.
        scores: float32 [streams, MAX_FRAMES, captured heads, positions].
        phase_times: int64 [blocks, phases, intervals], cycles; written by the profiling build.
        frames: int32 [streams * MAX_FRAMES * FRAME_SIZE] on the host, written by the kernels.
        num_published: int32 [streams] on the host, frames that are there.
        stop_flags: int32 [streams] on the host, read by the kernels.
        failure: int32 [1] on the host: 0, after a timeout 1 + phase + len(PHASES) * thread block.
    """

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        pad: Tensor,
        kernels: DecodeKernels,
        *,
        num_slots: int,
        max_positions: int,
        num_pages: int,
        captured_heads: Sequence[tuple[int, int]],
    ) -> None:
        """Packs the weights, allocates the rest and fills `params`.

        Args:
            model: bfloat16 tensors; the embeddings are on the device, others may be on the host.
            config: The model's numbers.
            pad: [hidden], the text vector that represents "no text".
            kernels: The kernels.
            num_slots: Slots.
            max_positions: Positions of a slot at most.
            num_pages: Pages of the talker's KV cache.
            captured_heads: (layer, head) of the talker's heads whose scores are captured.

        Raises:
            ValueError: A tensor does not have the type or the place that the kernels expect, or a
                captured head does not exist.
        """
        self._device, self._kernels = pad.device, kernels
        self._references: list[Tensor] = []  # tensors whose addresses are in `params`
        self._written: list[Tensor] = []  # those of them that the kernels write
        self.params = Params()
        talker, predictor = config.talker, config.predictor
        info = kernels.info
        packer = Packer(kernels.num_blocks, info.stage_steps, info.max_row_groups, pad.device)
        hidden_size = talker.stack.hidden_size
        self.keys, self.values = self._allocate_pages(talker.stack, num_pages)
        self.page_table = self._zeros(num_slots, info.max_pages, dtype=torch.int32)
        predictor_cache = self._allocate_predictor_cache(predictor.stack, kernels.max_streams)
        rope_table = self._rope_table(talker.stack, max(max_positions, NUM_CODE_GROUPS))
        projection = model.predictor.project
        first = [] if projection is None else [projection.weight]
        self._set_network(
            self.params.talker,
            packer.pack(model.talker.stack),
            model.talker.stack,
            talker.stack,
            (self.keys, self.values),
            (num_slots, max_positions),
            rope_table,
        )
        self._set_network(
            self.params.predictor,
            packer.pack(*first, model.predictor.stack),
            model.predictor.stack,
            predictor.stack,
            predictor_cache,
            (kernels.max_streams, NUM_CODE_GROUPS),
            rope_table,
        )
        bf16 = torch.bfloat16
        self.text = self._zeros(num_slots, max_positions, hidden_size, dtype=bf16)
        self.prompt_hidden = self._zeros(num_slots, hidden_size)
        self.seen_codes = self._zeros(num_slots, talker.vocab_size, dtype=torch.uint8)
        self.workspace = self._zeros(kernels.num_workspace_values, dtype=torch.int32)
        self.phase_times = self._zeros(
            kernels.num_blocks, len(PHASES), len(PHASE_INTERVALS), dtype=torch.int64
        )
        params, address = self.params, self._address
        params.talker.page_table = address(self.page_table, torch.int32, "The page table")
        heads = torch.stack([packer.pack(head) for head in model.predictor.heads])
        bias = self._zeros(1, dtype=bf16) if projection is None else projection.bias
        params.talker_head = address(packer.pack(model.talker.head), bf16, "The packed head")
        params.predictor_heads = address(heads, bf16, "The packed heads")
        params.input_projection_bias = address(bias.to(pad.device), bf16, "The projection's bias")
        params.code_embedding = address(model.embeddings.codec, bf16, "The code embedding")
        for group, table in enumerate(model.embeddings.group_tables):
            params.group_embeddings[group] = address(
                table.contiguous(), bf16, f"The embedding of code group {group + 1}"
            )
        params.pad_vector = address(pad.clone(), bf16, "The padding vector")
        params.text_vectors = address(self.text, bf16, "The text vectors")
        params.prompt_hidden = address(self.prompt_hidden, torch.float32, "The hidden states")
        params.phase_times = address(self.phase_times, torch.int64, "The phase times")
        params.eos_id = talker.control.eos
        params.l2_resident_positions = kernels.l2_resident_positions(talker.stack)
        kernels.set_workspace(params, self.workspace)
        self.set_seen_codes(self.seen_codes)
        self._capture(captured_heads, talker.stack)
        self._share_with_host(kernels.max_streams)
        self._written += [self.keys, self.values, *predictor_cache, self.prompt_hidden]
        self._written += [self.scores, self.phase_times]

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _address(self, tensor: Tensor, dtype: torch.dtype, name: str) -> int:
        """The address of a tensor on the device, which stays alive."""
        self._references.append(tensor)
        return device_address(tensor, dtype, name, self._device)

    def _allocate_pages(self, stack: StackConfig, num_pages: int) -> tuple[Tensor, Tensor]:
        """The talker's keys, and its values in KV tiles; see the attributes."""
        info = self._kernels.info
        shape = (num_pages, stack.num_layers, stack.num_kv_heads)
        keys = self._zeros(*shape, info.page_size, info.kv_width, dtype=torch.bfloat16)
        kv_tile_width = info.kv_tile_size * info.kv_width
        return keys, torch.zeros_like(keys).view(*shape, -1, kv_tile_width)

    def _allocate_predictor_cache(
        self, stack: StackConfig, num_streams: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, each [layers, streams, kv heads, code groups, width]."""
        shape = (stack.num_layers, num_streams, stack.num_kv_heads, NUM_CODE_GROUPS)
        keys = self._zeros(*shape, self._kernels.info.kv_width, dtype=torch.bfloat16)
        return keys, torch.zeros_like(keys)

    def _rope_table(self, stack: StackConfig, num_positions: int) -> Tensor:
        """[positions, 64, 2]: cosine and sine of the rotary embedding."""
        channels = torch.arange(0, HEAD_DIM, 2, device=self._device).float()
        positions = torch.arange(num_positions, device=self._device).float()
        angle = positions[:, None] * (1.0 / stack.rope_theta ** (channels / HEAD_DIM))
        return torch.stack([angle.cos(), angle.sin()], dim=-1).contiguous()

    def _set_network(
        self,
        network: Network,
        weights: Tensor,
        stack: Stack,
        config: StackConfig,
        cache: tuple[Tensor, Tensor],
        slots: tuple[int, int],
        rope_table: Tensor,
    ) -> None:
        """Fills in a network; `slots` are their number and the positions of one."""
        bf16, (keys, values) = torch.bfloat16, cache
        vectors = ((w.input_norm, w.post_norm, w.q_norm, w.k_norm) for w in stack.layers)
        norms = torch.cat([vector for layer in vectors for vector in layer]).to(self._device)
        network.weights = self._address(weights, bf16, "The packed weights")
        network.layer_norms = self._address(norms, bf16, "The norms")
        network.final_norm = self._address(stack.norm.to(self._device), bf16, "The last norm")
        network.keys = self._address(keys, bf16, "The keys")
        network.values = self._address(values, bf16, "The values")
        network.num_layers = config.num_layers
        network.num_slots, network.num_positions = slots
        network.rope_table = self._address(rope_table, torch.float32, "The rope table")
        network.eps = config.norm_eps

    def _capture(self, heads: Sequence[tuple[int, int]], stack: StackConfig) -> None:
        """Names the heads whose scores are captured."""
        if len(heads) > MAX_CAPTURED_HEADS:
            raise ValueError(
                f"At most {MAX_CAPTURED_HEADS} heads can be captured, found {len(heads)}."
            )
        for layer, head in heads:
            if not (0 <= layer < stack.num_layers and 0 <= head < stack.num_heads):
                raise ValueError(
                    f"There is no head {head} of layer {layer}: the talker has "
                    f"{stack.num_layers} layers of {stack.num_heads} heads."
                )
        capture = self.params.attention_capture
        capture.num_heads = len(heads)
        for i, (layer, head) in enumerate(heads):
            capture.heads[i] = layer * stack.num_heads + head
        num_streams, num_positions = self._kernels.max_streams, self.params.talker.num_positions
        self.scores = self._zeros(num_streams, MAX_FRAMES, len(heads), num_positions)
        capture.scores = self._address(self.scores, torch.float32, "The scores")

    def _share_with_host(self, num_streams: int) -> None:
        """Allocates memory of the host that the kernels read and write."""
        params = self.params
        self.frames, params.published_frames = self._pinned(num_streams * MAX_FRAMES * FRAME_SIZE)
        self.num_published, params.num_published = self._pinned(num_streams)
        self.failure, params.failure = self._pinned(1)
        self._written += self._references[-3:]
        self.stop_flags, params.stop_flags = self._pinned(num_streams)

    def _pinned(self, count: int) -> tuple[NDArray[np.int32], int]:
        """int32 values, and their address. NumPy reads them: a finaliser may not call torch."""
        tensor = torch.zeros(count, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._references.append(tensor)
        return tensor.numpy(), host_address(tensor, torch.int32, "A frame buffer", self._device)

    def set_seen_codes(self, seen_codes: Tensor) -> None:
        """Replaces the table of sampled codes.

        Args:
            seen_codes: uint8 [slots, vocab]: 1 for ids of code 0 that a slot's stream has sampled.
        """
        self.seen_codes = seen_codes
        self.params.seen_codes = device_address(
            seen_codes, torch.uint8, "The seen codes", self._device
        )

    def table(self, num_streams: int, num_frames: int) -> NDArray[np.int32]:
        """A launch's frames [streams, frames, FRAME_SIZE]."""
        return self.frames[: num_streams * num_frames * FRAME_SIZE].reshape(
            num_streams, num_frames, -1
        )

    def written_tensors(self) -> list[Tensor]:
        """What the kernels write, beside the workspace."""
        return [*self._written, self.seen_codes]

    def upload(self, host: Tensor) -> Tensor:
        """A copy on the device; from pinned memory, so that the host does not wait for it."""
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)

    def upload_page_table(self, table: NDArray[np.int32]) -> None:
        """Replaces the page table on the device, behind the launches before."""
        host = torch.from_numpy(table)
        if self._device.type == "cuda":
            # A copy, since the host may change the table before the GPU reads it.
            host = host.pin_memory()
        self.page_table.copy_(host, non_blocking=True)

    def upload_streams(self, streams: Sequence[StreamParams]) -> Tensor:
        """Copies streams to the device.

        Args:
            streams: The streams of a launch.

        Returns:
            Their memory, which must live until the kernel has been launched.
        """
        host = (StreamParams * len(streams))(*streams)
        return self.upload(torch.frombuffer(host, dtype=torch.uint8))
