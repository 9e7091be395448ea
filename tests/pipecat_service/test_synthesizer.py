import asyncio
import threading
from typing import Any

import pytest
import torch

from bench.simulation import simulated_tts
from megakernel_tts import TTS, EngineClosedError, LivePolicy, Voice, VoiceError
from pipecat_service import ColdEngineError
from pipecat_service.settings import MegakernelTTSSettings, default_settings
from pipecat_service.synthesizer import EngineSynthesizer


def settings(**given: Any) -> MegakernelTTSSettings:
    chosen = default_settings("a label")
    chosen.apply_update(MegakernelTTSSettings(**given))
    return chosen


def test_opening_a_session_needs_a_loaded_model() -> None:
    synthesizer = EngineSynthesizer("a model", {})
    assert not synthesizer.aligned
    with pytest.raises(EngineClosedError, match="was not loaded"):
        asyncio.run(synthesizer.open(settings()))


def test_a_refused_engine_is_not_kept(engine: TTS) -> None:
    synthesizer = EngineSynthesizer(None, {})
    with simulated_tts() as cold, pytest.raises(ColdEngineError):
        synthesizer.set_engine(cold, settings())
    with pytest.raises(VoiceError):
        synthesizer.set_engine(engine, settings(voice="unknown"))
    with pytest.raises(EngineClosedError):
        asyncio.run(synthesizer.open(settings()))


@pytest.mark.parametrize(
    ("name", "cloned"), [("ryan", False), ("Anna", True), (" anna ", True), (None, False)]
)
def test_cloned_voices_are_found_by_name_and_prepared_on_another_thread(
    monkeypatch: pytest.MonkeyPatch, name: str | None, cloned: bool
) -> None:
    calls: list[tuple[threading.Thread, tuple[Any, ...], dict[str, Any]]] = []
    voice = Voice(torch.zeros(1))
    with simulated_tts(kind="base" if cloned else "custom_voice") as engine:
        engine.warmup()
        monkeypatch.setattr(
            engine,
            "open",
            lambda *args, **keywords: calls.append((threading.current_thread(), args, keywords)),
        )
        synthesizer = EngineSynthesizer(None, {" ANNA": voice} if cloned else {})
        chosen = settings(voice=name, instruct=" ", pronunciations={"a": "b"})
        synthesizer.set_engine(engine, chosen)
        asyncio.run(synthesizer.open(chosen))
    ((thread, args, keywords),) = calls
    assert keywords == {"speed": 1.0, "pronunciations": {"a": "b"}}
    expected = voice if cloned else "ryan"
    assert args == (expected, "auto", " ", "streaming", None, LivePolicy().chunks)
    assert (thread is not threading.main_thread()) == cloned
