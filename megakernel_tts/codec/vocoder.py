"""Codes -> samples, for the streams in a backend's slots: CUDA kernels, or plain torch."""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megakernel_tts.audio import pcm16
from megakernel_tts.codec.decoder import Decoder, DecodeRequest, PendingDecodeRequest, State

if TYPE_CHECKING:
    from megakernel_tts.codec import weights as w
    from megakernel_tts.model.config import CodecConfig

_log = logging.getLogger("megakernel_tts")

PendingSamples = Callable[[], Sequence[NDArray[np.int16] | None]]
ConfirmFrames = Callable[[Sequence[int]], PendingSamples]


class Vocoder(Protocol):
    """The codec's decoder for a fixed number of slots, one stream a slot; one thread calls it.

    A method that raises leaves every slot as it was.

    Attributes:
        max_pending_frames: Largest number of frames of a request to `decode_pending`; 0
            disables it.
    """

    max_pending_frames: int

    @property
    def sample_rate(self) -> int:
        """In Hz."""
        ...

    def prepare_state(self, state: State) -> Any:
        """What `load_slot` takes, of what plain torch carries for one stream."""
        ...

    def load_slot(self, slot: int, state: Any) -> None:
        """Puts a stream into a slot, where it goes on from a state."""
        ...

    def save_slot(self, slot: int) -> Any:
        """A copy of a slot's state, for `load_slot`."""
        ...

    def decode(self, requests: Sequence[DecodeRequest]) -> PendingSamples:
        """Begins to decode the next frames of several streams, each as many as it has.

        Returns:
            What waits for them and gives for every part its samples, or None if they were not
            finite. Meanwhile nothing is called but `load_slot` of other slots.

        Raises:
            FloatingPointError: Some were not, and it is not known whose; at once, or when awaited.
        """
        ...

    def decode_pending(self, requests: Sequence[PendingDecodeRequest]) -> ConfirmFrames:
        """Begins to decode frames that are still being made, right behind what makes them.

        Args:
            requests: Every slot at most once, of at most eight slots.

        Returns:
            What is told, once it is known, how many frames of each part there are, from the first
            on; the others never were. It gives what `decode` gives, for the requests that have any.
            Until that was awaited, nothing is called but `load_slot` of other slots.
        """
        ...


class TorchVocoder:
    """A `Vocoder` in plain torch: streams with as many frames go together."""

    def __init__(self, decoder: Decoder) -> None:
        """Streams share the decoder's weights."""
        self.max_pending_frames = sys.maxsize
        self._decoder = decoder
        self._states: dict[int, State] = {}

    @property
    def sample_rate(self) -> int:
        """In Hz."""
        return self._decoder.sample_rate

    def prepare_state(self, state: State) -> State:
        """The state itself."""
        return state

    def load_slot(self, slot: int, state: State) -> None:
        """See `Vocoder.load_slot`."""
        self._states[slot] = state

    def save_slot(self, slot: int) -> State:
        """The state itself: it never changes."""
        return self._states[slot]

    def decode(self, requests: Sequence[DecodeRequest]) -> PendingSamples:
        """See `Vocoder.decode`; it decodes at once."""
        lengths = {len(codes): None for _, codes in requests}
        after: dict[int, State] = {}
        samples: dict[int, NDArray[np.int16]] = {}
        for length in lengths:
            slots = [slot for slot, codes in requests if len(codes) == length]
            codes = torch.stack([codes for _, codes in requests if len(codes) == length])
            state = State.stack([self._states[slot] for slot in slots])
            waves, state = self._decoder.decode(codes.to(state.position.device), state)
            after |= zip(slots, state.split(), strict=True)
            samples |= zip(slots, pcm16(waves.float().cpu().numpy()), strict=True)
        self._states |= after
        return lambda: [samples[slot] for slot, _ in requests]

    def decode_pending(self, requests: Sequence[PendingDecodeRequest]) -> ConfirmFrames:
        """See `Vocoder.decode_pending`; it decodes once it is told how many frames there are."""
        return partial(self._settle, requests)

    def _settle(
        self, requests: Sequence[PendingDecodeRequest], counts: Sequence[int]
    ) -> PendingSamples:
        codes = [torch.from_numpy(np.concatenate([p.known, p.pending])) for p in requests]
        counted = zip(requests, codes, counts, strict=True)
        return self.decode(
            [DecodeRequest(p.slot, some[:count]) for p, some, count in counted if count]
        )


def choose_vocoder(
    decoder: Decoder, weights: "w.Decoder", config: "CodecConfig", *, slots: int, kernels: bool
) -> Vocoder:
    """The kernels, where the networks run as kernels, too, and they fit the codec.

    Args:
        decoder: In plain torch.
        weights: Its weights.
        config: Its numbers.
        slots: Streams at a time.
        kernels: Whether the networks run as kernels.
    """
    if kernels:
        from megakernel_tts.codec.cuda_decoder import CudaDecoder

        try:
            vocoder = CudaDecoder(weights, config, slots=slots)
        except ValueError as error:
            _log.warning("The codec runs in plain torch: %s", error)
        else:
            vocoder.warmup()
            return vocoder
    return TorchVocoder(decoder)
