"""Runaway guard: ends speech that has missed its end.

A sampled speech model sometimes misses its end-of-speech code and continues with silence, noise or
a loop. The guard acts only after the whole text was fed. It ends the speech far beyond the text's
ordinary length. From twice the ordinary length on, it also ends it after seconds of near silence or
repetition, or after the last word.
"""

from collections import deque

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
        self._codes: deque[int] = deque(maxlen=_MAX_LOOP_FRAMES)  # the last one first
        self._num_repeats: list[int] = []  # of each code of `_codes`, by a loop from there to now

    def runaway(
        self,
        code: int,
        peak: int,
        expected_frames: float,
        *,
        text_used_up: bool,
        idle: int = 0,
    ) -> bool:
        """Adds the next frame.

        Args:
            code: Code 0 of the frame.
            peak: Largest magnitude of the frame's 16-bit samples.
            expected_frames: Ordinary length of the text so far.
            text_used_up: Whether the talker had been fed the whole text before the frame.
            idle: Frames since the attention reached the end of the text; 0 if that is unknown.

        Returns:
            Whether to end the speech with this frame.
        """
        self._num_frames += 1
        quiet = peak < _QUIET_PEAK
        self._num_counted += 0.5 if quiet else 1.0
        if not text_used_up:
            return False
        self._num_repeats = [
            num_repeats + 1 if earlier == code else 0
            for num_repeats, earlier in zip(self._num_repeats, self._codes, strict=True)
        ]
        if len(self._num_repeats) < _MAX_LOOP_FRAMES:
            self._num_repeats.append(0)  # a loop as long as all codes so far
        self._codes.appendleft(code)
        self._num_quiet = self._num_quiet + 1 if quiet else 0
        overdue = self._num_frames > _OVERDUE_LENGTH * expected_frames
        lost = (
            self._num_quiet >= _QUIET_FRAMES
            or max(self._num_repeats) >= _REPEATED_FRAMES
            or idle >= _IDLE_FRAMES
        )
        limit = _GRACE_FRAMES + _MAX_LENGTH * expected_frames
        return (overdue and lost) or self._num_counted >= limit
