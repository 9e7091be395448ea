from collections.abc import Callable
from pathlib import Path

import pytest

from bench.exchange_soak import soak
from megakernel_tts import TTS


@pytest.mark.parametrize(
    ("device", "backend", "num_exchanges"),
    [
        ("cpu", "reference", 2_000),
        pytest.param("cuda", "megakernel", 100_000, marks=pytest.mark.gpu),
    ],
)
def test_other_work_on_the_device_does_not_change_codes(
    checkpoint: Callable[..., Path], device: str, backend: str, num_exchanges: int
) -> None:
    folder = checkpoint("custom_voice", "1b7")
    with TTS.load(folder, device, slots=3) as tts, TTS.load(folder, device, slots=1) as other:
        report = soak(tts, other, num_exchanges)
    assert (report.backend, report.streams, report.differing) == (backend, 3, 0)
    assert report.exchanges >= num_exchanges
    assert report.products > 0 and report.other_frames > 0
