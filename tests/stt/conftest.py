from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megakernel_stt import STT
from megakernel_stt.model.checkpoint import Model, load_model
from megakernel_stt.model.random_checkpoint import Kind, write_checkpoint

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MakeCheckpoint = Callable[..., Path]
LoadModel = Callable[..., Model]


@pytest.fixture(scope="session")
def recogniser(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Folders of tiny recognisers, each written once."""
    made: dict[object, Path] = {}

    def make(kind: Kind = "streaming", *, bias: bool = False, blank_bias: float = 2.0) -> Path:
        key = kind, bias, blank_bias
        if key not in made:
            made[key] = tmp_path_factory.mktemp("recogniser")
            write_checkpoint(made[key], kind, bias=bias, blank_bias=blank_bias)
        return made[key]

    return make


@pytest.fixture(scope="session")
def load(recogniser: MakeCheckpoint) -> LoadModel:
    """Loaded tiny recognisers in float32."""

    def make(kind: Kind = "streaming", *, bias: bool = False, blank_bias: float = 2.0) -> Model:
        folder = recogniser(kind, bias=bias, blank_bias=blank_bias)
        return load_model(folder, CPU, torch.float32)

    return make


@pytest.fixture(scope="module", params=DEVICES)
def stt(request: pytest.FixtureRequest, recogniser: MakeCheckpoint) -> Iterator[STT]:
    """A tiny streaming recogniser with four slots."""
    with STT.load(recogniser(), request.param, "float32", slots=4) as loaded:
        yield loaded


@pytest.fixture(scope="module", params=DEVICES)
def offline(request: pytest.FixtureRequest, recogniser: MakeCheckpoint) -> Iterator[STT]:
    """A tiny offline recogniser with two slots."""
    with STT.load(recogniser("tdt"), request.param, "float32", slots=2) as loaded:
        yield loaded
