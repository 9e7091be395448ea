"""The megakernel behind the backend's protocol.

The host holds the state of every stream. A launch receives it as an argument, and publishes its
frames in pinned memory.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.devices import wait_for_event
from megakernel_common.inference import in_inference_mode
from megakernel_tts.backends.decode_buffers import PHASES, DecodeBuffers
from megakernel_tts.backends.kernel_slot import KernelSlot, new_stream
from megakernel_tts.backends.memory import MAX_FRAMES, choose_num_pages, decode_memory, free_memory
from megakernel_tts.backends.paged_cache import PagedCache
from megakernel_tts.backends.prefill_batching import (
    PromptRange,
    chunk_end,
    fill_batches,
    num_tiled_positions,
    pack_batches,
    pack_wide_batches,
)
from megakernel_tts.backends.prefix_cache import PrefixCache
from megakernel_tts.backends.prompt_uploads import PromptUploads
from megakernel_tts.backends.protocol import (
    LOW_LATENCY_STREAMS,
    Frames,
    PendingCodes,
    PrefillRequest,
    PrefillResult,
)
from megakernel_tts.backends.score_capture import ScoreCapture
from megakernel_tts.backends.slot_snapshot import SlotSnapshot, restore_snapshot, take_snapshot
from megakernel_tts.backends.text_uploads import TextUploads
from megakernel_tts.errors import DeviceError
from megakernel_tts.kernels.decode import DecodeKernels, check_shapes, load_decode_kernels
from megakernel_tts.kernels.structs import (
    NUM_CODE_GROUPS,
    EndReason,
)
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.weights import Model

_TIMEOUT_NS = 2_000_000_000  # that a thread block waits for another
_EOS, _NON_FINITE = int(EndReason.EOS), int(EndReason.NON_FINITE)
_POLL_INTERVAL_S = 5e-4  # between polls of a launch with more than one frame to go


class Megakernel:
    """A `Backend` that generates frames with one kernel launch for all streams."""

    name = "megakernel"
    blocking = False

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        pad: Tensor,
        *,
        num_slots: int,
        max_positions: int,
        cache_positions: int | None = None,
        captured_heads: Sequence[tuple[int, int]] = (),
        kernels: DecodeKernels | None = None,
    ) -> None:
        """Packs the weights and allocates the slots.

        Args:
            model: bfloat16 tensors, the embeddings on the device. Other tensors may be on the
                host: each matrix is packed on the device, and the original is not kept.
            config: The model's numbers.
            pad: [hidden], the text vector that represents "no text".
            num_slots: Streams at a time.
            max_positions: Positions of one stream, at most 2,048.
            cache_positions: Positions of all streams together; by default what all slots can use,
                or as many as fit into the GPU's memory.
            captured_heads: (layer, head) of up to eight of the talker's heads, whose attention
                scores `step` returns; the codes stay the same.
            kernels: The kernels of the model; by default compiled for the device, or cached.

        Raises:
            RuntimeError: The kernels cannot be compiled here.
            ValueError: They cannot be compiled for the model, or this GPU cannot run or hold it.
        """
        check_shapes(config)
        self._kernels = kernels or load_decode_kernels(config, pad.device, num_streams=num_slots)
        self._kernels.check_gpu(config)
        self.num_slots, self.max_positions = num_slots, max_positions
        self._config, self._device = config, pad.device
        info = self._kernels.info
        self.max_streams = self._kernels.max_streams
        self._narrow_limit = self._kernels.narrow_limit
        # Positions of a prompt's first tile, and of its other ones.
        self._tile_sizes = info.max_streams, info.max_prefill_columns
        num_pages = choose_num_pages(
            decode_memory(config, self._kernels, num_slots, max_positions, len(captured_heads)),
            num_slots=num_slots,
            max_positions=max_positions,
            page_size=info.page_size,
            cache_positions=cache_positions,
            free_bytes=free_memory(self._device),
        )
        self._buffers = DecodeBuffers(
            model,
            config,
            pad,
            self._kernels,
            num_slots=num_slots,
            max_positions=max_positions,
            num_pages=num_pages,
            captured_heads=captured_heads,
        )
        self._cache = PagedCache(self._buffers, info, max_positions)
        hidden_size = config.talker.stack.hidden_size
        self._prompt_uploads = PromptUploads(self._device, hidden_size, info.small_prefill_columns)
        self._text_uploads = TextUploads(self._buffers.text, self._buffers.upload)
        self._capture = ScoreCapture(self._buffers.scores)
        self._done = torch.cuda.Event() if self._device.type == "cuda" else None
        self._prefixes = PrefixCache()
        self._state: dict[int, KernelSlot] = {}

    @in_inference_mode
    def prepare(self) -> None:
        """Copies the page table to the device once more; see `Backend.prepare`."""
        self._cache.upload_table(again=True)

    def reserve(self, slot: int, num_positions: int, *, beginning: bool = False) -> bool:
        """Assigns pages of the KV cache to a slot; see `Backend.reserve`."""
        return self._cache.reserve(slot, num_positions, beginning=beginning)

    @in_inference_mode
    def prefill(
        self, requests: Sequence[PrefillRequest], budget: int | None = None
    ) -> PrefillResult:
        """Launches the prompts without waiting; see `Backend.prefill`.

        Prefixes that are not cached run first, in a launch of their own, because other prompts may
        begin with them. The rest of all prompts follows together.
        """
        for request in requests:
            self._check_prompt(request)
        for request in requests:
            self._cache.require(request.slot, request.num_positions)
        in_place, num_run = self._prepare_prefixes(requests, budget)
        chunks: list[PromptRange] = []
        for i, request in enumerate(requests):
            begin, length = in_place[i], request.num_positions
            if begin >= self._num_tiled(request):
                end = self._chunk_end(begin, length, num_run, budget)
                chunks.append(PromptRange(request.slot, request.prompt, begin, end))
                in_place[i], num_run = end, num_run + end - begin
        self._launch_prompts([chunk for chunk in chunks if chunk.end > chunk.begin])
        for request, end in zip(requests, in_place, strict=True):
            if end == request.num_positions:
                stream = new_stream(request.sampling.in_float32(), request.first_frame)
                codes = [0] * NUM_CODE_GROUPS
                self._text_uploads.drop(request.slot)
                self._state[request.slot] = KernelSlot(num_prompt=end, codes=codes, stream=stream)
        return PrefillResult(in_place, num_run)

    def _num_tiled(self, request: PrefillRequest) -> int:
        """Returns how many common positions, in whole prompt tiles, the prefix cache may hold."""
        return num_tiled_positions(request.num_common, *self._tile_sizes)

    def _chunk_end(self, begin: int, end: int, num_run: int, budget: int | None) -> int:
        """Returns where the prefill chunk ends that begins after `num_run` positions ran."""
        if budget is None:
            return end
        if num_run >= max(budget, 1):
            return begin
        return chunk_end(begin, end, budget - num_run, *self._tile_sizes)

    def _check_prompt(self, request: PrefillRequest) -> None:
        hidden_size, prompt = self._config.talker.stack.hidden_size, request.prompt
        if not 0 <= request.slot < self.num_slots:
            raise ValueError(f"There is no slot {request.slot} among {self.num_slots}.")
        if prompt.dim() != 2 or prompt.shape[1] != hidden_size or not prompt.is_cpu:
            raise ValueError(
                f"A prompt must be [positions, {hidden_size}] on the host, found "
                f"{[*prompt.shape]} on {prompt.device}."
            )
        if prompt.dtype != torch.bfloat16:
            raise ValueError(f"A prompt must be of type bfloat16, found {prompt.dtype}.")
        if not prompt.is_contiguous():
            raise ValueError(f"A prompt must be contiguous, found strides {prompt.stride()}.")
        request.check(self.max_positions)

    def _prepare_prefixes(
        self, requests: Sequence[PrefillRequest], budget: int | None
    ) -> tuple[list[int], int]:
        """Puts the keys and values of common prefixes in place: cached, copied, or launched now.

        Returns:
            The number of positions of each prompt that are in place, and how many were launched.
        """
        in_place = [request.begin for request in requests]
        counts = [self._num_tiled(request) for request in requests]
        keys: dict[int, bytes] = {}  # of the requests whose prefix is not in place
        cached: dict[bytes, tuple[Tensor, ...] | None] = {}
        for i, request in enumerate(requests):
            if request.begin < counts[i]:
                keys[i] = key = request.prefix_key(counts[i])
                cached[key] = self._prefixes.get(key)
            elif not request.begin:
                self._cache.drop_prefix(request.slot)
        new: dict[bytes, int] = {}  # the request whose prefix is run, or a chunk of it
        chunks: list[PromptRange] = []
        num_run = 0
        for i, key in keys.items():
            slot, prompt = requests[i].slot, requests[i].prompt
            if cached[key] is None and key not in new:
                new[key] = i
                end = self._chunk_end(in_place[i], counts[i], num_run, budget)
                chunks.append(PromptRange(slot, prompt, in_place[i], end))
                in_place[i], num_run = end, num_run + end - chunks[-1].begin
            if cached[key] is None or not self._cache.has_prefix(slot, key):
                self._cache.drop_prefix(slot)
        self._launch_prompts([chunk for chunk in chunks if chunk.end > chunk.begin])
        for key, i in new.items():
            if in_place[i] == counts[i]:
                slot = requests[i].slot
                cached[key] = self._prefixes.put(key, self._cache.views(slot, counts[i]))
                self._cache.set_prefix(slot, key, counts[i])
        for i, key in keys.items():
            slot, copies = requests[i].slot, cached[key]
            if copies is None:
                continue
            in_place[i] = counts[i]
            if not self._cache.has_prefix(slot, key):
                for view, copy in zip(self._cache.views(slot, counts[i]), copies, strict=True):
                    view.copy_(copy)
                self._cache.set_prefix(slot, key, counts[i])
        return in_place, num_run

    def _launch_prompts(self, chunks: Sequence[PromptRange]) -> None:
        """Launches prefill chunks; does not wait."""
        if not chunks:
            return
        sizes = self._tile_sizes
        narrow = fill_batches(chunks, *sizes, self._kernels.info.max_prefill_columns)
        wide, wide_columns = narrow, self._kernels.max_wide_prefill_columns
        if wide_columns and len(narrow) > 1:
            wide = fill_batches(chunks, *sizes, wide_columns, wide=True)
        buffers, kernels = self._buffers, self._kernels
        params, workspace, written = buffers.params, buffers.workspace, buffers.written_tensors()
        self._cache.upload_table()
        params.timeout_ns = _TIMEOUT_NS
        if len(wide) < len(narrow):
            wide_batches = pack_wide_batches(wide)
            uploaded = self._prompt_uploads.upload(wide, wide_batches)
            params.prompt_vectors = uploaded.vectors
            kernels.prefill_wide(params, uploaded.batches, wide_batches, workspace, written)
        else:
            batches = pack_batches(narrow)
            uploaded = self._prompt_uploads.upload(narrow, batches)
            params.prompt_vectors, params.prefill_batches = uploaded.vectors, uploaded.batches
            end = max(chunk.end for chunk in chunks)
            kernels.prefill(params, batches, end, workspace, written)

    def clear_prefix_cache(self) -> None:
        """Drops the cached prefixes; see `Backend.clear_prefix_cache`."""
        self._prefixes.clear()
        self._cache.drop_prefixes()

    def feed(self, slot: int, text: Tensor, text_complete: bool) -> None:
        """Queues text vectors; see `Backend.feed`."""
        state = self._state[slot]
        count = min(text.shape[0], self.max_positions - state.num_fed)
        if count:
            self._text_uploads.add(slot, state.num_fed, text[:count])
        state.num_fed += count
        state.text_complete = text_complete

    def release(self, slot: int) -> None:
        """Drops the stream's state; see `Backend.release`."""
        self._state.pop(slot, None)
        self._text_uploads.drop(slot)
        self._cache.release(slot)

    def interrupt(self) -> None:
        """Ends a launch with the frame under way; see `Backend.interrupt`."""
        self._buffers.stop_flags[:] = 1

    def clear_interrupt(self) -> None:
        """Clears interruptions; see `Backend.clear_interrupt`."""
        self._buffers.stop_flags[:] = 0

    @in_inference_mode
    def step(
        self,
        slots: Sequence[int],
        num_frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        """Generates frames for each slot; see `Backend.step`."""
        for slot in slots:
            self._state[slot].check(slot, self.max_positions)
        generated: list[NDArray[np.int64]] = []
        scores: list[Tensor | None] = []
        seen_codes = self._buffers.seen_codes.clone()  # the kernel marks every code it samples
        num_frames = min(num_frames, MAX_FRAMES)
        try:
            for start in range(0, len(slots), self.max_streams):
                launched = slots[start : start + self.max_streams]
                num_frames = self._launch(launched, num_frames)
                report = partial(self._report_pending, on_last_frame, slots, num_frames)
                if num_frames == 1:  # the last frame is under way
                    report()
                if start == 0:
                    overlap()
                self._wait(num_frames, report if num_frames > 1 else lambda: None)
                self._prompt_uploads.reuse()
                generated += self._collect(len(launched), num_frames)
                scores += self._scores(launched, num_frames)
        except Exception:
            self._buffers.set_seen_codes(seen_codes)
            raise
        return [
            self._update(self._state[slot], codes, captured)
            for slot, codes, captured in zip(slots, generated, scores, strict=True)
        ]

    def _launch(self, slots: Sequence[int], num_frames: int) -> int:
        """Launches frames and returns how many: as far as there are pages; does not wait."""
        buffers = self._buffers
        params = buffers.params
        num_positions = {slot: self._state[slot].num_positions for slot in slots}
        num_frames = self._cache.prepare_frames(num_positions, num_frames)
        needs_text = num_frames > 1 or any(self._state[slot].num_frames for slot in slots)
        # The prompts of many streams run on the device for longer than the copy takes the host.
        if needs_text or len(slots) > LOW_LATENCY_STREAMS:
            self._text_uploads.flush()
        buffers.num_published[:] = 0
        params.num_streams, params.max_frames = len(slots), num_frames
        params.timeout_ns = _TIMEOUT_NS
        streams = [self._state[slot].update(slot, self.max_positions) for slot in slots]
        if len(slots) <= self._narrow_limit:
            for i, stream in enumerate(streams):
                params.streams[i] = stream
            self._kernels.generate(params, buffers.workspace, buffers.written_tensors())
        else:
            uploaded = buffers.upload_streams(streams)
            self._kernels.generate_wide(
                params, uploaded.data_ptr(), buffers.workspace, buffers.written_tensors()
            )
        if self._capture.enabled:  # right behind the launch, before other work of the stream
            self._capture.start_copy(len(slots), num_frames)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))
        return num_frames

    def _report_pending(
        self,
        on_last_frame: Callable[[PendingCodes], object],
        slots: Sequence[int],
        num_frames: int,
    ) -> None:
        """Passes on where the codes will be, unless another launch of the step overwrites them."""
        if len(slots) <= self.max_streams:
            on_last_frame([*self._buffers.table(len(slots), num_frames)[:, :, 1:]])

    def _wait(self, num_frames: int, on_last_frame: Callable[[], object] = lambda: None) -> None:
        """Waits for the launch; calls `on_last_frame` while the last frame is generated.

        The host polls while more than a frame is left. It spins for the last one, if that is of few
        streams: their frames are short, and so is the time to their first audio.
        """
        if self._done is None:
            on_last_frame()
            return
        while self._buffers.num_published.max() < num_frames - 1 and not self._done.query():
            time.sleep(_POLL_INTERVAL_S)
        if not self._done.query():
            on_last_frame()
        num_streams = self._buffers.params.num_streams
        wait_for_event(self._done, spinning=num_streams <= LOW_LATENCY_STREAMS)

    def _collect(self, num_streams: int, num_frames: int) -> list[NDArray[np.int64]]:
        """Each stream's frames [published, 1 + code groups]: the end reason, the codes."""
        buffers = self._buffers
        if buffers.failure[0]:
            block, phase = divmod(int(buffers.failure[0]) - 1, len(PHASES))
            buffers.failure[:] = 0
            self.clear_prefix_cache()  # the launch that failed may have been that of a prompt
            raise DeviceError(
                f"The kernel timed out: thread block {block} waited {_TIMEOUT_NS / 1e9:g} s for "
                f"values or weights of the phase {PHASES[phase]}. Another program may hold the "
                "GPU; if none does, see docs/where-to-change.md, a launch that timed out."
            )
        counts = buffers.num_published[:num_streams]
        table = buffers.table(num_streams, num_frames).astype(np.int64)  # one copy for all streams
        is_published = np.arange(num_frames) < counts[:, None]
        if (is_published & (table[:, :, 0] == _NON_FINITE)).any():
            raise FloatingPointError("The logits are not finite; try dtype='float32'.")
        return [rows[:count] for rows, count in zip(table, counts.tolist(), strict=True)]

    def _scores(self, slots: Sequence[int], num_frames: int) -> list[Tensor | None]:
        """The captured heads' scores of each stream [frames, heads, positions]."""
        if not self._capture.enabled:
            return [None] * len(slots)
        return [
            self._state[slot].mask_scores(rows, self.max_positions)
            for slot, rows in zip(slots, self._capture.rows(len(slots), num_frames), strict=True)
        ]

    def _update(
        self, state: KernelSlot, frames: NDArray[np.int64], scores: Tensor | None
    ) -> Frames:
        """Advances a stream by its frames, and returns them."""
        end_reason, *state.codes = frames[-1].tolist()
        state.num_frames += len(frames)
        ended = end_reason == _EOS
        count = len(frames) - ended
        captured = None if scores is None else scores[:count]
        return Frames(torch.from_numpy(frames[:count, 1:]), ended, captured)

    def _slot_views(self, slot: int, state: KernelSlot) -> list[Tensor]:
        """A slot's parts of the buffers, as far as its stream has filled them."""
        return [
            *self._cache.views(slot, state.num_positions),
            self._buffers.text[slot, : state.num_fed],
            self._buffers.seen_codes[slot],
            self._buffers.prompt_hidden[slot],
        ]

    @in_inference_mode
    def swap_out(self, slot: int) -> SlotSnapshot[KernelSlot]:
        """Copies a stream to the host and frees its slot; see `Backend.swap_out`."""
        state = self._state[slot]
        self._text_uploads.flush()
        snapshot = take_snapshot(state, self._slot_views(slot, state))
        self.release(slot)
        return snapshot

    @in_inference_mode
    def swap_in(self, slot: int, snapshot: SlotSnapshot[KernelSlot]) -> None:
        """Copies a stream back into a slot; see `Backend.swap_in`."""
        state = snapshot.state
        self._cache.require(slot, state.num_positions)
        self._cache.drop_prefix(slot)
        self._state[slot] = restore_snapshot(snapshot, self._slot_views(slot, state))
