"""What backends have in common: how a stream starts, how far it is, what a step gives for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.backends.slot_snapshot import SlotSnapshot
from megakernel_tts.sampling import Sampling

# Where the codes of the frames that are being made will be, [frames, groups] of each slot.
PendingCodes = Sequence[NDArray[np.int32]]


@dataclass(frozen=True)
class PrefillRequest:
    """How a stream starts.

    Attributes:
        slot: A free one.
        prompt: [positions, hidden], the talker's input vectors, on the host.
        sampling: With a seed.
        first_frame: The number that the random generator knows the first frame by.
        num_common: How many leading positions other prompts may begin with, too: those that do not
            depend on the text. At most all but the last.
    """

    slot: int
    prompt: Tensor
    sampling: Sampling
    first_frame: int = 0
    num_common: int = 0

    def check(self, positions: int) -> None:
        """Whether it can be run in a slot of so many positions.

        Raises:
            ValueError: The prompt leaves no position for a frame, or nothing of it is its own.
        """
        if len(self.prompt) >= positions:
            raise ValueError(f"A prompt of {len(self.prompt)} does not fit {positions} positions.")
        if not 0 <= self.num_common < len(self.prompt):
            raise ValueError(
                f"{self.num_common} positions of a prompt of {len(self.prompt)} are said to be "
                "common; the last one must be its own."
            )

    def prefix_key(self, positions: int) -> bytes:
        """The content of so many leading positions: what a `PrefixCache` knows them by."""
        return self.prompt[:positions].contiguous().view(torch.uint8).numpy().tobytes()


class Frames(NamedTuple):
    """A stream's next frames.

    Attributes:
        codes: [frames, groups] (int64, on the host).
        ended: Whether the speech ends after them.
        scores: Of the heads that the backend watches, [frames, heads, positions] (float32, on the
            host): each frame's query against the keys so far, before the softmax. NaN where there
            is no key yet, and for a first frame, which comes from the prompt.
    """

    codes: Tensor
    ended: bool
    scores: Tensor | None = None


@dataclass(kw_only=True)
class SlotProgress:
    """How far the stream in a slot has come.

    Attributes:
        prompt: Positions of its prompt.
        frames: Made so far.
        fed: Text vectors that are there.
        ended: Whether padding follows them.
    """

    num_prompt: int
    num_frames: int = 0
    num_fed: int = 0
    text_ended: bool = False

    @property
    def has_text(self) -> bool:
        """Whether the text of the next frame is there."""
        return self.num_frames <= self.num_fed or self.text_ended

    def mask_scores(self, scores: Tensor, positions: int) -> Tensor:
        """The next frames' scores [frames, heads, at least positions], NaN where there is no key.

        Frame f comes from position prompt + f - 1, but for frame 0, which comes from the prompt.
        """
        frame = self.num_frames + torch.arange(len(scores))[:, None, None]
        there = (torch.arange(positions) < self.num_prompt + frame) & (frame > 0)
        return scores[..., :positions].masked_fill(~there, torch.nan)

    def check(self, slot: int, positions: int) -> None:
        """Whether the next frame can be made, in a slot of so many positions.

        Raises:
            RuntimeError: Its text has not arrived.
            ValueError: There is no position for it.
        """
        if not self.has_text:
            raise RuntimeError(
                f"Slot {slot} was stepped before the text of frame {self.num_frames - 1} arrived."
            )
        if self.num_prompt + self.num_frames >= positions:
            raise ValueError(f"Slot {slot} is full: it has {positions} positions.")


class Backend(Protocol):
    """Talker, code predictor and sampling for a fixed number of slots, one stream a slot.

    A stream: `prefill`, then `feed` as its text becomes known and `step` for its frames, then
    `release`. Between steps it may be taken out of its slot and put into another. Frame t + 1
    needs text vector t (frame 0 needs none): the caller steps a slot only if that vector was fed or
    the text was ended, after which padding takes its place.

    A method that raises leaves every slot as it was. One thread calls them all but `interrupt`.
    """

    name: str
    num_slots: int
    max_positions: int  # prompt and frames of one stream together

    def prefill(self, starts: Sequence[PrefillRequest]) -> None:
        """Starts streams: each as if it were alone, whatever prompts were run before.

        Raises:
            ValueError: A prompt does not fit a slot.
        """
        ...

    def clear_prefix_cache(self) -> None:
        """Drops what it keeps of earlier prompts; nobody may be in a call meanwhile."""
        ...

    def feed(self, slot: int, text: Tensor, last: bool) -> None:
        """Queues text vectors [n, hidden], on the host; `last`: no more will come."""
        ...

    def step(
        self,
        slots: Sequence[int],
        frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        """Makes up to so many frames for each slot, however many it is asked for the same ones.

        Every stream makes at least one, or ends. Fewer than asked for are made where speech ends,
        text runs dry, the step is interrupted, or the backend has no room for more.

        Args:
            slots: Each once.
            frames: At most, of each.
            overlap: What the caller does beside the device's work; it must not raise. Called
                once, unless the step fails before.
            on_last_frame: Called at most once, after `overlap`, while the last frame is being made
                (or after it), by a backend whose device writes codes where its other work can read
                them; it must not raise. Its argument says where the codes will be: work that it
                gives the device runs behind the step, which returns how many of them are frames.

        Raises:
            DeviceError: It is not the fault of any one of the streams.
            RuntimeError: The text of a slot's next frame has not arrived.
            ValueError: A slot has no position left.
        """
        ...

    def interrupt(self) -> None:
        """Ends a step under way with the frame at hand, and later ones after their first.

        Until `clear_interrupt`. Any thread may call it, and any finaliser: it takes no lock.
        """
        ...

    def clear_interrupt(self) -> None:
        """Takes interruptions back: steps are as long as they are asked to be again."""
        ...

    def release(self, slot: int) -> None:
        """Frees a slot at any time."""
        ...

    def swap_out(self, slot: int) -> SlotSnapshot[Any]:
        """Frees a slot and gives, in the host's memory, all that its stream needs to go on."""
        ...

    def swap_in(self, slot: int, suspended: SlotSnapshot[Any]) -> None:
        """Puts a suspended stream into a free slot; it goes on as if it had never left."""
        ...
