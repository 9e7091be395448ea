"""The inbox of a session: when the engine is woken, and the order of its entries."""

import numpy as np
import pytest

from megakernel_common.events import ReaderWakeups
from megakernel_stt.audio import full_scale
from megakernel_stt.session import EventQueue, Inbox, Packet, Request, Session


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
            self.inbox.put_audio(np.full(round(one * rate), one, np.float32), rate)


def seconds(entry: list[Packet] | Request | None) -> list[float]:
    assert isinstance(entry, list)
    return [len(packet.samples) / packet.sample_rate for packet in entry]


def test_the_engine_is_woken_once_there_is_enough_audio() -> None:
    engine = Engine()
    engine.put(0.02)
    assert engine.num_wakes == 1  # it has not said yet how much it needs
    assert engine.inbox.get(0.32) is None
    engine.put(*[0.02] * 14)
    assert engine.num_wakes == 1
    engine.put(0.02)
    assert engine.num_wakes == 2
    assert seconds(engine.inbox.get(0.32)) == [0.02] * 16
    assert engine.inbox.get(0.32) is None


def test_the_engine_is_woken_once_until_it_has_read_everything() -> None:
    engine = Engine()
    assert engine.inbox.get(0.1) is None
    engine.put(0.1, 0.1)
    engine.inbox.put_request("finalize")
    assert engine.num_wakes == 1
    assert seconds(engine.inbox.get(0.1)) == [0.1]
    engine.put(0.1)
    assert engine.num_wakes == 1
    while engine.inbox.get(0.1) is not None:
        pass
    engine.put(0.1)
    assert engine.num_wakes == 2


def test_bytes_have_two_bytes_per_sample() -> None:
    engine = Engine()
    assert engine.inbox.get(0.02) is None
    engine.inbox.put_audio(bytes(2 * 319), 16_000)
    assert engine.num_wakes == 0
    engine.inbox.put_audio(bytes(2), 16_000)
    assert engine.num_wakes == 1
    entry = engine.inbox.get(0.02)
    assert isinstance(entry, list) and [len(packet.samples) for packet in entry] == [638, 2]


def test_a_closed_inbox_has_no_entries() -> None:
    engine = Engine()
    engine.put(0.1)
    engine.inbox.put_request("finalize")
    engine.inbox.close()
    engine.put(0.1)
    assert engine.inbox.get(0.0) is None


def test_a_request_wakes_the_engine_and_comes_after_the_audio_before_it() -> None:
    engine = Engine()
    assert engine.inbox.get(1.0) is None
    engine.put(0.1)
    engine.inbox.put_request("finalize")
    engine.put(0.2)
    assert engine.num_wakes == 1
    assert seconds(engine.inbox.get(1.0)) == [0.1]
    assert engine.inbox.get(1.0) == "finalize"
    assert engine.inbox.get(1.0) is None
    assert seconds(engine.inbox.get(0.2)) == [0.2]


def test_the_engine_gets_no_packet_more_than_it_needs() -> None:
    engine = Engine()
    engine.put(0.1, 0.2)
    engine.put(0.3, rate=8_000)
    engine.put(0.4)
    assert seconds(engine.inbox.get(0.5)) == [0.1, 0.2, 0.3]
    assert seconds(engine.inbox.get(0.0)) == [0.4]
    engine.put(0.1, 0.1)
    assert seconds(engine.inbox.get(0.0)) == [0.1]


@pytest.mark.parametrize("size", [1, 7, 319])
def test_rounding_does_not_hide_audio_that_is_enough(size: int) -> None:
    engine, count = Engine(), 16_000 // size + 1
    assert engine.inbox.get(count * size / 16_000) is None
    for _ in range(count):
        engine.inbox.put_audio(np.zeros(size, np.float32), 16_000)
    assert engine.num_wakes >= 1
    assert len(seconds(engine.inbox.get(count * size / 16_000))) == count


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_audio_is_not_changed_with_the_array_that_was_pushed(dtype: type[np.generic]) -> None:
    engine, pcm = Engine(), np.ones(320, dtype)
    session = Session(engine.inbox, EventQueue(lambda: None, ReaderWakeups()))
    session.push(pcm, 16_000)
    pcm[:] = 0
    entry = engine.inbox.get(0.0)
    assert isinstance(entry, list)
    found = full_scale(entry[0].samples)
    assert len(found) == 320 and found.all()
