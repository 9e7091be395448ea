"""Rigs of kernels for many streams."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache

import pytest
import torch

from megakernel_tts.loader import LoadedModel, load_checkpoint
from megakernel_tts.model import random_checkpoint
from megakernel_tts.model.random_checkpoint import Size, write_checkpoint
from tests.wide_rig import MakeWideRig, WideRig


@pytest.fixture(scope="session")
def make_wide_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeWideRig]:
    """Rigs of models with few layers, since the emulator is slow; each is made once."""
    stack = random_checkpoint._stack

    @cache
    def load(size: Size, num_layers: int) -> LoadedModel:
        folder = tmp_path_factory.mktemp(size)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(random_checkpoint, "_stack", lambda width, _: stack(width, num_layers))
            write_checkpoint(folder, "custom_voice", size)
        loaded = load_checkpoint(folder, torch.device("cpu"), torch.float32, 4)
        engines.callback(loaded.engine.close)
        return loaded

    @cache
    def make(size: Size, width: int, num_layers: int) -> WideRig:
        return WideRig(load(size, num_layers), width)

    def make_or_reset(size: Size, width: int, num_layers: int = 1) -> WideRig:
        rig = make(size, width, num_layers)
        rig.reset()
        return rig

    with ExitStack() as engines:
        yield make_or_reset
