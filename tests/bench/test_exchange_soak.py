from collections.abc import Callable
from pathlib import Path

import pytest

from bench import exchange_soak
from bench.exchange_soak import soak
from megakernel_tts import TTS


@pytest.mark.parametrize(
    ("device", "backend", "num_exchanges", "matrix_size"),
    [
        ("cpu", "reference", 1_000, 256),
        pytest.param("cuda", "megakernel", 100_000, 2048, marks=pytest.mark.gpu),
    ],
)
def test_other_work_on_the_device_does_not_change_codes(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    device: str,
    backend: str,
    num_exchanges: int,
    matrix_size: int,
) -> None:
    monkeypatch.setattr(exchange_soak, "_MATRIX_SIZE", matrix_size)
    if device == "cpu":
        request.getfixturevalue("no_warm_up")
    folder = checkpoint("custom_voice", "1b7")
    with TTS.load(folder, device, slots=3) as tts, TTS.load(folder, device, slots=1) as other:
        report = soak(tts, other, num_exchanges)
    assert (report.backend, report.streams, report.differing) == (backend, 3, 0)
    assert report.exchanges >= num_exchanges
    assert report.products > 0 and report.other_frames > 0
