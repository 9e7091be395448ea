"""Test doubles: a backend without networks, and a vocoder that checks the order of its calls."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.backends.page_pool import PagePool
from megakernel_tts.backends.protocol import Frames, PendingCodes, PrefillRequest, PrefillResult
from megakernel_tts.backends.slot_snapshot import SlotSnapshot
from megakernel_tts.codec.decoder import Decoder, DecodeRequest, PendingDecodeRequest, State
from megakernel_tts.codec.vocoder import ConfirmFrames, PendingSamples, TorchVocoder

PAGE_SIZE = 16  # positions of a page of `ScriptedBackend`
TIMEOUT_S = 300.0  # after which a test fails: far longer than a busy machine takes for anything


class ScriptedBackend:
    """A `Backend` without networks, whose streams end when a test wants.

    The codes of a stream depend on its seed and the frame's number. A stream ends `tail` frames
    after its text is used up.

    Attributes:
        endless: Whether no stream ends.
        runaway: Seeds whose streams do not end.
        failing_steps: Frame at which the step of a seed's stream fails.
        failing_prompts: Seeds whose prefill fails.
        gate: Frames wait until it is set.
        blocked: Set while a frame waits for the gate.
        step_lengths: Frames requested of every step.
        batch_sizes: Streams of every frame.
        prompt_lengths: Positions of every prompt.
        prompts: Seed and first frame number of every prompt.
        prefill_sizes: Prompts of every prefill.
        prefill_positions: Positions that every prefill ran.
        events: `prefill`, `frame`, `swap_in` and `prepare`, in order.
        threads: Threads that called `prefill` or `step`.
        num_swapped_out: Calls of `swap_out`.
        pool: Memory of the slots, in pages of `PAGE_SIZE` positions.
    """

    name = "scripted"
    blocking = False

    def __init__(
        self,
        num_slots: int = 2,
        max_positions: int = 512,
        *,
        tail: int = 3,
        num_pages: int | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.max_streams = num_slots
        self.max_positions = max_positions
        self.tail = tail
        self.endless = False
        self.runaway: set[int] = set()
        self.failing_steps: dict[int, int] = {}
        self.failing_prompts: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.blocked = threading.Event()
        self.step_lengths: list[int] = []
        self.batch_sizes: list[int] = []
        self.prompt_lengths: list[int] = []
        self.prompts: list[tuple[int, int]] = []
        self.prefill_sizes: list[int] = []
        self.prefill_positions: list[int] = []
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.num_swapped_out = 0
        slot_pages = -(-max_positions // PAGE_SIZE)
        self.pool = PagePool(
            num_slots * slot_pages if num_pages is None else num_pages,
            num_slots,
            page_size=PAGE_SIZE,
            slot_pages=slot_pages,
            num_columns=slot_pages,
        )
        self._streams: dict[int, dict[str, int]] = {}
        self._interrupted = False
        self._recorded = threading.Condition()

    @property
    def busy(self) -> set[int]:
        """Slots that have a stream."""
        return set(self._streams)

    @property
    def interrupted(self) -> bool:
        """Whether the step under way was interrupted."""
        return self._interrupted

    def num_frames(self, slot: int) -> int:
        """Frames made for the stream in a slot."""
        return self._streams[slot]["frames"]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition on what was recorded is true."""
        with self._recorded:
            assert self._recorded.wait_for(condition, TIMEOUT_S), "it does not become true"

    def _record(self, event: str) -> None:
        with self._recorded:
            self.events.append(event)
            self._recorded.notify_all()

    def prepare(self) -> None:
        self._record("prepare")

    def reserve(self, slot: int, num_positions: int, *, beginning: bool = False) -> bool:
        num_positions = min(num_positions, self.max_positions)
        return self.pool.reserve(slot, num_positions, beginning=beginning)

    def _require(self, slot: int, num_positions: int) -> None:
        if not self.reserve(slot, num_positions):
            raise MemoryError(f"no memory for {num_positions} positions of slot {slot}")

    def prefill(
        self, requests: Sequence[PrefillRequest], budget: int | None = None
    ) -> PrefillResult:
        self.threads.add(threading.get_ident())
        if failing := {request.sampling.seed for request in requests} & self.failing_prompts:
            raise ArithmeticError(f"failing prompt of seed {failing.pop()}")
        in_place: list[int] = []
        num_run = 0
        for request in requests:
            assert request.slot not in self._streams, "the slot is taken"
            self._require(request.slot, len(request.prompt))
            begin = max(request.begin, request.num_common)
            left = len(request.prompt) if budget is None else max(budget - num_run, not num_run)
            end = min(len(request.prompt), begin + left)
            in_place.append(end)
            num_run += end - begin
            if end == len(request.prompt):
                self._start_stream(request)
        self.prefill_sizes.append(len(requests))
        self.prefill_positions.append(num_run)
        self._record("prefill")
        return PrefillResult(in_place, num_run)

    def _start_stream(self, request: PrefillRequest) -> None:
        seed = request.sampling.seed
        assert seed is not None
        self.prompt_lengths.append(len(request.prompt))
        self.prompts.append((seed, request.first_frame))
        self._streams[request.slot] = {
            "seed": seed, "first": request.first_frame, "frames": 0, "fed": 0, "text_complete": 0,
            "prompt": len(request.prompt),
        }  # fmt: skip

    def clear_prefix_cache(self) -> None:
        pass

    def feed(self, slot: int, text: Tensor, text_complete: bool) -> None:
        stream = self._streams[slot]
        assert not stream["text_complete"] or len(text) == 0, "text after its end"
        stream["fed"] += len(text)
        stream["text_complete"] = int(text_complete)

    def interrupt(self) -> None:
        self._interrupted = True

    def clear_interrupt(self) -> None:
        self._interrupted = False

    def step(
        self,
        slots: Sequence[int],
        num_frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        self.threads.add(threading.get_ident())
        self.step_lengths.append(num_frames)
        num_frames = self._reserve_frames(slots, num_frames)
        before = {slot: dict(self._streams[slot]) for slot in slots}
        made: dict[int, list[Tensor | None]] = {slot: [] for slot in slots}
        upcoming = {slot: np.full((num_frames, 16), 9999, np.int32) for slot in slots}
        moving = list(slots)
        if num_frames == 1:
            on_last_frame([*upcoming.values()])
        overlap()
        for i in range(num_frames):
            if 0 < i == num_frames - 1:
                on_last_frame([*upcoming.values()])
            self._pass_gate()
            self.batch_sizes.append(len(moving))
            self._record("frame")
            for slot in moving:
                stream = self._streams[slot]
                if self.failing_steps.get(stream["seed"]) == stream["frames"]:
                    self._streams |= before
                    raise ArithmeticError(f"failing step of seed {stream['seed']}")
                codes = self._frame(stream)
                made[slot].append(codes)
                if codes is not None:
                    upcoming[slot][i] = codes
            moving = [slot for slot in moving if made[slot][-1] is not None and self._fed(slot)]
            if self._interrupted or not moving:
                break
        return [_frames(made[slot]) for slot in slots]

    def _reserve_frames(self, slots: Sequence[int], num_frames: int) -> int:
        """Returns the frames for which there is memory; at least one."""
        for slot in slots:
            num_positions = self._streams[slot]["prompt"] + self._streams[slot]["frames"]
            self._require(slot, num_positions)
            while not self.reserve(slot, num_positions + num_frames - 1):
                num_frames -= 1
        return num_frames

    def _pass_gate(self) -> None:
        if not self.gate.is_set():
            self.blocked.set()
            self.gate.wait()

    def _fed(self, slot: int) -> bool:
        stream = self._streams[slot]
        return stream["frames"] <= stream["fed"] or bool(stream["text_complete"])

    def _frame(self, stream: dict[str, int]) -> Tensor | None:
        frame = stream["frames"]
        assert frame <= stream["fed"] or stream["text_complete"], "stepped before its text arrived"
        endless = self.endless or stream["seed"] in self.runaway
        if stream["text_complete"] and self._ends(stream) and not endless:
            return None
        stream["frames"] += 1
        return codes_of(stream["seed"], stream["first"] + frame)

    def _ends(self, stream: dict[str, int]) -> bool:
        """Whether a stream that has all of its text ends."""
        return stream["frames"] >= stream["fed"] + self.tail

    def release(self, slot: int) -> None:
        self._streams.pop(slot, None)
        self.pool.release(slot)

    def swap_out(self, slot: int) -> SlotSnapshot[dict[str, int]]:
        self.num_swapped_out += 1
        stream = self._streams[slot]
        self.release(slot)
        return SlotSnapshot(stream, ())

    def swap_in(self, slot: int, snapshot: SlotSnapshot[dict[str, int]]) -> None:
        assert slot not in self._streams, "the slot is taken"
        self._record("swap_in")
        self._require(slot, snapshot.state["prompt"] + snapshot.state["frames"])
        self._streams[slot] = snapshot.state


class ExpectingVocoder(TorchVocoder):
    """Records early requests, and calls that the `Vocoder` protocol forbids at their time.

    Attributes:
        confirmed: Of every request to `decode_pending`: its frames, and how many were confirmed.
        violations: Forbidden calls.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self.confirmed: list[tuple[int, int]] = []
        self.violations: list[str] = []
        self._busy = False  # until the batch in flight was awaited

    def _begin(self, call: str) -> None:
        if self._busy:
            self.violations.append(call)
        self._busy = True

    def _awaited(self, decoding: PendingSamples) -> PendingSamples:
        def wait() -> Sequence[NDArray[np.int16] | None]:
            self._busy = False
            return decoding()

        return wait

    def save_slot(self, slot: int) -> State:
        if self._busy:
            self.violations.append("save_slot")
        return super().save_slot(slot)

    def decode(self, requests: Sequence[DecodeRequest]) -> PendingSamples:
        self._begin("decode")
        try:
            return self._awaited(super().decode(requests))
        except Exception:
            self._busy = False
            raise

    def decode_pending(self, requests: Sequence[PendingDecodeRequest]) -> ConfirmFrames:
        self._begin("decode_pending")
        confirm = super().decode_pending(requests)

        def record(counts: Sequence[int]) -> PendingSamples:
            self.confirmed += zip((request.num_frames for request in requests), counts, strict=True)
            self._busy = False
            return confirm(counts)

        return record


def _frames(made: list[Tensor | None]) -> Frames:
    codes = [frame for frame in made if frame is not None]
    return Frames(
        torch.stack(codes) if codes else torch.zeros(0, 16).long(), len(codes) < len(made)
    )


def codes_of(seed: int, frame: int) -> Tensor:
    """The codes [groups] of a frame of `ScriptedBackend`."""
    generator = torch.Generator().manual_seed(1000 * seed + frame)
    return torch.randint(0, 256, (16,), generator=generator)
