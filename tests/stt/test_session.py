"""The inbox of a session: when the engine is woken, and the order of its entries."""

from collections.abc import Sequence

import numpy as np
import pytest

from megakernel_stt.session import Inbox, Packet


class Engine:
    """Counts how often it is woken."""

    def __init__(self) -> None:
        self.inbox = Inbox(self._wake)
        self.num_wakes = 0

    def _wake(self, inbox: Inbox) -> None:
        assert inbox is self.inbox
        self.num_wakes += 1

    def put(self, *seconds: float, rate: int = 16_000) -> None:
        for one in seconds:
            self.inbox.put(Packet(np.full(round(one * rate), one, np.float32), rate))


def values(entry: object) -> Sequence[float]:
    assert isinstance(entry, Packet)
    return sorted({round(float(value), 3) for value in entry.samples})


def test_the_engine_is_woken_once_there_is_enough_audio() -> None:
    engine = Engine()
    engine.put(0.02)
    assert engine.num_wakes == 1  # it has not said yet how much it needs
    assert engine.inbox.get(0.32) is None
    engine.put(*[0.02] * 14)
    assert engine.num_wakes == 1
    engine.put(0.02)
    assert engine.num_wakes == 2
    packet = engine.inbox.get(0.32)
    assert isinstance(packet, Packet) and len(packet.samples) == 16 * 320
    assert engine.inbox.get(0.32) is None


def test_a_request_wakes_the_engine_and_comes_after_the_audio_before_it() -> None:
    engine = Engine()
    assert engine.inbox.get(1.0) is None
    engine.put(0.1)
    engine.inbox.put("finalize")
    engine.put(0.2)
    assert engine.num_wakes >= 1
    assert values(engine.inbox.get(1.0)) == [0.1]
    assert engine.inbox.get(1.0) == "finalize"
    assert engine.inbox.get(1.0) is None
    assert values(engine.inbox.get(0.2)) == [0.2]


def test_audio_of_another_rate_is_taken_by_itself() -> None:
    engine = Engine()
    engine.put(0.1, 0.2)
    engine.put(0.3, rate=8_000)
    first, second = engine.inbox.get(0.5), engine.inbox.get(0.0)
    assert values(first) == [0.1, 0.2] and values(second) == [0.3]
    assert isinstance(second, Packet) and second.sample_rate == 8_000


@pytest.mark.parametrize("size", [1, 7, 319])
def test_rounding_does_not_hide_audio_that_is_enough(size: int) -> None:
    engine, count = Engine(), 16_000 // size + 1
    assert engine.inbox.get(count * size / 16_000) is None
    for _ in range(count):
        engine.inbox.put(Packet(np.zeros(size, np.float32), 16_000))
    assert engine.num_wakes >= 1
    packet = engine.inbox.get(count * size / 16_000)
    assert isinstance(packet, Packet) and len(packet.samples) == count * size
