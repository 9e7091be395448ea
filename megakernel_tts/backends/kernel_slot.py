"""The host's state of a stream in a slot of the megakernel."""

import ctypes
import struct
from dataclasses import dataclass

from megakernel_tts.backends.protocol import SlotProgress
from megakernel_tts.kernels.structs import NUM_CODE_GROUPS, NetworkSampling, StreamParams
from megakernel_tts.sampling import Sampling

STREAM_BYTES = ctypes.sizeof(StreamParams)
# The fields of `StreamParams` before this offset change from launch to launch.
_FIXED_OFFSET = StreamParams.noise_frame_offset.offset
_CHANGING = struct.Struct(f"={7 + NUM_CODE_GROUPS}i")
assert _CHANGING.size == _FIXED_OFFSET, "the fields that change are the first integers"


@dataclass(kw_only=True)
class KernelSlot(SlotProgress):
    """What the megakernel needs to launch a stream's next frame.

    Attributes:
        codes: Of the last frame.
        fixed: The fields of `StreamParams` that stay the same from launch to launch.
    """

    codes: list[int]
    fixed: bytes

    def write(self, streams: memoryview, index: int, slot: int, max_positions: int) -> None:
        """Writes the stream's state for the next launch, without an object for each field.

        Args:
            streams: Bytes of an array of `StreamParams`.
            index: Of the stream in the array.
            slot: The stream's slot.
            max_positions: Positions of a slot.
        """
        begin = index * STREAM_BYTES
        _CHANGING.pack_into(
            streams,
            begin,
            slot,
            self.num_prompt,
            self.num_frames,
            max_positions - self.num_prompt,
            self.num_fed,
            self.text_complete,
            self.num_frames == 0,
            *self.codes,
        )
        streams[begin + _FIXED_OFFSET : begin + STREAM_BYTES] = self.fixed


def fixed_fields(sampling: Sampling, first_frame: int) -> bytes:
    """The fields of a stream's state that stay the same from launch to launch.

    Args:
        sampling: Of the stream, in float32.
        first_frame: Number of its first frame in the random generator's counter.
    """
    seed = sampling.seed or 0
    stream = StreamParams(
        noise_frame_offset=first_frame & 0xFFFFFFFF,
        seed=(seed & 0xFFFFFFFF, seed >> 32),
        repetition_penalty=sampling.repetition_penalty,
        talker=NetworkSampling(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        ),
        predictor=NetworkSampling(
            temperature=sampling.predictor_temperature,
            top_k=sampling.predictor_top_k,
            top_p=sampling.predictor_top_p,
        ),
    )
    return bytes(stream)[_FIXED_OFFSET:]
