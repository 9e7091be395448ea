"""The host's state of a stream in a slot of the megakernel."""

from dataclasses import dataclass

from megakernel_tts.backends.protocol import SlotProgress
from megakernel_tts.kernels.structs import NetworkSampling, StreamParams
from megakernel_tts.sampling import Sampling


@dataclass(kw_only=True)
class KernelSlot(SlotProgress):
    """What the megakernel needs to launch a stream's next frame.

    Attributes:
        codes: Of the last frame.
        stream: For the kernels; `update` refreshes what changes.
    """

    codes: list[int]
    stream: StreamParams

    def update(self, slot: int, max_positions: int) -> StreamParams:
        """The stream's state for the next launch.

        Args:
            slot: The stream's slot.
            max_positions: Positions of a slot.
        """
        stream = self.stream
        stream.slot, stream.prompt_length = slot, self.num_prompt
        stream.num_frames, stream.max_frames = self.num_frames, max_positions - self.num_prompt
        stream.num_text_vectors, stream.text_complete = self.num_fed, self.text_complete
        stream.starts_from_prompt = self.num_frames == 0
        stream.codes[:] = self.codes
        return stream


def new_stream(sampling: Sampling, first_frame: int) -> StreamParams:
    """A stream's state for the kernels: what stays the same from launch to launch.

    Args:
        sampling: Of the stream, in float32.
        first_frame: Number of its first frame in the random generator's counter.
    """
    seed = sampling.seed or 0
    return StreamParams(
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
