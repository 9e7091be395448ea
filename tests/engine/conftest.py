"""Rigs with a number of slots and a scheduling policy."""

from collections.abc import Callable, Iterator

import pytest

from megakernel_tts.engine.scheduler import SchedulingPolicy
from megakernel_tts.loader import LoadedModel
from tests.align.synthetic_attention import LoudDecoder
from tests.fakes import ScriptedBackend
from tests.rig import MakeRig, Rig


@pytest.fixture
def make_rig(load: Callable[..., LoadedModel]) -> Iterator[MakeRig]:
    """Makes rigs with a number of slots and a scheduling policy; decoding costs nothing."""
    rigs: list[Rig] = []

    def make(
        num_slots: int = 2,
        num_pages: int | None = None,
        max_positions: int = 512,
        **policy: float,
    ) -> Rig:
        backend = ScriptedBackend(num_slots, max_positions, num_pages=num_pages)
        scheduling = SchedulingPolicy(**policy)  # type: ignore[arg-type]
        rigs.append(Rig(load(), backend, decoder=LoudDecoder(), policy=scheduling))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def loud_rig(make_rig: MakeRig) -> Rig:
    """A rig for tests that compare no samples: its decoder makes loud ones at no cost."""
    return make_rig()
