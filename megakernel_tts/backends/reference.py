"""The talker and the code predictor in plain torch: the oracle, and the backend without a kernel.

One frame of a stream: the talker's layers turn the last frame's input into a hidden state; its
head and the sampling rules give code 0; the predictor, starting from that hidden state, gives the
other codes; the sum of the frame's embeddings and one text vector is the talker's next input.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megakernel_tts.backends.attention_capture import (
    AllHeadsCapture,
    AttentionObserver,
    HeadCapture,
)
from megakernel_tts.backends.decoder_stack import Cache, run_stack
from megakernel_tts.backends.prefix_cache import PrefixCache
from megakernel_tts.backends.protocol import Frames, PendingCodes, PrefillRequest, SlotProgress
from megakernel_tts.backends.slot_snapshot import SlotSnapshot, restore_snapshot, take_snapshot
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.layers import linear
from megakernel_tts.model.weights import Model, Projection
from megakernel_tts.sampling import (
    Sampling,
    SamplingParams,
    apply_repetition_penalty,
    gumbel_noise,
    sample,
)

_MIN_FRAMES = 2  # the release never lets the first two draws end the speech


@dataclass(kw_only=True)
class _Slot(SlotProgress):
    """One stream's state beside its keys and values."""

    sampling: Sampling
    first_frame: int
    hidden: Tensor  # [hidden], the talker's output at the prompt's end
    codes: Tensor | None = None  # [groups], the last frame

    @property
    def position(self) -> int:
        """Where the last frame's input goes."""
        return self.num_prompt + self.num_frames - 1


class Reference:
    """A `Backend` in plain torch, for the CPU and for CUDA, in float32 and bfloat16."""

    name = "reference"

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        pad: Tensor,
        *,
        num_slots: int,
        max_positions: int,
        captured_heads: Sequence[tuple[int, int]] = (),
        trace: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        """Allocates the slots.

        Args:
            model: Tensors on their device, in the type to compute in.
            config: The model's numbers.
            pad: [hidden], the text vector that stands for "no text".
            num_slots: Streams at a time.
            max_positions: The most positions of one stream.
            captured_heads: (layer, head) of the talker's heads whose scores `step` returns.
            trace: Is shown what each frame's phases give: `hidden` [batch, 1, hidden], `logits`
                [batch, vocab] and, for each further code, `predictor` [batch, codes].
        """
        self.num_slots = num_slots
        self.max_positions = max_positions
        self.model = model
        self._config = config
        self._pad = pad
        self._captured_heads = tuple(captured_heads)
        self._trace = trace or (lambda phase, tensor: None)
        self._device = pad.device
        talker = config.talker
        self._cache = Cache(talker.stack, num_slots, max_positions, pad)
        self._predictor_cache = Cache(config.predictor.stack, num_slots, talker.num_groups, pad)
        self._text = torch.empty(
            num_slots, max_positions, talker.stack.hidden_size, dtype=pad.dtype, device=pad.device
        )
        self._seen = torch.zeros(num_slots, talker.vocab_size, dtype=torch.bool, device=pad.device)
        allowed = torch.arange(talker.vocab_size, device=pad.device) < talker.num_codes
        self._allowed_early = allowed.clone()
        allowed[talker.control.eos] = True
        self._allowed = allowed
        self._prefixes = PrefixCache()
        self._state: dict[int, _Slot] = {}
        self._interrupted = False

    @torch.inference_mode()
    def prefill(self, requests: Sequence[PrefillRequest]) -> None:
        """Runs the prompts one by one; see `Backend.prefill`."""
        for start in requests:
            start.check(self.max_positions)
        for start in requests:
            slot, own = start.slot, start.prompt[start.num_common :].to(self._device)
            self._begin_with_common(start)
            hidden = self._talk([slot], own[None], [start.num_common])[0, -1]
            self._seen[slot] = False
            self._state[slot] = _Slot(
                num_prompt=len(start.prompt),
                sampling=start.sampling.in_float32(),
                first_frame=start.first_frame,
                hidden=hidden,
            )

    def _begin_with_common(self, start: PrefillRequest) -> None:
        """Puts the common positions' keys and values in place: a pass of their own, or a copy."""
        slot, count = start.slot, start.num_common
        if not count:
            return
        parts = self._cache.parts(slot, count)
        key = start.prefix_key(count)
        kept = self._prefixes.get(key)
        if kept is None:
            self._talk([slot], start.prompt[None, :count].to(self._device), [0])
            self._prefixes.put(key, parts)
            return
        for part, copy in zip(parts, kept, strict=True):
            part.copy_(copy)

    def clear_prefix_cache(self) -> None:
        """Drops what it keeps of prompts; see `Backend.clear_prefix_cache`."""
        self._prefixes.clear()

    def feed(self, slot: int, text: Tensor, last: bool) -> None:
        """Queues text vectors; see `Backend.feed`."""
        state = self._state[slot]
        # What lies past the last position can never be used.
        text = text[: self.max_positions - state.num_fed]
        self._text[slot, state.num_fed : state.num_fed + len(text)] = text
        state.num_fed += len(text)
        state.text_ended = last

    def release(self, slot: int) -> None:
        """Forgets the stream; see `Backend.release`."""
        self._state.pop(slot, None)

    def _parts(self, slot: int, state: _Slot) -> list[Tensor]:
        """A slot's parts of the buffers, as far as its stream has come."""
        end = state.position + 1
        return [
            *self._cache.parts(slot, end),
            self._text[slot, : state.num_fed],
            self._seen[slot],
        ]

    @torch.inference_mode()
    def swap_out(self, slot: int) -> SlotSnapshot[_Slot]:
        """Takes a stream out; see `Backend.swap_out`."""
        state = self._state.pop(slot)
        return take_snapshot(state, self._parts(slot, state))

    @torch.inference_mode()
    def swap_in(self, slot: int, snapshot: SlotSnapshot[_Slot]) -> None:
        """Puts a stream back; see `Backend.swap_in`."""
        self._state[slot] = restore_snapshot(snapshot, self._parts(slot, snapshot.state))

    def interrupt(self) -> None:
        """Ends a step with the frame at hand; see `Backend.interrupt`."""
        self._interrupted = True

    def clear_interrupt(self) -> None:
        """Takes interruptions back; see `Backend.clear_interrupt`."""
        self._interrupted = False

    @torch.inference_mode()
    def step(
        self,
        slots: Sequence[int],
        num_frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        """Some frames for each slot; see `Backend.step`."""
        before = {slot: replace(self._state[slot]) for slot in slots}
        seen = self._seen.clone()
        made: list[Tensor] = []
        told: list[Tensor] = []
        overlap()  # here, this thread is the device
        try:
            for _ in range(num_frames):
                codes, scores = self._frame(slots)
                made.append(codes)
                told.append(scores)
                if self._interrupted or not all(self._goes_on(slot) for slot in slots):
                    break
        except Exception:
            self._state |= before
            self._seen = seen
            raise
        codes, scores = torch.stack(made, dim=1), torch.stack(told, dim=1)  # [slots, frames, ..]
        return [self._told(*parts) for parts in zip(codes, scores, strict=True)]

    def _told(self, codes: Tensor, scores: Tensor) -> Frames:
        ended = self._over(codes[-1])
        count = len(codes) - ended
        return Frames(codes[:count], ended, scores[:count] if self._captured_heads else None)

    def _goes_on(self, slot: int) -> bool:
        s = self._state[slot]
        over = s.codes is not None and self._over(s.codes)
        return not over and s.has_text and s.num_prompt + s.num_frames < self.max_positions

    def _over(self, codes: Tensor) -> bool:
        """Whether these codes [groups] end the speech."""
        return int(codes[0]) == self._config.talker.control.eos

    def _frame(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One frame of each: codes [slots, groups], scores [slots, watched heads, positions]."""
        states = [self._state[slot] for slot in slots]
        for slot, s in zip(slots, states, strict=True):
            s.check(slot, self.max_positions)
        hidden, scores = self._hidden(slots, states)  # [batch, 1, hidden]
        noise = gumbel_noise(
            [s.sampling.seed or 0 for s in states],
            [s.first_frame + s.num_frames for s in states],
            self._config.talker.num_groups,
            self._config.talker.vocab_size,
            self._device,
        )
        logits = linear(hidden, self.model.talker.head)[:, 0]
        self._trace("hidden", hidden)
        self._trace("logits", logits)
        first = self._first_code(slots, states, logits, noise[:, 0])
        rows = [s.sampling for s in states]
        rest = self.predict(
            hidden, first, SamplingParams.for_predictor(rows, self._device), noise[:, 1:]
        )
        codes = torch.cat([first[:, None], rest], dim=1).cpu()
        self._seen[torch.tensor(slots, device=self._device), first] = True
        for row, state in zip(codes, states, strict=True):
            state.codes = row
            state.num_frames += 1
        return codes, scores.cpu()

    def _hidden(self, slots: Sequence[int], states: list[_Slot]) -> tuple[Tensor, Tensor]:
        """The talker's output for each slot: the prompt's, or that of the last frame's codes.

        With it the scores of the watched heads, [batch, heads, positions].
        """
        shape = (len(slots), len(self._captured_heads), self.max_positions)
        scores = torch.full(shape, torch.nan, device=self._device)
        moving = [i for i, s in enumerate(states) if s.codes is not None]
        rows = {i: s.hidden[None] for i, s in enumerate(states) if s.codes is None}
        if moving:
            inputs = torch.stack([self._next_input(slots[i], states[i]) for i in moving])
            places = [states[i].position for i in moving]
            watch = HeadCapture(self._captured_heads, places, scores[moving])
            made = self._talk([slots[i] for i in moving], inputs, places, watch)
            scores[moving] = watch.scores
            rows |= dict(zip(moving, made, strict=True))
        return torch.stack([rows[i] for i in range(len(slots))]), scores

    def _next_input(self, slot: int, state: _Slot) -> Tensor:
        """The sum of a frame's embeddings, plus the text vector of that frame: [1, hidden]."""
        assert state.codes is not None
        frame = state.num_frames - 1
        text = self._text[slot, frame] if frame < state.num_fed else self._pad
        return self.model.embeddings.embed_frames(state.codes.to(self._device)[None]) + text

    def _first_code(
        self, slots: Sequence[int], states: list[_Slot], logits: Tensor, noise: Tensor
    ) -> Tensor:
        """Penalty, minimum length, mask, temperature, top-k, top-p, draw: in that order."""
        rows = [s.sampling for s in states]
        penalty = [s.repetition_penalty for s in rows]
        early = torch.tensor([s.num_frames < _MIN_FRAMES for s in states], device=self._device)
        logits = logits.float()
        _check_finite("talker", logits)
        seen = self._seen[torch.tensor(slots, device=self._device)]
        logits = apply_repetition_penalty(
            logits, seen, torch.tensor(penalty, device=self._device)[:, None]
        )
        allowed = torch.where(early[:, None], self._allowed_early, self._allowed)
        logits = logits.masked_fill(~allowed, -torch.inf)
        return sample(logits, SamplingParams.for_talker(rows, self._device), noise)

    def predict(self, hidden: Tensor, first: Tensor, rule: SamplingParams, noise: Tensor) -> Tensor:
        """Codes 1 to groups - 1 of a frame.

        Args:
            hidden: [batch, 1, talker's hidden].
            first: [batch], code 0; the end of speech is looked up like any other.
            rule: How the codes are drawn.
            noise: [batch, groups - 1, at least as many ids as codes].

        Returns:
            [batch, groups - 1].
        """
        model, predictor = self.model, self.model.predictor
        c = self._config.predictor
        x = torch.cat([hidden, model.embeddings.codec[first][:, None]], dim=1)
        rows = list(range(len(first)))
        position = 0
        codes: list[Tensor] = []
        peaks: list[Tensor] = []
        for i, head in enumerate(predictor.heads):
            x = _project(x, predictor.project)
            starts = [position] * len(rows)
            h = run_stack(x, predictor.stack, c.stack, self._predictor_cache, rows, starts)[:, -1:]
            position += x.shape[1]
            logits = linear(h, head)[:, 0]
            self._trace("predictor", logits)
            peaks.append(logits.amax())
            codes.append(sample(logits.float(), rule, noise[:, i, : c.vocab_size]))
            x = model.embeddings.group_tables[i][codes[-1]][:, None]
        _check_finite("code predictor", torch.stack(peaks))
        return torch.stack(codes, dim=1)

    @torch.inference_mode()
    def capture_attention(
        self, prompt: Tensor, text: Tensor, codes: Tensor, first: int, count: int
    ) -> list[Tensor]:
        """What all heads of the talker look at while it is made to make given frames, in slot 0.

        Args:
            prompt: [positions, hidden], anywhere.
            text: Text vectors [n, hidden] that follow it, anywhere; padding follows them.
            codes: [frames, groups].
            first: The first position whose key is looked at.
            count: How many follow.

        Returns:
            For each layer [heads, frames, count], on the host; see `AllHeadsCapture`.
        """
        fed = codes[:-1].to(self._device)
        pad = self._pad.expand(max(0, len(fed) - len(text)), -1)
        beside = torch.cat([text.to(self._pad), pad])[: len(fed)]
        x = torch.cat([prompt.to(self._pad), self.model.embeddings.embed_frames(fed) + beside])
        watch = AllHeadsCapture(len(prompt), first, count)
        self._talk([0], x[None], [0], watch)
        return watch.layers

    def _talk(
        self,
        slots: Sequence[int],
        x: Tensor,
        starts: Sequence[int],
        watch: AttentionObserver | None = None,
    ) -> Tensor:
        """The talker's layers and last norm over new positions x [batch, positions, hidden]."""
        c, stack = self._config.talker.stack, self.model.talker.stack
        return run_stack(x, stack, c, self._cache, slots, starts, watch)


def _check_finite(network: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise FloatingPointError(f"The {network}'s logits are not finite; try dtype='float32'.")


def _project(x: Tensor, projection: Projection | None) -> Tensor:
    return x if projection is None else linear(x, projection.weight, projection.bias)
