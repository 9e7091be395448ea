"""The columns of `bench.mas`, and the host time of a call."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import mas, mas_cython
from bench.mas import Inputs, columns, host_us
from megakernel_tts.align import maximum_path

SUPER_MAS = """
def maximum_path(value, mask, dtype=None):
    from megakernel_tts.align import maximum_path
    path = maximum_path(value, mask)
    value.zero_()  # as Super-MAS does, it overwrites the scores
    return path
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the interface of Super-MAS's repository."""
    package = tmp_path / "super_monotonic_align"
    package.mkdir()
    (package / "__init__.py").write_text(SUPER_MAS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("super_monotonic_align", None)


def test_super_mas_is_imported_from_its_checkout(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mas_cython, "with_openmp", lambda _: mas_cython.shipped())  # no build
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 20, generator=generator)
    mask = torch.ones(2, 5, 20, dtype=torch.int32)
    expected = maximum_path(scores, mask)
    (column,) = (c for c in columns(tmp_path, checkout) if c.name == "super_mas")
    assert column.run is not None and column.note is None and column.overwrites_scores
    lengths = torch.tensor([5, 5]), torch.tensor([20, 20])
    assert torch.equal(column.run(Inputs(scores, mask, *lengths)), expected)


def test_a_folder_without_super_mas_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.mas", "--super-mas", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        mas.main()
    assert caught.value.code == 2 and "is not a checkout of Super-MAS" in capsys.readouterr().err


def test_host_time_is_the_median_time_of_a_call_without_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0

    def advance(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: advance(1.0))
    durations_s = iter([5e-3, *(99 * [20e-6])])
    assert host_us(lambda: advance(next(durations_s))) == 20.0
