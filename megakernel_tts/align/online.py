"""Online monotonic alignment search: the best path through units of text for frames so far.

The recurrence is that of Glow-TTS (arXiv 2005.11129), with two differences. The path may end at any
unit, because the rest of the speech does not exist yet. It may skip silent units.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_NEG_INF = np.float32(-np.inf)
_BATCH_FRAMES = 32  # frames per allocation; creating the views costs more than a frame's arithmetic

# Views of one frame: scores before it, scores after it; then, for each unit, the score of staying,
# of the step from the previous unit and from the one before that, and the output.
FrameViews = tuple[NDArray[np.float32], ...]


class OnlineSearch:
    """The alignment search of one segment.

    A frame stays at the unit of the previous frame, moves to the next unit, or skips one silent
    unit. Of equally good moves the smaller one is taken. The first frame is at the first possible
    unit. The cost of a frame does not depend on the number of previous frames.
    """

    def __init__(self) -> None:
        """Starts without text and frames."""
        self._skip = np.zeros(0, np.float32)  # 0 if the previous unit is silent, else -inf
        self._last_is_silent = False
        # The best score of each unit after the last frame. The two entries before the first unit
        # represent the start of the text, from which the path begins.
        self._scores = np.array([_NEG_INF, 0.0], np.float32)
        self._history: deque[NDArray[np.float32]] = deque()  # the scores before each frame
        self._skip_scores = np.zeros(0, np.float32)  # scratch memory of one frame
        self._views: Iterator[FrameViews] = iter(())  # of the next frames

    @property
    def num_units(self) -> int:
        """The number of units."""
        return len(self._skip)

    @property
    def at_end(self) -> bool:
        """Whether the best path is at the end of the text; a silent last unit may be missing."""
        return self.best_unit >= self.num_units - 1 - self._last_is_silent

    def append_units(self, silent: Sequence[bool]) -> None:
        """Appends units to the text.

        Args:
            silent: Whether each new unit makes no sound.
        """
        previous_is_silent = [self._last_is_silent, *silent]
        self._last_is_silent = previous_is_silent.pop()
        skip = np.where(previous_is_silent, np.float32(0.0), _NEG_INF)
        self._skip = np.append(self._skip, skip)
        self._scores = np.append(self._scores, np.full(len(silent), _NEG_INF))
        self._skip_scores = np.empty_like(self._skip)
        self._views = iter(())  # they are too short for the new units

    def push_frames(self, columns: NDArray[np.float32]) -> None:
        """Adds frames.

        Args:
            columns: [frames, units], the log-likelihood of each unit; -inf where it is impossible.
        """
        skip, skip_scores = self._skip, self._skip_scores
        for column in columns:
            views = next(self._views, None)
            if views is None:
                self._views = self._allocate_frames()
                views = next(self._views)
            before, after, stay, one, two, best = views
            np.maximum(stay, one, out=best)
            np.add(two, skip, out=skip_scores)
            np.maximum(best, skip_scores, out=best)
            np.add(best, column, out=best)
            self._history.append(before)
            self._scores = after

    def _allocate_frames(self) -> Iterator[FrameViews]:
        """Allocates the scores of `_BATCH_FRAMES` frames and creates their views."""
        scores = np.full((_BATCH_FRAMES + 1, self.num_units + 2), _NEG_INF)
        scores[0] = self._scores
        before, after = scores[:-1], scores[1:]
        steps = (before[:, 2 - step : self.num_units + 2 - step] for step in range(3))
        return zip(before, after, *steps, after[:, 2:], strict=True)

    @property
    def best_unit(self) -> int:
        """The unit at which the best path ends; -1 if no unit is possible."""
        return int(self._scores[1:].argmax()) - 1

    def path(self, *, ended: bool = False) -> list[int]:
        """The unit of the best path at each frame that was not dropped; -1 if none is possible.

        Args:
            ended: Whether the path must end at the end of the text, if such a path exists.
        """
        unit = self.best_unit
        if ended:
            last = self._scores[-1 - self._last_is_silent :]
            if last.max() > _NEG_INF:
                unit = self.num_units - len(last) + int(last.argmax())
        units: list[int] = []
        skip = self._skip
        for scores in reversed(self._history):
            units.append(unit)
            if unit < 0:
                continue  # no unit is possible
            one, stay = scores.item(unit + 1), scores.item(unit + 2)
            if scores.item(unit) + skip.item(unit) > max(one, stay):
                unit -= 2
            elif one > stay:
                unit -= 1
        return units[::-1]

    def drop_frames(self, num_frames: int) -> None:
        """Removes the first frames from `path`. Later paths do not go back to them."""
        for _ in range(num_frames):
            self._history.popleft()
