"""The runaway guard: ends speech that has lost its end, and nothing else.

Sampled speech models now and then miss their end-of-speech code and go on with silence, room tone
or a loop (0.3 to 0.7 % of requests are reported for this model). The guard knows how long a text
takes to say and acts only once the text is used up: far beyond that time, or, from twice that time
on, if nothing but near silence or repetition has come for seconds, or all words were said.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

_WORD = 3.0  # frames of a word's first letter, which may be all of it
_SLACK = 4.0  # times the ordinary length: slow, emotional speech stays below
_GRACE = 60  # frames on top: short texts may have long pauses and breaths
_OVERDUE = 2.0  # times the ordinary length, from when on silence and loops are looked at
_QUIET_FRAMES = 50  # 4 s
_QUIET = 0.002 * 32767  # peak of a quiet frame (-54 dBFS), in 16-bit steps
_REPEATED_FRAMES = 40  # 3.2 s
_LONGEST_LOOP = 12  # frames
_IDLE_FRAMES = 50  # 4 s


class Guard:
    """Watches one piece of speech."""

    def __init__(self) -> None:
        self._frames = 0
        self._spent = 0.0  # frames, quiet ones by half: pauses are not what runs away
        self._quiet = 0
        self._codes: deque[int] = deque(maxlen=_LONGEST_LOOP)
        self._repeats = [0] * (_LONGEST_LOOP + 1)  # by length of the loop

    def runaway(
        self, code: int, pcm: NDArray[np.int16], expected: float, *, used_up: bool, idle: int = 0
    ) -> bool:
        """Takes note of the next frame.

        Args:
            code: The frame's first code.
            pcm: Its samples.
            expected: Ordinary length of the text so far, in frames.
            used_up: Whether the talker had been given all of the text before it.
            idle: For how many frames the attention has been at the text's end, if that is known.

        Returns:
            Whether to end the speech with this frame.
        """
        self._frames += 1
        quiet = np.abs(pcm.astype(np.int32)).max() < _QUIET
        self._spent += 0.5 if quiet else 1.0
        if not used_up:
            return False
        for loop, earlier in enumerate(reversed(self._codes), start=1):
            self._repeats[loop] = self._repeats[loop] + 1 if earlier == code else 0
        self._codes.append(code)
        self._quiet = self._quiet + 1 if quiet else 0
        overdue = self._frames > _OVERDUE * expected
        lost = self._quiet >= _QUIET_FRAMES or max(self._repeats) >= _REPEATED_FRAMES
        lost = lost or idle >= _IDLE_FRAMES
        return (overdue and lost) or self._spent >= _GRACE + _SLACK * expected
