"""Compares the online search with a search of the whole lattice, and with all paths."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megakernel_tts.align.online import OnlineSearch

Lattice = tuple[NDArray[np.float32], list[bool]]


@st.composite
def lattices(draw: st.DrawFn, units: int = 12, frames: int = 20, levels: int = 6) -> Lattice:
    """Columns [frames, units] with ties, and which units are silent."""
    shape = draw(st.integers(1, frames)), draw(st.integers(1, units))
    values = st.integers(-levels, 0)
    flat = draw(st.lists(values, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    silent = draw(st.lists(st.booleans(), min_size=shape[1], max_size=shape[1]))
    return np.array(flat, np.float32).reshape(shape), silent


def offline(columns: NDArray[np.float32], silent: list[bool]) -> list[int]:
    """Searches the whole lattice, frame by frame and unit by unit; ties take the smaller step."""
    frames, units = columns.shape
    best = np.full((frames, units), -np.inf, np.float32)
    back = np.zeros((frames, units), int)
    for frame, unit in product(range(frames), range(units)):
        steps = [0, 1] + [2] * (unit > 0 and silent[unit - 1])
        if frame == 0:
            reached = [0.0 if unit - step == -1 else -np.inf for step in steps]
        else:
            reached = [best[frame - 1, unit - w] if unit >= w else -np.inf for w in steps]
        step = int(np.argmax(reached))
        best[frame, unit] = np.float32(reached[step]) + columns[frame, unit]
        back[frame, unit] = steps[step]
    path = [int(best[-1].argmax())]
    for frame in range(frames - 1, 0, -1):
        path.append(path[-1] - int(back[frame, path[-1]]))
    return path[::-1]


def cut(columns: NDArray[np.float32], data: st.DataObject) -> list[NDArray[np.float32]]:
    places = data.draw(st.lists(st.integers(0, len(columns)), max_size=4))
    return np.split(columns, sorted(places))


@given(lattices(), st.data())
def test_path_after_any_frame_equals_the_offline_search(
    lattice: Lattice, data: st.DataObject
) -> None:
    columns, silent = lattice
    search = OnlineSearch()
    search.append_units(silent)
    num_pushed = 0
    for part in cut(columns, data):
        search.push_frames(part)
        num_pushed += len(part)
        if num_pushed:
            assert search.path() == offline(columns[:num_pushed], silent)


@settings(max_examples=50)
@given(lattices(units=4, frames=5))
def test_path_has_the_best_score_of_all_paths(lattice: Lattice) -> None:
    columns, silent = lattice
    search = OnlineSearch()
    search.append_units(silent)
    search.push_frames(columns)

    def allowed(path: tuple[int, ...]) -> bool:
        steps = np.diff([-1, *path])
        over = [
            step < 2 or (step == 2 and silent[p - 1]) for step, p in zip(steps, path, strict=True)
        ]
        return bool((steps >= 0).all()) and steps[0] > 0 and all(over)

    paths = [p for p in product(range(columns.shape[1]), repeat=len(columns)) if allowed(p)]
    scores = [columns[np.arange(len(columns)), list(p)].sum() for p in paths]
    found = search.path()
    assert allowed(tuple(found))
    assert columns[np.arange(len(columns)), found].sum() == max(scores)


@given(lattices(), st.data())
def test_units_may_be_appended_when_their_keys_exist(lattice: Lattice, data: st.DataObject) -> None:
    """A unit that was not appended is equivalent to a unit whose columns are -inf."""
    columns, silent = lattice
    frames, units = columns.shape
    key_frames = [0, *sorted(data.draw(st.integers(0, frames)) for _ in range(units - 1))]
    for unit, frame in enumerate(key_frames):
        columns[:frame, unit] = -np.inf
    whole, growing = OnlineSearch(), OnlineSearch()
    whole.append_units(silent)
    whole.push_frames(columns)
    for frame in range(frames):
        num_keys = sum(c <= frame for c in key_frames)
        growing.append_units(silent[growing.num_units : num_keys])
        growing.push_frames(columns[frame : frame + 1, :num_keys])
    assert growing.path() == whole.path() == offline(columns, silent)


@given(lattices(frames=30), st.data())
def test_dropped_frames_do_not_change_the_rest_of_the_path(
    lattice: Lattice, data: st.DataObject
) -> None:
    columns, silent = lattice
    search = OnlineSearch()
    search.append_units(silent)
    search.push_frames(columns)
    whole = search.path()
    num_dropped = data.draw(st.integers(0, len(columns)))
    search.drop_frames(num_dropped)
    assert search.path() == whole[num_dropped:]


def test_path_of_ended_text_ends_at_the_last_unit() -> None:
    columns = np.array([[0, -9, -9, -9], [0, -1, -9, -9], [0, -1, -2, -9]], np.float32)
    search = OnlineSearch()
    search.append_units([False, False, False, False])
    search.push_frames(columns)
    assert search.path() == [0, 0, 0]
    assert search.path(ended=True) == [0, 0, 0], "no path reaches the end"
    search.push_frames(columns[-1:])
    assert search.path(ended=True) == [0, 1, 2, 3]


def test_silent_last_unit_may_be_skipped() -> None:
    columns = np.array([[0, -9, -9], [-9, 0, -3]], np.float32)
    search = OnlineSearch()
    search.append_units([False, False, True])
    search.push_frames(columns)
    assert search.path(ended=True) == [0, 1]


def test_frames_of_several_allocations_give_the_offline_path() -> None:
    """Scores are allocated for several frames at a time, independently of the pushes."""
    columns = np.random.default_rng(5).integers(-6, 1, (150, 9)).astype(np.float32)
    silent = [unit % 3 == 2 for unit in range(9)]
    for parts in (150, 20, 1):
        search = OnlineSearch()
        search.append_units(silent)
        for part in np.array_split(columns, parts):
            search.push_frames(part)
        assert search.path() == offline(columns, silent)
