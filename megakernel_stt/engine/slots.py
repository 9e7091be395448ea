"""States of all streams in one set of tensors, so that the addresses of a step never change."""

from collections import deque

import torch

from megakernel_stt.kernels.transducer_structs import MAX_BATCH
from megakernel_stt.network.encoder import EncoderState
from megakernel_stt.network.transducer import TransducerState


class Slot:
    """The state of a stream. The slot is free once nothing refers to this object.

    Attributes:
        index: Of the slot.
    """

    def __init__(self, index: int, free: deque[int]) -> None:
        """Takes a slot.

        Args:
            index: Of the slot.
            free: The indices of free slots, which get it back.
        """
        self.index = index
        self._free = free

    def __del__(self) -> None:
        """Frees the slot, on any thread."""
        self._free.append(self.index)


class SlotPool:
    """Slots of one size.

    A stream has a slot, a fork of it has another one until it ends, and a step takes one for each
    state that it makes.

    Attributes:
        encoder: [slots, ...].
        transducer: [slots, ...].
        start: Slot with the state of a stream before its first chunk. No step writes it.
        unused: Index of the slot for states that are not needed.
        device: Of the tensors.
    """

    def __init__(
        self, encoder: EncoderState, transducer: TransducerState, num_streams: int
    ) -> None:
        """Allocates the slots.

        Args:
            encoder: State of one stream before its first chunk.
            transducer: The same of the decoder.
            num_streams: Streams at a time.
        """
        num_slots = 2 + 2 * num_streams + min(num_streams, MAX_BATCH)
        repeated = torch.zeros(num_slots, dtype=torch.int64, device=encoder.keys.device)
        self.encoder, self.transducer = encoder.select(repeated), transducer.select(repeated)
        self.start, self.unused = Slot(0, deque()), 1
        self.device = encoder.keys.device
        self._free = deque(range(2, num_slots))

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        return len(self._free)

    def take(self) -> Slot:
        """A free slot, whose content has no meaning.

        Raises:
            RuntimeError: There is none; more streams than expected hold their states.
        """
        try:
            return Slot(self._free.popleft(), self._free)
        except IndexError:
            raise RuntimeError(
                "No slot is free: finished streams still refer to their states."
            ) from None
