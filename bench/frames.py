"""Launches of the decode kernel for timing; each must make all frames that were requested."""

from collections.abc import Sequence
from statistics import median

from bench.events import event_times
from megakernel_tts.backends.megakernel import Megakernel

FRAMES_PER_LAUNCH = 32
_REPEATS = 7
_NO_ID = -1


def disable_end_of_speech(kernel: Megakernel) -> None:
    """Leaves no id that ends speech; random weights may sample it, and a launch would end early."""
    kernel._buffers.params.eos_id = _NO_ID


def check_num_frames(kernel: Megakernel, num_streams: int, num_frames: int) -> None:
    """Checks that the last launch made all frames.

    Args:
        kernel: Its last launch is over.
        num_streams: Streams of the launch.
        num_frames: Frames that were requested of each.

    Raises:
        RuntimeError: A stream has fewer frames, so the time per frame is unknown.
    """
    made = kernel._buffers.num_published[:num_streams].tolist()
    if min(made) < num_frames:
        raise RuntimeError(
            f"A launch of {num_frames} frames made {made} frames of its streams, so the time per "
            "frame is unknown. Measure with another seed or with the end of speech disabled."
        )


def frame_ms(kernel: Megakernel, slots: Sequence[int]) -> float:
    """Times a frame; every launch begins at the same position.

    Args:
        kernel: The backend.
        slots: The streams of the launch, with at least `FRAMES_PER_LAUNCH` frames to go.

    Returns:
        Median GPU time of a frame of all streams, in milliseconds, after one warm-up.

    Raises:
        RuntimeError: A launch made fewer frames than requested.
    """
    times_ms: list[float] = []
    for _ in range(1 + _REPEATS):
        times_ms += event_times(lambda: kernel._launch(slots, FRAMES_PER_LAUNCH), 1)
        check_num_frames(kernel, len(slots), FRAMES_PER_LAUNCH)
    return median(times_ms[1:]) / FRAMES_PER_LAUNCH
