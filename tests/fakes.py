"""Stand-ins whose behaviour a test decides."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.backends.protocol import Frames, PendingCodes, PrefillRequest
from megakernel_tts.backends.slot_snapshot import SlotSnapshot
from megakernel_tts.codec.decoder import Decoder, DecodeRequest, PendingDecodeRequest, State
from megakernel_tts.codec.vocoder import ConfirmFrames, PendingSamples, TorchVocoder


class ScriptedBackend:
    """Keeps the `Backend` protocol without a network.

    A stream's codes depend on its seed and the frame's number. It ends `tail` frames after its text
    is used up; with `endless`, or a seed in `runaway`, never.
    """

    name = "scripted"

    def __init__(self, num_slots: int = 2, max_positions: int = 512, *, tail: int = 3) -> None:
        self.num_slots = num_slots
        self.max_positions = max_positions
        self.tail = tail
        self.endless = False
        self.runaway: set[int] = set()  # seeds that never end
        self.poisoned: dict[int, int] = {}  # seed -> the frame at which its step fails
        self.unable: set[int] = set()  # seeds whose prompt fails
        self.gate = threading.Event()  # frames wait for it
        self.gate.set()
        self.asked: list[int] = []  # frames of every step
        self.batches: list[int] = []  # streams of every frame
        self.prompts: list[int] = []
        self.starts: list[tuple[int, int]] = []  # seed and first frame of every prompt
        self.together: list[int] = []  # streams of every prefill
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.suspended = 0
        self._streams: dict[int, dict[str, int]] = {}
        self._interrupted = False

    @property
    def busy(self) -> set[int]:
        return set(self._streams)

    def prefill(self, starts: Sequence[PrefillRequest]) -> None:
        self.threads.add(threading.get_ident())
        if unable := {start.sampling.seed for start in starts} & self.unable:
            raise ArithmeticError(f"unable seed {unable.pop()}")
        for start in starts:
            seed = start.sampling.seed
            assert start.slot not in self._streams, "the slot is taken"
            assert seed is not None
            self.prompts.append(len(start.prompt))
            self.starts.append((seed, start.first_frame))
            self._streams[start.slot] = {
                "seed": seed, "first": start.first_frame, "frames": 0, "fed": 0, "ended": 0,
            }  # fmt: skip
        self.together.append(len(starts))
        self.events.append("prefill")

    def clear_prefix_cache(self) -> None:
        pass

    def feed(self, slot: int, text: Tensor, last: bool) -> None:
        stream = self._streams[slot]
        assert not stream["ended"] or len(text) == 0, "text after its end"
        stream["fed"] += len(text)
        stream["ended"] = int(last)

    def interrupt(self) -> None:
        self._interrupted = True

    def clear_interrupt(self) -> None:
        self._interrupted = False

    def step(
        self,
        slots: Sequence[int],
        frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        overlap()
        self.threads.add(threading.get_ident())
        self.asked.append(frames)
        before = {slot: dict(self._streams[slot]) for slot in slots}
        made: dict[int, list[Tensor | None]] = {slot: [] for slot in slots}
        coming = {slot: np.full((frames, 16), 9999, np.int32) for slot in slots}
        moving = list(slots)
        for i in range(frames):
            if i + 1 == frames:
                on_last_frame([*coming.values()])
            self.gate.wait()
            self.batches.append(len(moving))
            self.events.append("frame")
            for slot in moving:
                stream = self._streams[slot]
                if self.poisoned.get(stream["seed"]) == stream["frames"]:
                    self._streams |= before
                    raise ArithmeticError(f"poisoned seed {stream['seed']}")
                codes = self._frame(stream)
                made[slot].append(codes)
                if codes is not None:
                    coming[slot][i] = codes
            moving = [slot for slot in moving if made[slot][-1] is not None and self._fed(slot)]
            if self._interrupted or not moving:
                break
        return [_frames(made[slot]) for slot in slots]

    def _fed(self, slot: int) -> bool:
        stream = self._streams[slot]
        return stream["frames"] <= stream["fed"] or bool(stream["ended"])

    def _frame(self, stream: dict[str, int]) -> Tensor | None:
        t = stream["frames"]
        assert t <= stream["fed"] or stream["ended"], "stepped before its text arrived"
        endless = self.endless or stream["seed"] in self.runaway
        if stream["ended"] and self._ends(stream) and not endless:
            return None
        stream["frames"] += 1
        return codes_of(stream["seed"], stream["first"] + t)

    def _ends(self, stream: dict[str, int]) -> bool:
        """Whether a stream ends that has all of its text."""
        return stream["frames"] >= stream["fed"] + self.tail

    def release(self, slot: int) -> None:
        self._streams.pop(slot, None)

    def swap_out(self, slot: int) -> SlotSnapshot[dict[str, int]]:
        self.suspended += 1
        return SlotSnapshot(self._streams.pop(slot), ())

    def swap_in(self, slot: int, suspended: SlotSnapshot[dict[str, int]]) -> None:
        assert slot not in self._streams, "the slot is taken"
        self.events.append("resume")
        self._streams[slot] = suspended.state


class ExpectingVocoder(TorchVocoder):
    """Takes note of what is expected of it, and of calls at the wrong time.

    Attributes:
        settled: Of every part that was expected: frames, and how many of them there were.
        violations: What was called when it must not be.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self.settled: list[tuple[int, int]] = []
        self.violations: list[str] = []
        self._busy = False  # until what was begun has been awaited

    def _begin(self, what: str) -> None:
        if self._busy:
            self.violations.append(what)
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
        settle = super().decode_pending(requests)

        def settled(counts: Sequence[int]) -> PendingSamples:
            self.settled += zip((request.num_frames for request in requests), counts, strict=True)
            self._busy = False
            return settle(counts)

        return settled


def _frames(made: list[Tensor | None]) -> Frames:
    codes = [frame for frame in made if frame is not None]
    return Frames(
        torch.stack(codes) if codes else torch.zeros(0, 16).long(), len(codes) < len(made)
    )


def codes_of(seed: int, frame: int) -> Tensor:
    """The codes that `ScriptedBackend` makes."""
    generator = torch.Generator().manual_seed(1000 * seed + frame)
    return torch.randint(0, 256, (16,), generator=generator)
