"""The megakernel behind the backend's protocol; the only file that touches torch.ops.

Host state is the authority: each launch is given its streams, and tells the frames that it made
through pinned memory.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megakernel_tts.config import ModelConfig, StackConfig
from megakernel_tts.sampling import Sampling
from megakernel_tts.suspension import Suspended, put_back, take_out
from megakernel_tts.weights import Model, Stack

_COLUMNS = 8  # streams of one launch
_GROUPS = 16
_HEAD = 128
_STREAM = struct.Struct("=10i16i3If" + 2 * "fif")  # Stream in csrc/params.cuh
_EOS, _BROKEN = 1, 4
_PHASES = ("qkv", "attend", "out", "gate_up", "down", "head", "draw", "project")


def _pack(weight: Tensor) -> Tensor:
    """[rows, K] in the matrix instruction's own order: see csrc/phases/product.cuh."""
    rows, k = weight.shape
    tiles = weight.view(rows // 16, 2, 8, k // 16, 2, 4, 2)
    return tiles.permute(0, 3, 2, 5, 4, 1, 6).contiguous()


@dataclass
class _Slot:
    sampling: Sampling
    first_frame: int
    prompt: int
    codes: list[int]
    frames: int = 0
    fed: int = 0
    ended: bool = False


class Megakernel:
    """A `Backend` whose frames are made by one kernel launch."""

    name = "megakernel"

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        pad: Tensor,
        *,
        slots: int,
        positions: int,
        ops: Any = None,
    ) -> None:
        """Packs the weights and allocates the slots.

        Args:
            model: bfloat16 tensors on their device.
            config: The model's numbers.
            pad: [hidden], the text vector that stands for "no text".
            slots: Streams at a time.
            positions: The most positions of one stream, up to 2,048.
            ops: The kernel's operators; by default those of csrc/ops.cpp, built if need be.

        Raises:
            RuntimeError: The kernel cannot be built here.
            ValueError: It is not compiled for these shapes.
        """
        self._ops = _built_ops(pad.device) if ops is None else ops
        self.slots, self.positions = slots, positions
        talker, predictor = config.talker, config.predictor
        self._config, self._device = config, pad.device
        self._model = self._find_model(config)
        self._kept: list[Tensor] = []
        wide, device = talker.stack.hidden, pad.device
        embeddings = model.embeddings
        self._text = torch.zeros(slots, positions, wide, dtype=pad.dtype, device=device)
        self._seen = torch.zeros(slots, talker.vocab, dtype=torch.uint8, device=device)
        self._hidden = torch.zeros(slots, wide, device=device)
        self._keys, self._values = self._cache(talker.stack, slots, positions)
        empty = torch.zeros(1, dtype=pad.dtype, device=device)
        project = model.predictor.project
        self._weights = [
            self._layers(model.talker.stack),
            self._layers(model.predictor.stack),
            model.talker.stack.norm,
            model.predictor.stack.norm,
            _pack(model.talker.head),
            torch.stack([_pack(head) for head in model.predictor.heads]),
            embeddings.codec,
            self._addresses(embeddings.groups),
            pad.clone(),
            self._turns(talker.stack, max(positions, _GROUPS)),
            empty if project is None else _pack(project.weight),
            empty if project is None else project.bias,
        ]
        floats = self._ops.workspace_floats(self._model)
        self._memory = [
            self._keys,
            self._values,
            *self._cache(predictor.stack, _COLUMNS, _GROUPS),
            self._text,
            self._hidden,
            self._seen,
            torch.zeros(1, _STREAM.size, dtype=torch.uint8, device=device),
            torch.zeros(floats, device=device),
            torch.zeros(96, dtype=torch.int32, device=device),
        ]
        self._frames = self._mail(_COLUMNS, 1 + _GROUPS)
        self._failure = self._mail(3)
        self._mailbox = [self._frames, self._mail(_COLUMNS), self._mail(_COLUMNS), self._failure]
        self._state: dict[int, _Slot] = {}

    def _mail(self, *shape: int) -> Tensor:
        """Memory of the host that the kernel writes and reads, too."""
        pinned = self._device.type == "cuda"
        return torch.zeros(*shape, dtype=torch.int32, pin_memory=pinned)

    def _find_model(self, config: ModelConfig) -> int:
        """The compiled model of these shapes."""
        stacks = (config.talker.stack, config.predictor.stack)
        if len({(s.theta, s.eps) for s in stacks}) > 1:
            raise ValueError(
                f"The kernel takes one rope_theta and one rms_norm_eps for talker and predictor, "
                f"found {[(s.theta, s.eps) for s in stacks]}; use dtype='float32' for plain torch."
            )
        wanted = [n for s in stacks for n in (s.hidden, s.heads, s.kv_heads, s.intermediate)]
        wanted += [config.talker.codes, config.talker.groups, *(s.head_dim for s in stacks)]
        fixed = [_GROUPS, _HEAD, _HEAD]
        compiled = [[*self._ops.shape(i), *fixed] for i in range(self._ops.models())]
        if wanted not in compiled:
            raise ValueError(
                f"The kernel is not compiled for the shapes {wanted}, only for {compiled}; add "
                "them to csrc/shapes.cuh, or use dtype='float32' for plain torch."
            )
        return compiled.index(wanted)

    def _cache(self, c: StackConfig, slots: int, positions: int) -> tuple[Tensor, Tensor]:
        shape = (c.layers, slots, c.kv_heads, positions, _HEAD)
        keys = torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        return keys, torch.zeros_like(keys)

    def _addresses(self, tensors: Sequence[Tensor]) -> Tensor:
        """[n], where tensors lie that the kernel finds through a table."""
        kept = [t.contiguous() for t in tensors]
        self._kept += kept
        return torch.tensor([t.data_ptr() for t in kept], device=self._device)

    def _layers(self, stack: Stack) -> Tensor:
        """[layers, 8]: the addresses of a `Layer` in csrc/params.cuh."""
        rows = []
        for w in stack.layers:
            pairs = torch.cat([w.gate.unflatten(0, (-1, 8)), w.up.unflatten(0, (-1, 8))], dim=1)
            packed = [torch.cat([w.q, w.k, w.v]), w.o, pairs.flatten(0, 1), w.down]
            norms = [w.input_norm, w.post_norm, w.q_norm, w.k_norm]
            rows.append(self._addresses([*map(_pack, packed), *norms]))
        return torch.stack(rows)

    def _turns(self, c: StackConfig, positions: int) -> Tensor:
        """[positions, 64, 2]: cosine and sine of the rotary embedding."""
        inverse = 1.0 / c.theta ** (torch.arange(0, _HEAD, 2, device=self._device).float() / _HEAD)
        angle = torch.arange(positions, device=self._device).float()[:, None] * inverse
        return torch.stack([angle.cos(), angle.sin()], dim=-1).contiguous()

    @torch.inference_mode()
    def prefill(self, slot: int, prompt: Tensor, sampling: Sampling, first_frame: int) -> None:
        """Runs the prompt; see `Backend.prefill`."""
        if len(prompt) >= self.positions:
            raise ValueError(f"A prompt of {len(prompt)} does not fit {self.positions} positions.")
        state = _Slot(sampling.in_float32(), first_frame, len(prompt), [0] * _GROUPS)
        self._seen[slot] = 0
        self._put([slot], [state])
        self._ops.prefill(self._model, *self._lists(), prompt.contiguous())
        self._state[slot] = state

    def feed(self, slot: int, text: Tensor, last: bool) -> None:
        """Queues text vectors; see `Backend.feed`."""
        state = self._state[slot]
        text = text[: self.positions - state.fed]
        self._text[slot, state.fed : state.fed + len(text)] = text
        state.fed += len(text)
        state.ended = last

    def release(self, slot: int) -> None:
        """Forgets the stream; see `Backend.release`."""
        self._state.pop(slot, None)

    @torch.inference_mode()
    def step(self, slots: Sequence[int]) -> list[Tensor | None]:
        """One frame for each slot; see `Backend.step`."""
        made: list[Tensor] = []
        seen = self._seen[list(slots)]  # a copy: what the kernel draws, it marks at once
        try:
            for start in range(0, len(slots), _COLUMNS):
                made += self._step(slots[start : start + _COLUMNS])
        except Exception:
            self._seen[list(slots)] = seen
            raise
        codes: list[Tensor | None] = []
        for slot, frame in zip(slots, made, strict=True):
            state = self._state[slot]
            state.codes = frame[1:].tolist()
            state.frames += 1
            codes.append(None if frame[0] == _EOS else frame[1:].long())
        return codes

    def _step(self, slots: Sequence[int]) -> list[Tensor]:
        """One launch: for each slot why it is over, if it is, and its codes [1 + groups]."""
        states = [self._state[slot] for slot in slots]
        for slot, s in zip(slots, states, strict=True):
            if s.frames > s.fed and not s.ended:
                raise RuntimeError(
                    f"Slot {slot} was stepped before the text of frame {s.frames - 1} arrived."
                )
        self._put(slots, states)
        self._ops.generate(self._model, *self._lists(), 1)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self._failure[0]:
            _, block, phase = self._failure.tolist()
            raise RuntimeError(
                f"The kernel's blocks lost each other: block {block} waited in vain after the "
                f"phase {_PHASES[phase]}. Load the model again; another program may hold the GPU."
            )
        frames = list(self._frames[: len(slots)].clone())
        if any(frame[0] == _BROKEN for frame in frames):
            raise FloatingPointError("The logits are not finite; try dtype='float32'.")
        return frames

    def _lists(self) -> tuple[object, ...]:
        control, stack = self._config.talker.control, self._config.talker.stack
        return self._weights, self._memory, self._mailbox, control.eos, stack.eps

    def _put(self, slots: Sequence[int], states: Sequence[_Slot]) -> None:
        """Tells the kernel who speaks."""
        rows = b"".join(map(_row, slots, states))
        table = torch.frombuffer(bytearray(rows), dtype=torch.uint8)
        self._memory[7] = table.view(len(slots), -1).to(self._device)

    def _parts(self, slot: int, state: _Slot) -> list[Tensor]:
        """A slot's parts of the buffers, as far as its stream has come."""
        end = state.prompt + max(state.frames - 1, 0)
        return [
            self._keys[:, slot, :, :end],
            self._values[:, slot, :, :end],
            self._text[slot, : state.fed],
            self._seen[slot],
            self._hidden[slot],
        ]

    @torch.inference_mode()
    def suspend(self, slot: int) -> Suspended[_Slot]:
        """Takes a stream out; see `Backend.suspend`."""
        state = self._state.pop(slot)
        return take_out(state, self._parts(slot, state))

    @torch.inference_mode()
    def resume(self, slot: int, suspended: Suspended[_Slot]) -> None:
        """Puts a stream back; see `Backend.resume`."""
        self._state[slot] = put_back(suspended, self._parts(slot, suspended.state))


def _built_ops(device: torch.device) -> Any:
    from build_ext import load

    load(device)
    return torch.ops.megakernel_tts


def _row(slot: int, s: _Slot) -> bytes:
    """A `Stream` of csrc/params.cuh."""
    rule, seed = s.sampling, s.sampling.seed or 0
    return _STREAM.pack(
        slot, s.prompt, s.frames, 1 << 30, s.fed, s.ended, s.frames == 0, 0, 0, 0,
        *s.codes,
        s.first_frame & 0xFFFFFFFF, seed & 0xFFFFFFFF, seed >> 32,
        rule.repetition_penalty,
        rule.temperature, rule.top_k, rule.top_p,
        rule.predictor_temperature, rule.predictor_top_k, rule.predictor_top_p,
    )  # fmt: skip
