"""Packets of a stream: joined in order, whatever their kinds and sampling rates."""

import numpy as np

from megakernel_stt.engine.stream import _joined
from megakernel_stt.session import Packet


def test_packets_are_joined_in_order() -> None:
    rng = np.random.default_rng(0)
    packets = list[Packet]()
    expected = list[tuple[float, int]]()  # every sample with its rate
    for _ in range(200):
        integers = rng.integers(-9, 9, rng.integers(0, 5)).astype("<i2")
        rate = int(rng.choice([8_000, 16_000]))
        floats = (integers / 32768).astype(np.float32)
        packets.append(Packet(integers.tobytes() if rng.random() < 0.7 else floats, rate))
        expected += [(float(value), rate) for value in floats]
    found = [*_joined(packets)]
    assert [(float(v), rate) for samples, rate in found for v in samples] == expected
    assert len(found) < len(packets)
    assert [*_joined([])] == []
