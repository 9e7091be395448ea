"""The segment of text that a stream speaks at present: text fed, frames made, codes not decoded."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.backends.protocol import Frames
from megakernel_tts.backends.slot_snapshot import SlotSnapshot
from megakernel_tts.session import FinishReason
from megakernel_tts.text.text_queue import TextSegment


def _no_codes() -> NDArray[np.int64]:
    return np.zeros((0, 0), np.int64)


class SwappedState(NamedTuple):
    """State of a stream that is swapped out: copies of both of its slots.

    Attributes:
        backend: From `Backend.swap_out`.
        vocoder: From `Vocoder.save_slot`.
    """

    backend: SlotSnapshot[Any]
    vocoder: Any


@dataclass(eq=False)
class Segment:
    """Progress of a text segment from prompt to last frame; written by the engine thread.

    A frame is pending when its codes are known, then decoding while it is in the decode pipeline's
    batch, then delivered.

    Attributes:
        text: The text; the session may still be adding to it.
        num_prompt: Positions of the prompt.
        max_frames: Frame limit: the request's, or the positions of the slot behind the prompt.
        num_tokens: Tokens of the text that the backend has, in the prompt or fed.
        num_fed: Text vectors fed after the prompt.
        text_complete: Whether the backend has the whole text and its end; padding follows.
        num_frames: Frames made so far, without those that the guard cut off.
        pending: Codes [frames, groups] of the pending frames.
        num_decoding: Number of frames in the decode pipeline's batch.
        outcome: How the segment ended; None before its end.
        error: The failure if `outcome` is `error`.
        last_step_s: Clock time of the last step, in seconds.
    """

    text: TextSegment
    num_prompt: int
    max_frames: int
    num_tokens: int
    num_fed: int
    text_complete: bool
    last_step_s: float
    num_frames: int = 0
    pending: NDArray[np.int64] = field(default_factory=_no_codes)
    num_decoding: int = 0
    outcome: FinishReason | None = None
    error: Exception | None = None
    _swapped: SwappedState | None = field(default=None, init=False)

    @property
    def ready(self) -> bool:
        """Whether the next frame's text vector is there. Frame t + 1 needs text vector t."""
        return self.outcome is None and (self.num_frames <= self.num_fed or self.text_complete)

    @property
    def num_next_positions(self) -> int:
        """Positions that the slot must have for the next frame."""
        return self.num_prompt + self.num_frames

    @property
    def num_possible(self) -> int:
        """Frames that can be made with the text fed so far."""
        limit = self.max_frames if self.text_complete else min(self.max_frames, self.num_fed + 1)
        return limit - self.num_frames

    @property
    def used_up_at(self) -> int | None:
        """The frame before which the talker had been fed the whole text; None if more follows."""
        return self.num_fed if self.text_complete else None

    def add_text(self, num_tokens: int, num_vectors: int, *, text_complete: bool) -> None:
        """Records text that was fed to the backend.

        Args:
            num_tokens: New tokens.
            num_vectors: New text vectors: one for each token, and one for the end of the text.
            text_complete: Whether no text follows them.
        """
        self.num_tokens += num_tokens
        self.num_fed += num_vectors
        self.text_complete = text_complete

    def within_limit(self, frames: Frames) -> Frames:
        """Drops the frames of a step beyond the frame limit, and an end behind it."""
        num_left = self.max_frames - self.num_frames
        if frames.codes.shape[0] < num_left:
            return frames
        scores = None if frames.scores is None else frames.scores[:num_left]
        return Frames(frames.codes[:num_left], False, scores)

    def add_frames(self, frames: Frames, now_s: float) -> None:
        """Adds frames from a step, within the limit; the segment may end with them."""
        self.last_step_s = now_s
        codes = frames.codes.numpy()
        self.pending = np.concatenate([self.pending, codes]) if len(self.pending) else codes
        self.num_frames += len(codes)
        if frames.ended:
            self.outcome = "eos"
        elif self.num_frames >= self.max_frames:
            self.outcome = "length"

    def swap_out(self, state: SwappedState) -> None:
        """Keeps a copy of the state of the stream's slot, which the stream leaves."""
        assert self.num_decoding == 0, "the slot's codes are being decoded"
        self._swapped = state

    def swap_in(self) -> SwappedState:
        """Returns and drops the copy, which is loaded into another slot."""
        assert self._swapped is not None, "the stream was not swapped out"
        state, self._swapped = self._swapped, None
        return state

    def start_decoding(self, num_frames: int) -> None:
        """Moves the first pending frames to the decode pipeline's batch."""
        assert self.num_decoding == 0, "the earlier batch was not delivered"
        self.num_decoding = num_frames
        self.pending = self.pending[num_frames:]

    def stop_decoding(self) -> None:
        """Records that the decode pipeline's batch is complete."""
        self.num_decoding = 0

    def cut(self, num_frames: int) -> None:
        """Ends the segment after its first `num_frames` frames, because it ran away."""
        self.num_frames = num_frames
        self.pending = _no_codes()
        if self.outcome != "error":
            self.outcome = "guard"

    def fail(self, error: Exception) -> None:
        """Ends the segment with an error; frames made before it are still delivered."""
        self.outcome, self.error = "error", error

    def fail_decoding(self, error: Exception) -> None:
        """Ends the segment with an error of the codec: nothing after a gap is delivered."""
        self.num_decoding = 0
        self.pending = _no_codes()
        self.fail(error)
