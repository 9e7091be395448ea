"""The reference backend: talker and code predictor in plain torch, on any device.

The tests compare the kernel with it, and it runs where there is no kernel. One frame of a stream:

    h = talker(x)                                               hidden state
    code[0] = sample(W_head h)
    code[g] = sample(W_g predictor(h, code[0], ..., code[g-1])) for g = 1 to groups - 1
    x = sum of the codes' embeddings + text vector              next input
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.inference import in_inference_mode
from megakernel_common.layers import linear
from megakernel_tts.backends.attention_capture import (
    AllHeadsCapture,
    AttentionObserver,
    HeadCapture,
)
from megakernel_tts.backends.decoder_stack import KVCache, fuse_stack, run_stack
from megakernel_tts.backends.prefix_cache import PrefixCache
from megakernel_tts.backends.protocol import (
    Frames,
    PendingCodes,
    PrefillRequest,
    PrefillResult,
    SlotProgress,
)
from megakernel_tts.backends.sampling import (
    SamplingMetadata,
    apply_repetition_penalty,
    gumbel_noise,
    sample,
)
from megakernel_tts.backends.slot_snapshot import SlotSnapshot, restore_snapshot, take_snapshot
from megakernel_tts.kernels.structs import MIN_FRAMES
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.model.weights import Model, Projection
from megakernel_tts.sampling import Sampling

_CHUNK_SIZE = 128  # positions of a prompt that are run together, from its first or first own one


@dataclass(kw_only=True)
class _Slot(SlotProgress):
    """State of the stream in a slot, beside its keys and values.

    Attributes:
        sampling: Sampling parameters in the range of float32.
        first_frame: Number of its first frame in the random generator.
        hidden: [hidden], the talker's output at the end of the prompt.
        codes: [groups], the last frame's; None before the first.
    """

    sampling: Sampling
    first_frame: int
    hidden: Tensor
    codes: Tensor | None = None

    @property
    def position(self) -> int:
        """Position of the input that the last frame's codes make."""
        return self.num_prompt + self.num_frames - 1


class Reference:
    """A `Backend` in plain torch, for CPU and CUDA, in float32 and bfloat16."""

    name = "reference"
    blocking = True

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
            model: Weights on their device, in the dtype to compute in.
            config: Shapes and ids of the model.
            pad: [hidden], the text vector that takes the place of text after its end.
            num_slots: Number of slots.
            max_positions: Positions of a slot.
            captured_heads: (layer, head) of the talker's heads whose scores `step` returns.
            trace: Receives results of each frame's phases: `hidden` [batch, 1, hidden], `logits`
                [batch, vocab] and, for each further code, `predictor` [batch, codes].
        """
        self.num_slots = num_slots
        self.max_streams = num_slots
        self.max_positions = max_positions
        talker, predictor = config.talker, config.predictor
        self._talker_stack, talker_views = fuse_stack(model.talker.stack, talker.stack)
        self._predictor_stack, predictor_views = fuse_stack(model.predictor.stack, predictor.stack)
        self.model = replace(  # so that the given projections can be freed
            model,
            talker=replace(model.talker, stack=talker_views),
            predictor=replace(model.predictor, stack=predictor_views),
        )
        self._config = config
        self._pad = pad
        self._captured_heads = tuple(captured_heads)
        self._trace = trace or (lambda phase, tensor: None)
        self._device = pad.device
        self._cache = KVCache(talker.stack, num_slots, max_positions, pad)
        self._predictor_cache = KVCache(predictor.stack, num_slots, talker.num_groups, pad)
        self._text = torch.empty(
            num_slots, max_positions, talker.stack.hidden_size, dtype=pad.dtype, device=pad.device
        )
        # [slots, vocab]: ids that were sampled as code 0.
        self._seen = torch.zeros(num_slots, talker.vocab_size, dtype=torch.bool, device=pad.device)
        # [vocab]: ids that may be sampled as code 0, without and with the end of speech.
        self._codes_only = torch.arange(talker.vocab_size, device=pad.device) < talker.num_codes
        self._codes_or_eos = self._codes_only.clone()
        self._codes_or_eos[talker.control.eos] = True
        self._prefixes = PrefixCache()
        self._state: dict[int, _Slot] = {}
        self._interrupted = False

    def prepare(self) -> None:
        """Does nothing; see `Backend.prepare`."""

    def reserve(self, slot: int, num_positions: int, *, beginning: bool = False) -> bool:
        """See `Backend.reserve`; every slot has memory of its own."""
        return True

    @in_inference_mode
    def prefill(
        self, requests: Sequence[PrefillRequest], budget: int | None = None
    ) -> PrefillResult:
        """Runs the prompts one by one, in chunks of fixed positions; see `Backend.prefill`."""
        for request in requests:
            request.check(self.max_positions)
        in_place: list[int] = []
        num_run = 0
        for request in requests:
            position = self._copy_prefix(request)
            while position < len(request.prompt) and (budget is None or num_run < max(budget, 1)):
                end = self._run_chunk(request, position)
                num_run += end - position
                position = end
            in_place.append(position)
        return PrefillResult(in_place, num_run)

    def _copy_prefix(self, request: PrefillRequest) -> int:
        """Copies the common positions if they are cached; returns how many are in place."""
        slot, num_common = request.slot, request.num_common
        if request.begin >= num_common:
            return request.begin
        cached = self._prefixes.get(request.prefix_key(num_common))
        if cached is None:
            return request.begin
        for view, copy in zip(self._cache.views(slot, num_common), cached, strict=True):
            view.copy_(copy)
        return num_common

    def _run_chunk(self, request: PrefillRequest, begin: int) -> int:
        """Runs the prefill chunk that begins at a position; returns the position after it."""
        slot, num_common, length = request.slot, request.num_common, len(request.prompt)
        end = min(begin + _CHUNK_SIZE, num_common if begin < num_common else length)
        chunk = request.prompt[None, begin:end].to(self._device)
        hidden = self._run_talker([slot], chunk, [begin])[0, -1]
        if end == num_common:
            self._prefixes.put(request.prefix_key(end), self._cache.views(slot, end))
        if end == length:
            self._seen[slot] = False
            self._state[slot] = _Slot(
                num_prompt=length,
                sampling=request.sampling.in_float32(),
                first_frame=request.first_frame,
                hidden=hidden,
            )
        return end

    def clear_prefix_cache(self) -> None:
        """See `Backend.clear_prefix_cache`."""
        self._prefixes.clear()

    def feed(self, slot: int, text: Tensor, text_complete: bool) -> None:
        """See `Backend.feed`."""
        state = self._state[slot]
        text = text[: self.max_positions - state.num_fed]  # later vectors cannot be used
        self._text[slot, state.num_fed : state.num_fed + len(text)] = text
        state.num_fed += len(text)
        state.text_complete = text_complete

    def release(self, slot: int) -> None:
        """See `Backend.release`."""
        self._state.pop(slot, None)

    def _slot_views(self, slot: int, state: _Slot) -> list[Tensor]:
        """Views of all that the buffers hold of a stream."""
        return [
            *self._cache.views(slot, state.position + 1),
            self._text[slot, : state.num_fed],
            self._seen[slot],
        ]

    @in_inference_mode
    def swap_out(self, slot: int) -> SlotSnapshot[_Slot]:
        """See `Backend.swap_out`."""
        state = self._state.pop(slot)
        return take_snapshot(state, self._slot_views(slot, state))

    @in_inference_mode
    def swap_in(self, slot: int, snapshot: SlotSnapshot[_Slot]) -> None:
        """See `Backend.swap_in`."""
        self._state[slot] = restore_snapshot(snapshot, self._slot_views(slot, snapshot.state))

    def interrupt(self) -> None:
        """See `Backend.interrupt`."""
        self._interrupted = True

    def clear_interrupt(self) -> None:
        """See `Backend.clear_interrupt`."""
        self._interrupted = False

    @in_inference_mode
    def step(
        self,
        slots: Sequence[int],
        num_frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        """See `Backend.step`; `on_last_frame` is not called."""
        state_before = {slot: replace(self._state[slot]) for slot in slots}
        seen_before = self._seen.clone()
        codes: list[Tensor] = []
        scores: list[Tensor] = []
        overlap()  # before the frames: this thread computes them
        try:
            for _ in range(num_frames):
                frame_codes, frame_scores = self._make_frame(slots)
                codes.append(frame_codes)
                scores.append(frame_scores)
                if self._interrupted or not all(self._can_continue(slot) for slot in slots):
                    break
        except Exception:
            self._state |= state_before
            self._seen = seen_before
            raise
        by_slot = zip(torch.stack(codes, dim=1), torch.stack(scores, dim=1), strict=True)
        return [self._to_frames(*made) for made in by_slot]

    def _to_frames(self, codes: Tensor, scores: Tensor) -> Frames:
        """Returns a slot's frames without the one that ends the speech."""
        ended = self._is_end(codes[-1])
        count = len(codes) - ended
        return Frames(codes[:count], ended, scores[:count] if self._captured_heads else None)

    def _can_continue(self, slot: int) -> bool:
        state = self._state[slot]
        ended = state.codes is not None and self._is_end(state.codes)
        has_position = state.num_prompt + state.num_frames < self.max_positions
        return not ended and state.has_text and has_position

    def _is_end(self, codes: Tensor) -> bool:
        """Returns whether a frame's codes [groups] end the speech."""
        return int(codes[0]) == self._config.talker.control.eos

    def _make_frame(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Makes one frame for each slot.

        Returns:
            Codes [slots, groups], and scores [slots, captured heads, positions].
        """
        states = [self._state[slot] for slot in slots]
        for slot, state in zip(slots, states, strict=True):
            state.check(slot, self.max_positions)
        hidden, scores = self._next_hidden(slots, states)
        noise = gumbel_noise(
            [state.sampling.seed or 0 for state in states],
            [state.first_frame + state.num_frames for state in states],
            self._config.talker.num_groups,
            self._config.talker.vocab_size,
            self._device,
        )
        logits = linear(hidden, self.model.talker.head)[:, 0]
        self._trace("hidden", hidden)
        self._trace("logits", logits)
        first = self._sample_first_code(slots, states, logits, noise[:, 0])
        samplings = [state.sampling for state in states]
        params = SamplingMetadata.for_predictor(samplings, self._device)
        codes = torch.cat(
            [first[:, None], self.predict(hidden, first, params, noise[:, 1:])], dim=1
        ).cpu()
        self._seen[torch.tensor(slots, device=self._device), first] = True
        for state, frame_codes in zip(states, codes, strict=True):
            state.codes = frame_codes
            state.num_frames += 1
        return codes, scores.cpu()

    def _next_hidden(self, slots: Sequence[int], states: list[_Slot]) -> tuple[Tensor, Tensor]:
        """Returns the talker's output for each slot: from the prompt, or from the last frame.

        Returns:
            Hidden states [slots, 1, hidden], and scores [slots, captured heads, positions].
        """
        shape = (len(slots), len(self._captured_heads), self.max_positions)
        scores = torch.full(shape, torch.nan, device=self._device)
        hidden = {i: state.hidden[None] for i, state in enumerate(states) if state.codes is None}
        rows = [i for i, state in enumerate(states) if state.codes is not None]
        if rows:
            inputs = torch.stack([self._next_input(slots[i], states[i]) for i in rows])
            positions = [states[i].position for i in rows]
            capture = HeadCapture(self._captured_heads, positions, scores[rows])
            outputs = self._run_talker([slots[i] for i in rows], inputs, positions, capture)
            scores[rows] = capture.scores
            hidden |= dict(zip(rows, outputs, strict=True))
        return torch.stack([hidden[i] for i in range(len(slots))]), scores

    def _next_input(self, slot: int, state: _Slot) -> Tensor:
        """Returns the sum of the last frame's embeddings and its text vector, [1, hidden]."""
        assert state.codes is not None
        frame = state.num_frames - 1
        text = self._text[slot, frame] if frame < state.num_fed else self._pad
        return self.model.embeddings.embed_frames(state.codes.to(self._device)[None]) + text

    def _sample_first_code(
        self, slots: Sequence[int], states: list[_Slot], logits: Tensor, noise: Tensor
    ) -> Tensor:
        """Applies repetition penalty and mask to code 0's logits, then samples.

        Args:
            slots: Slots of the batch.
            states: Their states.
            logits: [slots, vocab].
            noise: [slots, vocab].

        Returns:
            [slots], int64.
        """
        logits = logits.float()
        _check_finite("talker", logits)
        samplings = [state.sampling for state in states]
        penalties = [sampling.repetition_penalty for sampling in samplings]
        seen = self._seen[torch.tensor(slots, device=self._device)]
        logits = apply_repetition_penalty(
            logits, seen, torch.tensor(penalties, device=self._device)[:, None]
        )
        early = [state.num_frames < MIN_FRAMES for state in states]
        allowed = torch.where(
            torch.tensor(early, device=self._device)[:, None], self._codes_only, self._codes_or_eos
        )
        logits = logits.masked_fill(~allowed, -torch.inf)
        return sample(logits, SamplingMetadata.for_talker(samplings, self._device), noise)

    def predict(
        self, hidden: Tensor, first: Tensor, params: SamplingMetadata, noise: Tensor
    ) -> Tensor:
        """Samples codes 1 to groups - 1 of a frame.

        Args:
            hidden: [batch, 1, talker's hidden].
            first: [batch], code 0; an end of speech is embedded like any other id.
            params: Sampling parameters of the batch.
            noise: [batch, groups - 1, at least as many ids as codes].

        Returns:
            [batch, groups - 1], int64.
        """
        model, predictor, config = self.model, self.model.predictor, self._config.predictor
        x = torch.cat([hidden, F.embedding(first[:, None], model.embeddings.codec)], dim=1)
        slots = list(range(len(first)))  # of the predictor's cache
        position = 0
        codes: list[Tensor] = []
        max_logits: list[Tensor] = []
        for i, head in enumerate(predictor.heads):
            x = _project(x, predictor.project)
            starts = [position] * len(slots)
            h = run_stack(
                x, self._predictor_stack, config.stack, self._predictor_cache, slots, starts
            )
            position += x.shape[1]
            logits = linear(h[:, -1:], head)[:, 0]
            self._trace("predictor", logits)
            max_logits.append(logits.amax())
            codes.append(sample(logits.float(), params, noise[:, i, : config.vocab_size]))
            x = F.embedding(codes[-1][:, None], model.embeddings.group_tables[i])
        _check_finite("code predictor", torch.stack(max_logits))
        return torch.stack(codes, dim=1)

    @in_inference_mode
    def capture_attention(
        self, prompt: Tensor, text: Tensor, codes: Tensor, first: int, count: int
    ) -> list[Tensor]:
        """Runs given frames through the talker, in slot 0, and captures all of its heads.

        Args:
            prompt: [positions, hidden], on any device.
            text: Text vectors [n, hidden] that follow the prompt; padding follows them.
            codes: [frames, groups].
            first: First key position that is captured.
            count: Number of key positions.

        Returns:
            For each layer [heads, frames, count], on the host; see `AllHeadsCapture`.
        """
        inputs = codes[:-1].to(self._device)
        padding = self._pad.expand(max(0, len(inputs) - len(text)), -1)
        text = torch.cat([text.to(self._pad), padding])[: len(inputs)]
        x = torch.cat([prompt.to(self._pad), self.model.embeddings.embed_frames(inputs) + text])
        capture = AllHeadsCapture(len(prompt), first, count)
        self._run_talker([0], x[None], [0], capture)
        return capture.layers

    def _run_talker(
        self,
        slots: Sequence[int],
        x: Tensor,
        starts: Sequence[int],
        observer: AttentionObserver | None = None,
    ) -> Tensor:
        """Runs the talker's stack over new positions x [batch, positions, hidden]."""
        config = self._config.talker.stack
        return run_stack(x, self._talker_stack, config, self._cache, slots, starts, observer)


def _check_finite(network: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise FloatingPointError(f"The {network}'s logits are not finite; try dtype='float32'.")


def _project(x: Tensor, projection: Projection | None) -> Tensor:
    return x if projection is None else linear(x, projection.weight, projection.bias)
