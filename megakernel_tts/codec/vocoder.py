"""The vocoder protocol: codes to samples for the streams in a backend's slots.

There are two implementations: `TorchVocoder` in plain torch, and `cuda_decoder.CudaDecoder`.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megakernel_tts.audio import pcm16
from megakernel_tts.codec.cuda_decoder import CudaDecoder
from megakernel_tts.codec.decoder import Decoder, DecodeRequest, PendingDecodeRequest, State

if TYPE_CHECKING:
    from megakernel_tts.codec import weights as w
    from megakernel_tts.model.config import CodecConfig

_log = logging.getLogger("megakernel_tts")

# Waits for a decode and returns the samples of each request, int16 [frames * samples per frame];
# None for a request whose samples are not finite. Each is an array of its own: one that a reader
# keeps does not keep the others.
PendingSamples = Callable[[], Sequence[NDArray[np.int16] | None]]
# Takes the number of frames of each request that were generated.
ConfirmFrames = Callable[[Sequence[int]], PendingSamples]


class Vocoder(Protocol):
    """The codec's decoder for a fixed number of slots, one stream per slot.

    One thread calls it. A method that raises leaves the state of every slot unchanged.

    Attributes:
        max_pending_frames: Largest number of frames of a request to `decode_pending`; 0 disables
            it.
        max_pending_total: Largest number of frames of all requests of a call together.
    """

    max_pending_frames: int
    max_pending_total: int

    @property
    def sample_rate(self) -> int:
        """In Hz."""
        ...

    def prepare_state(self, state: State) -> Any:
        """Converts the state of one stream in plain torch to the argument of `load_slot`."""
        ...

    def load_slot(self, slot: int, state: Any) -> None:
        """Sets the state of a slot; the next frames in it continue from there."""
        ...

    def save_slot(self, slot: int) -> Any:
        """Returns a copy of a slot's state, for `load_slot`."""
        ...

    def decode(self, requests: Sequence[DecodeRequest]) -> PendingSamples:
        """Starts decoding the next frames of several streams; their numbers may differ.

        Args:
            requests: At most one per slot.

        Returns:
            A function that waits for the samples. Until it returns, only `load_slot` of other
            slots may be called.

        Raises:
            FloatingPointError: Samples are not finite and their request is unknown; raised here or
                by the returned function.
        """
        ...

    def decode_pending(self, requests: Sequence[PendingDecodeRequest]) -> ConfirmFrames:
        """Starts decoding frames whose codes are still being generated on the device.

        Args:
            requests: At most one per slot, with `max_pending_total` frames at most.

        Returns:
            A function to call once the codes are complete, with the number of frames of each
            request that were generated; the remaining frames are discarded. It returns the same as
            `decode`, for the requests with at least one frame. Until the samples are received, only
            `load_slot` of other slots may be called.
        """
        ...


class TorchVocoder:
    """A `Vocoder` in plain torch; requests of equal length are decoded as one batch."""

    def __init__(self, decoder: Decoder) -> None:
        """Uses the decoder's weights and device."""
        self.max_pending_frames = self.max_pending_total = sys.maxsize
        self._decoder = decoder
        self._states: dict[int, State] = {}

    @property
    def sample_rate(self) -> int:
        """In Hz."""
        return self._decoder.sample_rate

    def prepare_state(self, state: State) -> State:
        """Returns the state itself."""
        return state

    def load_slot(self, slot: int, state: State) -> None:
        """See `Vocoder.load_slot`."""
        self._states[slot] = state

    def save_slot(self, slot: int) -> State:
        """Returns the state itself, which is immutable."""
        return self._states[slot]

    def decode(self, requests: Sequence[DecodeRequest]) -> PendingSamples:
        """See `Vocoder.decode`; decodes before it returns."""
        lengths = {len(codes): None for _, codes in requests}
        states: dict[int, State] = {}
        samples: dict[int, NDArray[np.int16]] = {}
        for length in lengths:
            slots = [slot for slot, codes in requests if len(codes) == length]
            codes = torch.stack([codes for _, codes in requests if len(codes) == length])
            state = State.stack([self._states[slot] for slot in slots])
            waves, state = self._decoder.decode(codes.to(state.position.device), state)
            states |= zip(slots, state.split(), strict=True)
            pcm = pcm16(waves.float().cpu().numpy())
            samples |= zip(slots, (row.copy() for row in pcm), strict=True)
        self._states |= states
        return lambda: [samples[slot] for slot, _ in requests]

    def decode_pending(self, requests: Sequence[PendingDecodeRequest]) -> ConfirmFrames:
        """See `Vocoder.decode_pending`; decodes when the numbers of frames are confirmed."""
        return partial(self._decode_confirmed, requests)

    def _decode_confirmed(
        self, requests: Sequence[PendingDecodeRequest], counts: Sequence[int]
    ) -> PendingSamples:
        confirmed: list[DecodeRequest] = []
        for request, count in zip(requests, counts, strict=True):
            if count:
                codes = torch.from_numpy(np.concatenate([request.received, request.pending]))
                confirmed.append(DecodeRequest(request.slot, codes[:count]))
        return self.decode(confirmed)


def choose_vocoder(
    decoder: Decoder,
    weights: "w.DecoderWeights",
    config: "CodecConfig",
    *,
    slots: int,
    kernels: bool,
) -> Vocoder:
    """Chooses the CUDA kernels if the decode kernels are used too and the shapes are supported.

    Args:
        decoder: The decoder in plain torch.
        weights: Its weights.
        config: The codec's configuration.
        slots: Number of streams at a time.
        kernels: Whether talker and code predictor run as CUDA kernels.
    """
    if kernels:
        try:
            vocoder = CudaDecoder(weights, config, slots=slots)
        except ValueError as error:
            _log.warning("The codec runs in plain torch: %s", error)
        else:
            vocoder.warmup()
            return vocoder
    return TorchVocoder(decoder)
