"""Runaway guard: ends speech that has missed its end.

A sampled speech model sometimes misses its end-of-speech code and continues with silence, noise or
a loop. The guard acts only after the whole text was fed. It ends the speech far beyond the text's
ordinary length. From twice the ordinary length on, it also ends it after seconds of near silence or
repetition, or after the last word.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_MAX_LENGTH = 4.0  # times the ordinary length: slow, emotional speech stays below
_GRACE_FRAMES = 60  # added to the limit, for pauses and breaths in short texts
_OVERDUE_LENGTH = 2.0  # times the ordinary length, from which silence and loops end the speech
_QUIET_FRAMES = 50  # 4 s
_QUIET_PEAK = 0.002 * 32767  # of a quiet frame (-54 dBFS), in 16-bit steps
_REPEATED_FRAMES = 40  # 3.2 s
_MAX_LOOP_FRAMES = 12
_IDLE_FRAMES = 50  # 4 s


class Guard:
    """Follows the frames of one segment."""

    def __init__(self) -> None:
        self._num_frames = 0
        self._num_counted = 0.0  # frames; a quiet one counts half, since a runaway has few pauses
        self._num_quiet = 0
        # Codes that are not yet counted in `_num_repeats`. Those of a loop of the limit suffice: a
        # longer one that older codes begin has all of them.
        self._recent_codes: deque[int] = deque(maxlen=_REPEATED_FRAMES + _MAX_LOOP_FRAMES)
        self._codes: deque[int] = deque(maxlen=_MAX_LOOP_FRAMES)  # the last one first
        self._num_repeats: list[int] = []  # of each code of `_codes`, by a loop from there to now

    def find_end(
        self,
        codes: NDArray[np.int64],
        peaks: NDArray[np.uint16],
        expected_frames: float,
        *,
        used_up_at: int | None,
        frames_since_end: Callable[[int], int] = lambda frame: 0,
    ) -> int | None:
        """Adds the next frames.

        Args:
            codes: [frames], code 0 of each.
            peaks: [frames], the largest magnitude of each frame's 16-bit samples.
            expected_frames: Ordinary length of the text so far.
            used_up_at: The frame of the segment before which the talker had been fed the whole
                text; None if more text follows.
            frames_since_end: Frames from the time at which the attention reached the end of the
                text to a frame of the segment; 0 if that is unknown.

        Returns:
            How many of the frames to keep if the speech ends with the last one of them; None if it
            continues.
        """
        overdue_after = _OVERDUE_LENGTH * expected_frames
        frames = zip(codes.tolist(), (peaks < _QUIET_PEAK).tolist(), strict=True)
        for i, (code, is_quiet) in enumerate(frames):
            frame = self._num_frames
            self._num_frames += 1
            self._num_counted += 0.5 if is_quiet else 1.0
            if used_up_at is None or frame < used_up_at:
                continue
            self._num_quiet = self._num_quiet + 1 if is_quiet else 0
            self._recent_codes.append(code)
            # Speech that is as long as the limit is overdue.
            if self._num_frames > overdue_after and (
                self._num_counted >= _GRACE_FRAMES + _MAX_LENGTH * expected_frames
                or self._num_quiet >= _QUIET_FRAMES
                or frames_since_end(frame) >= _IDLE_FRAMES
                or self._count_repeats() >= _REPEATED_FRAMES
            ):
                return i + 1
        return None

    def _count_repeats(self) -> int:
        """Frames of the longest loop that ends now; of one beyond the limit perhaps fewer."""
        for code in self._recent_codes:
            self._num_repeats = [
                num_repeats + 1 if earlier == code else 0
                for num_repeats, earlier in zip(self._num_repeats, self._codes, strict=True)
            ]
            if len(self._num_repeats) < _MAX_LOOP_FRAMES:
                self._num_repeats.append(0)  # a loop as long as all codes so far
            self._codes.appendleft(code)
        self._recent_codes.clear()
        return max(self._num_repeats)
