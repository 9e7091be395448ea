from collections.abc import Callable
from pathlib import Path

import pytest

from bench.handovers import soak
from megakernel_tts import TTS


@pytest.mark.parametrize(
    ("device", "backend", "handovers"),
    [
        ("cpu", "reference", 2_000),
        pytest.param("cuda", "megakernel", 100_000, marks=pytest.mark.gpu),
    ],
)
def test_codes_are_the_same_beside_other_work(
    checkpoint: Callable[..., Path], device: str, backend: str, handovers: int
) -> None:
    folder = checkpoint("custom_voice", "1b7")
    with TTS.load(folder, device, slots=3) as tts, TTS.load(folder, device, slots=1) as other:
        report = soak(tts, other, handovers)
    assert (report.backend, report.streams, report.differing) == (backend, 3, 0)
    assert report.handovers >= handovers
    assert report.products > 0 and report.other_frames > 0
