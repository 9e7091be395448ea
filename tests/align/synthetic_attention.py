"""Synthetic attention scores: each frame attends to one token."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.backends.protocol import Frames, PendingCodes, PrefillRequest, PrefillResult
from megakernel_tts.codec.decoder import Decoder, State
from tests.fakes import ScriptedBackend

SAMPLE_RATE = 24_000
SAMPLES_PER_FRAME = 1920
FRAMES_PER_TOKEN = 3


def attending(
    attended: Sequence[int], num_tokens: int, *, first: bool = True, num_heads: int = 1
) -> NDArray[np.float32]:
    """Scores of heads that attend to one token per frame.

    Args:
        attended: The token that each frame attends to.
        num_tokens: Tokens with keys.
        first: Whether the first frame is that of the prompt, which has no scores.
        num_heads: Heads with equal scores.

    Returns:
        [frames, heads, tokens].
    """
    scores = np.full((len(attended), num_heads, num_tokens), -6.0, np.float32)
    for frame, token in enumerate(attended):
        scores[frame, :, token] = 6.0
    if first:
        scores[0] = np.nan
    return scores


def loud_frames(audible: Sequence[bool]) -> NDArray[np.int16]:
    """Samples [frames, samples per frame] that are loud where `audible` is true."""
    return np.repeat(np.array(audible, np.int16)[:, None] * 3000, SAMPLES_PER_FRAME, axis=1)


class SyntheticAttentionBackend(ScriptedBackend):
    """A streaming-layout backend that spends `FRAMES_PER_TOKEN` frames on every token."""

    def __init__(self, num_slots: int = 2) -> None:
        super().__init__(num_slots)
        self._starts: dict[int, int] = {}  # the position of each stream's first token

    def prefill(
        self, requests: Sequence[PrefillRequest], budget: int | None = None
    ) -> PrefillResult:
        self._starts |= {request.slot: len(request.prompt) - 1 for request in requests}
        return super().prefill(requests, budget)

    def step(
        self,
        slots: Sequence[int],
        num_frames: int,
        overlap: Callable[[], object] = lambda: None,
        on_last_frame: Callable[[PendingCodes], object] = lambda pending_codes: None,
    ) -> list[Frames]:
        before = {slot: self._streams[slot]["frames"] for slot in slots}
        return [
            made._replace(scores=self._scores(slot, before[slot], len(made.codes)))
            for slot, made in zip(
                slots, super().step(slots, num_frames, overlap, on_last_frame), strict=True
            )
        ]

    def _scores(self, slot: int, first: int, count: int) -> Tensor:
        start = self._starts[slot]
        scores = np.full((count, 1, self.max_positions), np.nan, np.float32)
        for frame in range(max(first, 1), first + count):
            scores[frame - first, :, : start + 1 + frame] = -6.0
            token = min(frame // FRAMES_PER_TOKEN, self._streams[slot]["fed"] - 1)
            scores[frame - first, :, start + token] = 6.0
        return torch.from_numpy(scores)

    def _ends(self, stream: dict[str, int]) -> bool:
        return stream["frames"] >= FRAMES_PER_TOKEN * stream["fed"]


class LoudDecoder(Decoder):
    """A decoder whose samples are all loud."""

    def __init__(self) -> None:
        self.sample_rate = SAMPLE_RATE

    def start(self, batch: int = 1) -> State:
        nothing = torch.zeros(0, batch, 0)
        return State((), nothing, nothing, torch.zeros(batch, dtype=torch.long))

    def decode(self, codes: Tensor, state: State) -> tuple[Tensor, State]:
        return torch.full((len(codes), codes.shape[1] * SAMPLES_PER_FRAME), 0.5), replace(state)
