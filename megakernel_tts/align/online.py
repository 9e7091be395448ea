"""The best monotone path through a lattice of text and frames, while the frames arrive.

The recurrence is that of monotonic alignment search (Glow-TTS, arXiv 2005.11129), with two
differences: the path may end anywhere, as the rest of the speech is still to come, and it may leave
out a unit that makes no sound.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_NEVER = np.float32(-np.inf)
_ROOM = 32  # frames for which places are laid out together, as that costs more than a frame does


class OnlineSearch:
    """One stream's search: units of text are appended, columns of scores pushed, a path read.

    Each frame stays at a unit, goes on to the next one, or to the one after if the next is silent;
    where two ways are equally good it stays, or takes the smaller step. The first frame is at the
    first unit that can be. A frame costs the same however many came before.
    """

    def __init__(self) -> None:
        """Starts with no text and no frames."""
        self._gate = np.zeros(0, np.float32)  # 0 where the unit before may be left out, else -inf
        self._last_is_silent = False
        # Each unit's best score after the last frame. Two places before the first unit stand for
        # what comes before the text, where the path begins.
        self._scores = np.array([_NEVER, 0.0], np.float32)
        self._rows: deque[NDArray[np.float32]] = deque()  # the scores before each frame
        self._left_out = np.zeros(0, np.float32)  # of one frame
        self._places: Iterator[tuple[NDArray[np.float32], ...]] = iter(())  # of frames to come

    @property
    def num_units(self) -> int:
        """How many there are."""
        return len(self._gate)

    @property
    def at_end(self) -> bool:
        """Whether the best path is at the text's end; what makes no sound need not be passed."""
        return self.best_unit >= self.num_units - 1 - self._last_is_silent

    def append_units(self, silent: Sequence[bool]) -> None:
        """Adds units to the text's end; `silent` says which make no sound."""
        before = [self._last_is_silent, *silent]
        self._last_is_silent = before.pop()
        self._gate = np.append(self._gate, np.where(before, np.float32(0.0), _NEVER))
        self._scores = np.append(self._scores, np.full(len(silent), _NEVER))
        self._left_out = np.empty_like(self._gate)
        self._places = iter(())  # they are too narrow now

    def push_frames(self, columns: NDArray[np.float32]) -> None:
        """Takes frames.

        Args:
            columns: [frames, units]: how well each frame fits each unit, the logarithm of a
                likelihood; -inf where it cannot be.
        """
        gate, left_out = self._gate, self._left_out
        for column in columns:
            places = next(self._places, None)
            if places is None:
                self._places = self._lay_out()
                places = next(self._places)
            before, after, stay, one, two, best = places
            np.maximum(stay, one, out=best)
            np.add(two, gate, out=left_out)
            np.maximum(best, left_out, out=best)
            np.add(best, column, out=best)
            self._rows.append(before)
            self._scores = after

    def _lay_out(self) -> Iterator[tuple[NDArray[np.float32], ...]]:
        """Places for frames to come, each with parts of the scores before and after it.

        Yields:
            Both whole; then the units' parts: before it of the units that stay, of those one and of
            those two before them, and after it.
        """
        table = np.full((_ROOM + 1, self.num_units + 2), _NEVER)
        table[0] = self._scores
        old, new = table[:-1], table[1:]
        ways = (old[:, 2 - step : self.num_units + 2 - step] for step in range(3))
        return zip(old, new, *ways, new[:, 2:], strict=True)

    @property
    def best_unit(self) -> int:
        """The unit where the best path ends; -1 if there is none."""
        return int(self._scores[1:].argmax()) - 1

    def path(self, *, ended: bool = False) -> list[int]:
        """The best path's unit at each frame that was not dropped, -1 where nothing fits.

        Args:
            ended: Whether it is to end where the text does, if any path has come so far.
        """
        unit = self.best_unit
        if ended:
            last = self._scores[-1 - self._last_is_silent :]
            if last.max() > _NEVER:
                unit = self.num_units - len(last) + int(last.argmax())
        units: list[int] = []
        gate = self._gate
        for row in reversed(self._rows):
            units.append(unit)
            if unit < 0:
                continue  # no frame fits
            one, stay = row.item(unit + 1), row.item(unit + 2)
            if row.item(unit) + gate.item(unit) > max(one, stay):
                unit -= 2
            elif one > stay:
                unit -= 1
        return units[::-1]

    def drop_frames(self, frames: int) -> None:
        """Forgets how the first frames were reached; paths no longer go back to them."""
        for _ in range(frames):
            self._rows.popleft()
