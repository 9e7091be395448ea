"""The megakernel behind the backend's protocol.

Host state is the authority: each launch is given its streams, and tells the frames that it made
through pinned memory.
"""

import math
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.backends.prefill_batching import PrefillSegment, pack_passes, whole_tiles
from megakernel_tts.backends.prefix_cache import PrefixCache
from megakernel_tts.backends.protocol import Frames, PendingCodes, PrefillRequest, SlotProgress
from megakernel_tts.backends.slot_snapshot import SlotSnapshot, restore_snapshot, take_snapshot
from megakernel_tts.backends.weight_packing import Packer
from megakernel_tts.errors import DeviceError
from megakernel_tts.model.config import ModelConfig, StackConfig
from megakernel_tts.model.weights import Model, Stack
from megakernel_tts.sampling import Sampling

_GROUPS = 16
_HEAD = 128
_BLOCK = 16  # positions whose values lie together
_STREAM = struct.Struct("=7i16i3If" + 2 * "fif")  # Stream in csrc/params.cuh
_EOS, _BROKEN = 1, 4
_SEEN, _SCORES = 6, 8  # places in the list of memory, as in csrc/ops.cpp
_FRAMES = 32  # of a stream, at most, that one launch makes
_PATIENCE = 2_000_000_000  # nanoseconds that a block waits for another
_DOZE = 5e-4  # seconds between two glances at a launch that has more than a frame to make
_LOOK = 20_000_000  # nanoseconds that the host looks for the end of a frame before it sleeps
PHASES = (
    "qkv", "attention", "attention_combine", "out", "gate_up", "down", "head", "sample",
    "input_projection",
)  # fmt: skip


@dataclass(kw_only=True)
class _Slot(SlotProgress):
    sampling: Sampling
    first_frame: int
    codes: list[int]  # of the last frame


class Megakernel:
    """A `Backend` whose frames are made by one kernel launch."""

    name = "megakernel"

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        pad: Tensor,
        *,
        num_slots: int,
        max_positions: int,
        captured_heads: Sequence[tuple[int, int]] = (),
        ops: Any = None,
    ) -> None:
        """Packs the weights and allocates the slots.

        Args:
            model: bfloat16 tensors, the embeddings on the device. The others may be on the host:
                they are packed matrix by matrix, and not kept.
            config: The model's numbers.
            pad: [hidden], the text vector that stands for "no text".
            num_slots: Streams at a time.
            max_positions: The most positions of one stream, up to 2,048.
            captured_heads: (layer, head) of up to eight of the talker's heads, whose attention
                scores `step` returns; the codes stay the same.
            ops: The kernel's operators; by default those of csrc/ops.cpp, built if need be.

        Raises:
            RuntimeError: The kernel cannot be built here.
            ValueError: It is not compiled for these shapes.
        """
        self._ops = _built_ops(pad.device) if ops is None else ops
        self.num_slots, self.max_positions = num_slots, max_positions
        talker, predictor = config.talker, config.predictor
        self._config, self._device = config, pad.device
        self._model = self._find_model(config)
        *_, slot, units, columns, self._wide, self._key_width = self._ops.shape(self._model)
        packer = Packer(self._ops.blocks(self._model), slot, units, pad.device)
        pack = packer.pack
        self._columns = columns
        self._captured_heads = [
            layer * talker.stack.num_heads + head for layer, head in captured_heads
        ]
        self._kept: list[Tensor] = []
        wide, device = talker.stack.hidden_size, pad.device
        embeddings = model.embeddings
        self._text = torch.zeros(num_slots, max_positions, wide, dtype=pad.dtype, device=device)
        self._seen = torch.zeros(num_slots, talker.vocab_size, dtype=torch.uint8, device=device)
        self._hidden = torch.zeros(num_slots, wide, device=device)
        self._keys, self._values = self._cache(talker.stack, num_slots, max_positions)
        empty = torch.zeros(1, dtype=pad.dtype, device=device)
        project = model.predictor.project
        first = [] if project is None else [project.weight]
        self._weights = [
            pack(model.talker.stack),
            pack(*first, model.predictor.stack),
            self._norms(model.talker.stack),
            self._norms(model.predictor.stack),
            model.talker.stack.norm.to(device),
            model.predictor.stack.norm.to(device),
            pack(model.talker.head),
            torch.stack([pack(head) for head in model.predictor.heads]),
            embeddings.codec,
            self._addresses(embeddings.group_tables),
            pad.clone(),
            self._turns(talker.stack, max(max_positions, _GROUPS)),
            empty if project is None else project.bias.to(device),
        ]
        words = self._ops.workspace_words(self._model)
        self._memory = [
            self._keys,
            self._values,
            *self._cache(predictor.stack, columns, _GROUPS),
            self._text,
            self._hidden,
            self._seen,
            torch.zeros(words, dtype=torch.int32, device=device),
            torch.zeros(
                columns, _FRAMES, len(self._captured_heads), self._keys.shape[3], device=device
            ),
            torch.zeros(packer.blocks, len(PHASES), 3, dtype=torch.int64, device=device),
        ]
        mail = [columns * _FRAMES * (1 + _GROUPS), columns, columns, 3]
        self._mailbox = [self._mail(words) for words in mail]
        # What lies in memory is read and written without torch, which a finaliser may not call.
        self._frames, self._published, self._stop, self._failure = (
            mail.numpy() for mail in self._mailbox
        )
        self._told = self._mail(self._memory[_SCORES].numel()).view(torch.float32)
        self._done = torch.cuda.Event(blocking=True) if device.type == "cuda" else None
        self._prefixes = PrefixCache()
        self._state: dict[int, _Slot] = {}

    def _mail(self, words: int) -> Tensor:
        """Memory of the host that the kernel writes and reads, too."""
        pinned = self._device.type == "cuda"
        return torch.zeros(words, dtype=torch.int32, pin_memory=pinned)

    def _find_model(self, config: ModelConfig) -> int:
        """The compiled model of these shapes."""
        stacks = (config.talker.stack, config.predictor.stack)
        if len({(s.rope_theta, s.norm_eps) for s in stacks}) > 1:
            raise ValueError(
                f"The kernel takes one rope_theta and one rms_norm_eps for talker and predictor, "
                f"found {[(s.rope_theta, s.norm_eps) for s in stacks]}; use dtype='float32' for "
                "plain torch."
            )
        wanted = [
            n
            for s in stacks
            for n in (s.hidden_size, s.num_heads, s.num_kv_heads, s.intermediate_size)
        ]
        wanted += [config.talker.num_codes, config.talker.num_groups, *(s.head_dim for s in stacks)]
        fixed = [_GROUPS, _HEAD, _HEAD]
        compiled = [[*self._ops.shape(i)[:9], *fixed] for i in range(self._ops.models())]
        if wanted not in compiled:
            raise ValueError(
                f"The kernel is not compiled for the shapes {wanted}, only for {compiled}; add "
                "them to csrc/shapes.cuh, or use dtype='float32' for plain torch."
            )
        return compiled.index(wanted)

    def _cache(self, c: StackConfig, num_slots: int, max_positions: int) -> tuple[Tensor, Tensor]:
        """Keys [layers, slots, kv heads, positions, width]; values by blocks of 16 positions."""
        blocks = -(-max_positions // _BLOCK)
        shape = (c.num_layers, num_slots, c.num_kv_heads, blocks * _BLOCK, self._key_width)
        keys = torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        return keys, torch.zeros_like(keys).view(*shape[:3], blocks, _BLOCK * self._key_width)

    def _addresses(self, tensors: Sequence[Tensor]) -> Tensor:
        """[n], where tensors lie, which the kernel is told at each launch."""
        kept = [t.contiguous() for t in tensors]
        self._kept += kept
        return torch.tensor([t.data_ptr() for t in kept])

    def _norms(self, stack: Stack) -> Tensor:
        """All layers' vectors, in the order of `Network.norms` in csrc/params.cuh."""
        vectors = ((w.input_norm, w.post_norm, w.q_norm, w.k_norm) for w in stack.layers)
        return torch.cat([vector for layer in vectors for vector in layer]).to(self._device)

    def _turns(self, c: StackConfig, positions: int) -> Tensor:
        """[positions, 64, 2]: cosine and sine of the rotary embedding."""
        inverse = 1.0 / c.rope_theta ** (
            torch.arange(0, _HEAD, 2, device=self._device).float() / _HEAD
        )
        angle = torch.arange(positions, device=self._device).float()[:, None] * inverse
        return torch.stack([angle.cos(), angle.sin()], dim=-1).contiguous()

    @torch.inference_mode()
    def prefill(self, starts: Sequence[PrefillRequest]) -> None:
        """Runs the prompts, which nobody waits for; see `Backend.prefill`.

        Prefixes that no prompt had before come first, in a launch of their own: others may begin
        with them. Then all the rest together.
        """
        for start in starts:
            start.check(self.max_positions)
        begins = self._begin_with_common(starts)
        self._run_prompts(
            [
                PrefillSegment(start.slot, start.prompt, begin, len(start.prompt))
                for start, begin in zip(starts, begins, strict=True)
            ]
        )
        for start in starts:
            self._state[start.slot] = _Slot(
                num_prompt=len(start.prompt),
                sampling=start.sampling.in_float32(),
                first_frame=start.first_frame,
                codes=[0] * _GROUPS,
            )

    def _begin_with_common(self, starts: Sequence[PrefillRequest]) -> list[int]:
        """Sees to the common positions' keys and values: whole passes, run, copied, or in place.

        Returns:
            How many positions of each prompt are there.
        """
        counts = [whole_tiles(start.num_common, self._columns, self._wide) for start in starts]
        keys = [start.prefix_key(count) for start, count in zip(starts, counts, strict=True)]
        known = {key: self._prefixes.get(key) for key in keys}
        new: dict[bytes, PrefillSegment] = {}
        for start, count, key in zip(starts, counts, keys, strict=True):
            if count and known[key] is None and key not in new:
                new[key] = PrefillSegment(start.slot, start.prompt, 0, count)
            if known[key] is None or not self._prefixes.is_in_place(start.slot, key):
                self._prefixes.invalidate(start.slot)
        self._run_prompts([*new.values()])
        for key, part in new.items():
            known[key] = self._prefixes.put(key, self._remembered(part.slot, part.end))
            self._prefixes.mark_in_place(part.slot, key)
        for start, count, key in zip(starts, counts, keys, strict=True):
            kept = known[key]
            if kept is None or self._prefixes.is_in_place(start.slot, key):
                continue
            for part, copy in zip(self._remembered(start.slot, count), kept, strict=True):
                part.copy_(copy)
            self._prefixes.mark_in_place(start.slot, key)
        return counts

    def _run_prompts(self, parts: Sequence[PrefillSegment]) -> None:
        """Has the kernel run parts of prompts; the host waits for nothing."""
        if parts:
            rows, passes = pack_passes(parts, self._columns, self._wide)
            self._ops.prefill(self._model, *self._lists(), rows, passes)

    def _upload(self, host: Tensor) -> Tensor:
        """A copy on the device; from pinned memory, or the host would wait for it."""
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)

    def clear_prefix_cache(self) -> None:
        """Drops what it keeps of prompts; see `Backend.clear_prefix_cache`."""
        self._prefixes.clear()

    @torch.inference_mode()
    def feed(self, slot: int, text: Tensor, last: bool) -> None:
        """Queues text vectors; see `Backend.feed`."""
        state = self._state[slot]
        text = text[: self.max_positions - state.num_fed]
        if len(text):
            self._text[slot, state.num_fed : state.num_fed + len(text)] = self._upload(text)
        state.num_fed += len(text)
        state.text_ended = last

    def release(self, slot: int) -> None:
        """Forgets the stream; see `Backend.release`."""
        self._state.pop(slot, None)

    def interrupt(self) -> None:
        """Ends a launch with the frame at hand; see `Backend.interrupt`."""
        self._stop[:] = 1

    def clear_interrupt(self) -> None:
        """Takes interruptions back; see `Backend.clear_interrupt`."""
        self._stop[:] = 0

    @torch.inference_mode()
    def step(
        self,
        slots: Sequence[int],
        frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        """Some frames for each slot; see `Backend.step`."""
        for slot in slots:
            self._state[slot].check(slot, self.max_positions)
        made: list[NDArray[np.int64]] = []
        scores: list[Tensor | None] = []
        seen = self._seen.clone()  # what the kernel draws, it marks at once
        try:
            for start in range(0, len(slots), self._columns):
                some, count = slots[start : start + self._columns], min(frames, _FRAMES)
                self._launch(some, count)
                if start == 0:
                    overlap()
                self._wait(count, partial(self._tell, on_last_frame, slots, count))
                made += self._collect(len(some), count)
                scores += self._scores(some, count)
        except Exception:
            self._seen = self._memory[_SEEN] = seen
            raise
        return [
            self._take(self._state[slot], codes, told)
            for slot, codes, told in zip(slots, made, scores, strict=True)
        ]

    def _launch(self, slots: Sequence[int], frames: int) -> None:
        """Has the kernel make frames; the host waits for nothing."""
        self._published[:] = 0
        streams = self._streams(slots)
        self._ops.generate(self._model, *self._lists(), streams, frames, self._captured_heads)
        if (
            self._captured_heads
        ):  # now: what others give the device comes behind, and takes its time
            told = len(slots) * frames * len(self._captured_heads) * self._keys.shape[3]
            self._told[:told].copy_(self._memory[_SCORES].flatten()[:told], non_blocking=True)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))

    def _tell(
        self, on_last_frame: Callable[[PendingCodes], object], slots: Sequence[int], frames: int
    ) -> None:
        """Where codes are coming, if no other launch of the step writes to the same place."""
        if len(slots) <= self._columns:
            on_last_frame([*self._table(len(slots), frames)[:, :, 1:]])

    def _table(self, columns: int, frames: int) -> NDArray[np.int32]:
        """A launch's frames [columns, frames, 1 + groups]: why each is over, and its codes."""
        return self._frames[: columns * frames * (1 + _GROUPS)].reshape(columns, frames, -1)

    def _wait(self, frames: int, on_last_frame: Callable[[], object] = lambda: None) -> None:
        """Lets others run until the launch is over; calls `ending` while the last frame is made.

        Who sleeps until then wakes up half a millisecond late (bench/wait.py). So the host dozes
        while more than a frame is left, and looks for the end of the last one, which may stand
        behind prompts: somebody's first chunk, or the device is idle until it is seen.
        """
        if self._done is None:
            on_last_frame()
            return
        while self._published.max() < frames - 1 and not self._done.query():
            time.sleep(_DOZE)
        if not self._done.query():
            on_last_frame()
        self._ops.wait(self._done.cuda_event, _LOOK)

    def _collect(self, columns: int, frames: int) -> list[NDArray[np.int64]]:
        """Each column's frames: why it is over, if it is, and its codes [made, 1 + groups]."""
        if self._failure[0]:
            _, block, phase = self._failure.tolist()
            self._failure[:] = 0
            self._prefixes.clear()  # the launch that was lost may have been that of a prompt
            raise DeviceError(
                f"The kernel's blocks lost each other: block {block} waited in vain for "
                f"{_PATIENCE / 1e9:g} s at the phase {PHASES[phase]}. Another program may hold the "
                "GPU; try again."
            )
        table = self._table(columns, frames)
        made = [
            rows[:count].astype(np.int64)
            for rows, count in zip(table, self._published, strict=False)
        ]
        if any((rows[:, 0] == _BROKEN).any() for rows in made):
            raise FloatingPointError("The logits are not finite; try dtype='float32'.")
        return made

    def _scores(self, slots: Sequence[int], frames: int) -> list[Tensor | None]:
        """What the watched heads look at, for each column [frames, heads, positions]."""
        if not self._captured_heads:
            return [None] * len(slots)
        shape = (len(slots), frames, len(self._captured_heads), self._keys.shape[3])
        table = self._told[: math.prod(shape)].view(shape)
        return [
            self._state[slot].mask_scores(rows, self.max_positions)
            for slot, rows in zip(slots, table, strict=True)
        ]

    def _take(self, state: _Slot, made: NDArray[np.int64], scores: Tensor | None) -> Frames:
        state.codes = made[-1, 1:].tolist()
        state.num_frames += len(made)
        ended = bool(made[-1, 0] == _EOS)
        count = len(made) - ended
        told = None if scores is None else scores[:count]
        return Frames(torch.from_numpy(made[:count, 1:]), ended, told)

    def _lists(self) -> tuple[object, ...]:
        control, stack = self._config.talker.control, self._config.talker.stack
        return self._weights, self._memory, self._mailbox, control.eos, stack.norm_eps, _PATIENCE

    def _streams(self, slots: Sequence[int]) -> Tensor:
        """Who speaks, as the kernel is told: [streams, bytes of a `Stream` of csrc/params.cuh]."""
        rows = b"".join(_row(slot, self._state[slot], self.max_positions) for slot in slots)
        return torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(len(slots), -1)

    def _remembered(self, slot: int, end: int) -> list[Tensor]:
        """Keys and values of the positions before `end`, and what else is in their last block."""
        return [self._keys[:, slot, :, :end], self._values[:, slot, :, : -(-end // _BLOCK)]]

    def _parts(self, slot: int, state: _Slot) -> list[Tensor]:
        """A slot's parts of the buffers, as far as its stream has come."""
        end = state.num_prompt + max(state.num_frames - 1, 0)
        return [
            *self._remembered(slot, end),
            self._text[slot, : state.num_fed],
            self._seen[slot],
            self._hidden[slot],
        ]

    @torch.inference_mode()
    def swap_out(self, slot: int) -> SlotSnapshot[_Slot]:
        """Takes a stream out; see `Backend.swap_out`."""
        state = self._state.pop(slot)
        return take_snapshot(state, self._parts(slot, state))

    @torch.inference_mode()
    def swap_in(self, slot: int, suspended: SlotSnapshot[_Slot]) -> None:
        """Puts a stream back; see `Backend.swap_in`."""
        self._prefixes.invalidate(slot)
        self._state[slot] = restore_snapshot(suspended, self._parts(slot, suspended.state))


def _built_ops(device: torch.device) -> Any:
    from megakernel_tts.kernels.build import load

    if not hasattr(torch.ops.megakernel_tts, "generate"):  # another build may be there
        load(device)
    return torch.ops.megakernel_tts


def _row(slot: int, s: _Slot, positions: int) -> bytes:
    """A `Stream` of csrc/params.cuh."""
    rule, seed = s.sampling, s.sampling.seed or 0
    return _STREAM.pack(
        slot, s.num_prompt, s.num_frames, positions - s.num_prompt, s.num_fed, s.text_ended,
        s.num_frames == 0,
        *s.codes,
        s.first_frame & 0xFFFFFFFF, seed & 0xFFFFFFFF, seed >> 32,
        rule.repetition_penalty,
        rule.temperature, rule.top_k, rule.top_p,
        rule.predictor_temperature, rule.predictor_top_k, rule.predictor_top_p,
    )  # fmt: skip
