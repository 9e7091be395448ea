import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def short_copy(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    """Copies of small checkpoints whose speech is four frames long."""

    def make(*kind_and_size: str) -> str:
        model = shutil.copytree(checkpoint(*kind_and_size, shallow=True), tmp_path / "model")
        (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": 4}))
        return str(model)

    return make


@pytest.fixture
def short_model(
    short_copy: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Such copies; nothing is run before the measurement."""
    monkeypatch.setattr("megakernel_tts.bench.benchmark._warm_up", lambda *_: None)
    return short_copy
