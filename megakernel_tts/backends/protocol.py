"""The interface of a backend: requests, results, and the `Backend` protocol."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.backends.slot_snapshot import SlotSnapshot
from megakernel_tts.sampling import Sampling

LOW_LATENCY_STREAMS = 8  # up to so many, 0.1 ms of the host in a step shows in the latency

# For each slot of a step, host memory [frames, groups] that receives the codes of its frames.
PendingCodes = Sequence[NDArray[np.int32]]


@dataclass(frozen=True)
class PrefillRequest:
    """The start of a stream, or a later chunk of its prompt.

    Attributes:
        slot: A free slot, or the one in which the prompt's earlier positions are.
        prompt: [positions, hidden], the talker's input vectors, on the host.
        sampling: Sampling parameters, with a seed.
        first_frame: Number of the first frame in the random generator's counter.
        num_common: Leading positions that do not depend on the text, so that a prefix cache may
            hold them; at most all but the last.
        begin: Positions that are in place already: what the last prefill of the slot returned.
    """

    slot: int
    prompt: Tensor
    sampling: Sampling
    first_frame: int = 0
    num_common: int = 0
    begin: int = 0

    @property
    def num_positions(self) -> int:
        """Positions of the prompt."""
        return self.prompt.shape[0]  # `len` of a tensor is a function in Python

    def check(self, max_positions: int) -> None:
        """Checks that the prompt can be run.

        Args:
            max_positions: Positions of a slot.

        Raises:
            ValueError: The prompt leaves no position for a frame, or has no position of its own.
        """
        num_positions = self.num_positions
        if num_positions >= max_positions:
            raise ValueError(f"A prompt of {num_positions} does not fit {max_positions} positions.")
        if not 0 <= self.num_common < num_positions:
            raise ValueError(
                f"{self.num_common} positions of a prompt of {num_positions} are said to be "
                "common; the last one must be its own."
            )
        if not 0 <= self.begin < num_positions:
            raise ValueError(
                f"{self.begin} positions of a prompt of {num_positions} are said to be in "
                "place; at least the last one must be left to run."
            )

    def prefix_key(self, num_positions: int) -> bytes:
        """Returns the content of the leading positions, the key of a `PrefixCache`."""
        prompt = self.prompt.contiguous()
        row_bytes = prompt.shape[1] * prompt.element_size()
        return ctypes.string_at(prompt.data_ptr(), num_positions * row_bytes)


class PrefillResult(NamedTuple):
    """What a prefill did.

    Attributes:
        in_place: Of each request, the positions of its prompt that are in place. A stream has
            started if they are all.
        num_run: Positions that were run; copies from the prefix cache are not counted.
    """

    in_place: Sequence[int]
    num_run: int


class Frames(NamedTuple):
    """A stream's next frames.

    Attributes:
        codes: [frames, groups] int64, on the host.
        ended: Whether the speech ends after them: code 0 of the next frame is the end of speech.
        scores: [frames, captured heads, positions] float32, on the host: the scores of each
            frame's query against the keys, scaled, before the softmax. NaN where there is no key
            yet, and for a stream's first frame, which comes from the prompt. None if no heads are
            captured.
    """

    codes: Tensor
    ended: bool
    scores: Tensor | None = None


@dataclass(kw_only=True)
class SlotProgress:
    """Progress of the stream in a slot.

    Attributes:
        num_prompt: Positions of its prompt.
        num_frames: Frames made.
        num_fed: Text vectors fed after the prompt.
        text_complete: Whether no more text follows; padding takes the place of further vectors.
    """

    num_prompt: int
    num_frames: int = 0
    num_fed: int = 0
    text_complete: bool = False

    @property
    def has_text(self) -> bool:
        """Whether the next frame's text vector is there; frame t + 1 needs text vector t."""
        return self.num_frames <= self.num_fed or self.text_complete

    @property
    def num_positions(self) -> int:
        """Positions whose keys and values exist; the last frame has none before the next one."""
        return self.num_prompt + max(self.num_frames - 1, 0)

    def mask_scores(self, scores: Tensor, num_positions: int) -> Tensor:
        """Sets the scores of the next frames to NaN where there is no key.

        Frame f comes from position `num_prompt` + f - 1, but frame 0 from the prompt.

        Args:
            scores: [frames, heads, at least num_positions].
            num_positions: Positions to return.

        Returns:
            [frames, heads, num_positions].
        """
        frame = self.num_frames + torch.arange(len(scores))[:, None, None]
        has_key = (torch.arange(num_positions) < self.num_prompt + frame) & (frame > 0)
        return scores[..., :num_positions].masked_fill(~has_key, torch.nan)

    def check(self, slot: int, max_positions: int) -> None:
        """Checks that the next frame can be made.

        Args:
            slot: The stream's slot, for the message.
            max_positions: Positions of a slot.

        Raises:
            RuntimeError: Its text has not arrived.
            ValueError: There is no position for it.
        """
        if not self.has_text:
            raise RuntimeError(
                f"Slot {slot} was stepped before the text of frame {self.num_frames - 1} arrived."
            )
        if self.num_prompt + self.num_frames >= max_positions:
            raise ValueError(f"Slot {slot} is full: it has {max_positions} positions.")


class Backend(Protocol):
    """Talker, code predictor and sampling for a fixed number of slots, one stream a slot.

    A stream is started by `prefill`. Then `feed` adds text vectors and `step` makes frames,
    until `release`. Between steps it can be swapped out of its slot and into another. Frame t + 1
    needs text vector t and frame 0 needs none. The caller steps a slot only if that vector was fed
    or its text is complete; after the text, padding takes the place of text.

    A method that raises leaves every slot as it was. All methods but `interrupt` are called by one
    thread.

    Slots may share memory that is smaller than what all of them could use; see `reserve`.

    Attributes:
        name: Name of the implementation.
        num_slots: Number of slots.
        max_streams: Streams that one launch steps. A step of more takes several, one after another.
        max_positions: Positions of a slot, for prompt and frames together.
        blocking: Whether `prefill` returns when the prompts have been run, instead of before.
    """

    name: str
    num_slots: int
    max_streams: int
    max_positions: int
    blocking: bool

    def prepare(self) -> None:
        """Calls the device, so that the next call is fast: the first one after a pause is slow."""
        ...

    def reserve(self, slot: int, num_positions: int, *, beginning: bool = False) -> bool:
        """Gives a slot memory for its first positions, if it lacks some and there is enough.

        `prefill`, `step` and `swap_in` do so themselves, and raise where there is too little. A
        caller that reserves positions before knows that they do not: for a prompt, one position
        more than the prompt has; for a frame, one more than the stream has. `release` and
        `swap_out` free all memory of a slot.

        Args:
            slot: The slot.
            num_positions: Positions that it must have.
            beginning: Whether a stream is to begin or to be swapped in. Then memory must be left
                for every other stream to grow.

        Returns:
            Whether the slot has memory for the positions.
        """
        ...

    def prefill(
        self, requests: Sequence[PrefillRequest], budget: int | None = None
    ) -> PrefillResult:
        """Runs prompts, or chunks of them, in the order of the requests.

        A stream starts when its whole prompt is in place. Its codes depend neither on other streams
        and earlier prompts, nor on the chunks in which its prompt was run: the backend divides a
        prompt at positions of its own choice.

        Args:
            requests: At most one per slot.
            budget: Positions to run at most, except that the first request gets at least one chunk.
                None runs all.

        Raises:
            MemoryError: The memory that slots share has no room for a prompt.
            ValueError: A prompt does not fit a slot.
        """
        ...

    def clear_prefix_cache(self) -> None:
        """Drops cached prefixes; no other call may be under way."""
        ...

    def feed(self, slot: int, text: Tensor, text_complete: bool) -> None:
        """Queues text for a stream.

        Args:
            slot: The stream's slot.
            text: Text vectors [n, hidden], on the host.
            text_complete: Whether no text follows them.
        """
        ...

    def step(
        self,
        slots: Sequence[int],
        num_frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        """Makes up to `num_frames` frames for each slot.

        Every stream makes at least one frame, or ends. A stream makes fewer than `num_frames` if
        its speech ends or its text runs dry. All make fewer if the step is interrupted, or if the
        backend's buffers hold no more. The codes do not depend on the length of the steps.

        Args:
            slots: Slots to step, each once.
            num_frames: Frames of each at most.
            overlap: Called once while the device works, unless the step fails before; must not
                raise.
            on_last_frame: Called at most once, while the last frame is being made or after it:
                before `overlap` if that is the first frame. Must not raise. Its argument is where
                the codes will be. Device work that it launches runs behind the step. The step's
                result says how many of the frames exist. A backend whose device cannot read codes
                before the host does not call it.

        Raises:
            DeviceError: The device failed; no single stream is at fault.
            MemoryError: The memory that slots share has no room for the next frame of a slot.
            RuntimeError: The text of a slot's next frame has not arrived.
            ValueError: A slot has no position left.
        """
        ...

    def interrupt(self) -> None:
        """Ends a step with the frame under way, until `clear_interrupt`; later ones make one frame.

        Takes no lock, so that any thread and any finaliser may call it.
        """
        ...

    def clear_interrupt(self) -> None:
        """Ends the effect of `interrupt`."""
        ...

    def release(self, slot: int) -> None:
        """Frees a slot, between other calls or in a step's `overlap`; there, one not stepped."""
        ...

    def swap_out(self, slot: int) -> SlotSnapshot[Any]:
        """Frees a slot and returns its stream's state, in host memory."""
        ...

    def swap_in(self, slot: int, snapshot: SlotSnapshot[Any]) -> None:
        """Puts a stream that was swapped out into a free slot; its codes do not change.

        Raises:
            MemoryError: The memory that slots share has no room for the stream.
        """
        ...
