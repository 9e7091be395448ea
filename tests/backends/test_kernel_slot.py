"""The state of streams for a launch, as bytes of an array of `StreamParams`."""

import numpy as np

from megakernel_tts import Sampling
from megakernel_tts.backends.kernel_slot import STREAM_BYTES, KernelSlot, fixed_fields
from megakernel_tts.kernels.structs import StreamParams


def test_a_stream_is_written_with_all_of_its_fields() -> None:
    """Into its place of the array only, whatever was there."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 3 * STREAM_BYTES).astype(np.uint8)
    sampling = Sampling(
        seed=(7 << 32) | 5,
        temperature=0.5,
        top_k=20,
        top_p=0.75,
        repetition_penalty=1.25,
        predictor_temperature=1.5,
        predictor_top_k=30,
        predictor_top_p=0.25,
    )
    slot = KernelSlot(
        num_prompt=10,
        num_frames=4,
        num_fed=6,
        text_complete=True,
        codes=[*range(100, 116)],
        fixed=fixed_fields(sampling.in_float32(), (1 << 32) + 9),
    )
    before = data.copy()
    slot.write(data.data, 1, 2, 500)
    stream = StreamParams.from_buffer_copy(data.tobytes(), STREAM_BYTES)
    assert (stream.slot, stream.prompt_length, stream.num_frames) == (2, 10, 4)
    assert (stream.max_frames, stream.num_text_vectors, stream.text_complete) == (490, 6, 1)
    assert stream.starts_from_prompt == 0 and [*stream.codes] == slot.codes
    assert (stream.noise_frame_offset, [*stream.seed]) == (9, [5, 7])
    assert stream.repetition_penalty == 1.25
    for network, numbers in ((stream.talker, (0.5, 20, 0.75)), (stream.predictor, (1.5, 30, 0.25))):
        assert (network.temperature, network.top_k, network.top_p) == numbers
    others = np.ones(len(data), bool)
    others[STREAM_BYTES : 2 * STREAM_BYTES] = False
    assert np.array_equal(data[others], before[others])


def test_a_stream_without_frames_starts_from_its_prompt() -> None:
    data = np.zeros(STREAM_BYTES, np.uint8)
    fixed = fixed_fields(Sampling(seed=1).in_float32(), 0)
    KernelSlot(num_prompt=3, codes=[0] * 16, fixed=fixed).write(data.data, 0, 0, 500)
    stream = StreamParams.from_buffer_copy(data.tobytes())
    assert (stream.starts_from_prompt, stream.num_frames, stream.text_complete) == (1, 0, 0)
