"""What backends have in common: how a stream starts, how far it is, what a step gives for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.sampling import Sampling

# Where the codes of the frames that are being made will be, [frames, groups] of each slot.
Coming = Sequence[NDArray[np.int32]]


@dataclass(frozen=True)
class Start:
    """How a stream starts.

    Attributes:
        slot: A free one.
        prompt: [positions, hidden], the talker's input vectors, on the host.
        sampling: With a seed.
        first_frame: The number that the random generator knows the first frame by.
        common: How many leading positions other prompts may begin with, too: those that do not
            depend on the text. At most all but the last.
    """

    slot: int
    prompt: Tensor
    sampling: Sampling
    first_frame: int = 0
    common: int = 0

    def check(self, positions: int) -> None:
        """Whether it can be run in a slot of so many positions.

        Raises:
            ValueError: The prompt leaves no position for a frame, or nothing of it is its own.
        """
        if len(self.prompt) >= positions:
            raise ValueError(f"A prompt of {len(self.prompt)} does not fit {positions} positions.")
        if not 0 <= self.common < len(self.prompt):
            raise ValueError(
                f"{self.common} positions of a prompt of {len(self.prompt)} are said to be common; "
                "the last one must be its own."
            )

    def prefix(self, positions: int) -> bytes:
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
class Progress:
    """How far the stream in a slot has come.

    Attributes:
        prompt: Positions of its prompt.
        frames: Made so far.
        fed: Text vectors that are there.
        ended: Whether padding follows them.
    """

    prompt: int
    frames: int = 0
    fed: int = 0
    ended: bool = False

    @property
    def has_text(self) -> bool:
        """Whether the text of the next frame is there."""
        return self.frames <= self.fed or self.ended

    def known(self, scores: Tensor, positions: int) -> Tensor:
        """The next frames' scores [frames, heads, at least positions], NaN where there is no key.

        Frame f comes from position prompt + f - 1, but for frame 0, which comes from the prompt.
        """
        frame = self.frames + torch.arange(len(scores))[:, None, None]
        there = (torch.arange(positions) < self.prompt + frame) & (frame > 0)
        return scores[..., :positions].masked_fill(~there, torch.nan)

    def check(self, slot: int, positions: int) -> None:
        """Whether the next frame can be made, in a slot of so many positions.

        Raises:
            RuntimeError: Its text has not arrived.
            ValueError: There is no position for it.
        """
        if not self.has_text:
            raise RuntimeError(
                f"Slot {slot} was stepped before the text of frame {self.frames - 1} arrived."
            )
        if self.prompt + self.frames >= positions:
            raise ValueError(f"Slot {slot} is full: it has {positions} positions.")
