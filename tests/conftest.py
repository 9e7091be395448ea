import gc
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest
import torch
import websockets.asyncio.client as async_websockets
import websockets.sync.client as sync_websockets
from hypothesis import settings

from megakernel_common.kernels.loader import cache_folder
from megakernel_tts import TTS
from megakernel_tts.loader import LoadedModel, load_checkpoint
from megakernel_tts.model import random_checkpoint
from megakernel_tts.model.config import Kind
from megakernel_tts.model.hub import find_checkpoint
from megakernel_tts.model.random_checkpoint import Size, write_checkpoint
from tests.comparison import Comparison, MakeComparison
from tests.emulator import EmulatedModule
from tests.fakes import TIMEOUT_S, ScriptedBackend
from tests.goldens.cases import Model
from tests.rig import Rig

# A busy machine may take any time for an example.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

Maker = Callable[..., Path]


def pytest_configure() -> None:
    """What is imported and collected stays: it is not searched for garbage."""
    gc.disable()


def pytest_xdist_setupnodes(specs: list[object]) -> None:
    """Parallel workers, and the processes that they start, use one thread of torch and NumPy each.

    Both read the variable when they are imported. Threads of NumPy's OpenBLAS wait in a loop, which
    takes the time of the other workers.
    """
    if len(specs) > 1:
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_xdist_auto_num_workers() -> int | None:
    """Tests run in one worker where there is a GPU, since persistent kernels cannot share it."""
    return 1 if torch.cuda.is_available() else None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session", autouse=True)
def _isolated(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests use neither the user's cache nor the hub.

    Only compiled kernels, whose names have a digest of what they were built from, are shared with
    later sessions: compiling them takes minutes.
    """
    kernels = cache_folder().parents[1] / "megakernel-tts-tests"
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    kernels.mkdir(parents=True, exist_ok=True)
    cache_folder().parent.mkdir()
    cache_folder().symlink_to(kernels, target_is_directory=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    # HTTP clients read the authorities of certificates: all of them in 50 ms, one in no time.
    authority, end, _ = certifi.contents().partition("-----END CERTIFICATE-----\n")
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(authority + end)
    os.environ["SSL_CERT_FILE"] = str(file)


@pytest.fixture(scope="session", autouse=True)
def _client_timeouts() -> Iterator[None]:
    """Gives clients the timeout of the tests.

    By default httpx gives up after 5 s without a byte, and websockets after 10 s of a handshake.
    """
    connects: list[Any] = [async_websockets.connect.__init__, sync_websockets.connect]
    with pytest.MonkeyPatch.context() as patch:
        for connect in connects:
            patch.setitem(connect.__kwdefaults__, "open_timeout", TIMEOUT_S)
        for phase in ("connect", "read", "write", "pool"):
            patch.setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, TIMEOUT_S)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Small checkpoints, each made once.

    Shallow ones have a layer less in either network: two in the talker, which is no multiple of the
    three epoch tags, and one in the predictor.
    """
    made: dict[tuple[object, ...], Path] = {}
    stack = random_checkpoint._stack

    def make(
        kind: Kind = "custom_voice", size: Size = "0b6", codes: int = 256, shallow: bool = False
    ) -> Path:
        key = (kind, size, codes, shallow)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("checkpoint")
            with pytest.MonkeyPatch.context() as patched:
                if shallow:
                    patched.setattr(random_checkpoint, "_stack", lambda h, n: stack(h, n - 1))
                write_checkpoint(made[key], kind, size, codes=codes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def load(checkpoint: Maker) -> Iterator[Callable[..., LoadedModel]]:
    """Loaded checkpoints on the CPU in float32; their engines are closed at the end."""
    loaded: dict[tuple[object, ...], LoadedModel] = {}

    def make(
        kind: Kind = "custom_voice", size: Model = "0b6", codes: int = 256, shallow: bool = False
    ) -> LoadedModel:
        key = (kind, size, codes, shallow)
        if key not in loaded:
            folder = find_checkpoint("demo") if size == "demo" else checkpoint(*key)
            loaded[key] = load_checkpoint(folder, torch.device("cpu"), torch.float32, 4)
        return loaded[key]

    yield make
    for one in loaded.values():
        one.engine.close()


@pytest.fixture(scope="session")
def comparison(load: Callable[..., LoadedModel]) -> MakeComparison:
    """Makes kernels on emulated instructions; each model is compiled once.

    A frame of a shallow model costs about half of a frame of a model with all layers.
    """
    if shutil.which("g++") is None:
        pytest.skip("no g++ for the emulator")

    def make(size: Size = "0b6", blocks: int = 3, shallow: bool = False) -> Comparison:
        loaded = load("custom_voice", size, shallow=shallow)
        return Comparison(loaded, EmulatedModule(loaded.config), blocks)

    return make


@pytest.fixture
def gpu_comparison(load: Callable[..., LoadedModel]) -> MakeComparison:
    """Makes kernels on the GPU, of the same weights."""
    return lambda size="0b6": Comparison(load("custom_voice", size), None)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def any_comparison(request: pytest.FixtureRequest) -> MakeComparison:
    """Makes kernels, on emulated instructions (shallow, two blocks, to be quick) and on the GPU."""
    if request.param == "gpu":
        return request.getfixturevalue("gpu_comparison")
    return partial(request.getfixturevalue("comparison"), blocks=2, shallow=True)


@pytest.fixture(scope="session")
def tts(checkpoint: Maker) -> Iterator[TTS]:
    """A CustomVoice model; shared, since loading is most of a short test's time."""
    with TTS.load(checkpoint(shallow=True), device="cpu", slots=4) as one:
        yield one


@pytest.fixture
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up speaks nothing: plain torch has nothing to load or compile."""
    monkeypatch.setattr("megakernel_tts.tts.warm_up", lambda *_: None)


@pytest.fixture
def rig(load: Callable[..., LoadedModel]) -> Iterator[Rig]:
    """An engine over a scripted backend with two slots."""
    one = Rig(load(), ScriptedBackend())
    yield one
    one.close()
