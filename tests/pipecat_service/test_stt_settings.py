"""Arguments and settings of the recognition service, and the names of languages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pipecat.transcriptions.language import Language

from megakernel_stt import STT, LookaheadError
from megakernel_stt.model.random_checkpoint import write_checkpoint
from pipecat_service import ColdEngineError, MegakernelSTTService
from pipecat_service.stt_settings import model_language, pipecat_language

pytestmark = pytest.mark.contract

Settings = MegakernelSTTService.Settings
LANGUAGES = ("en-US", "en-GB", "de-DE", "fr-CA")


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[STT]:
    folder = tmp_path_factory.mktemp("stt")
    write_checkpoint(folder)
    with STT.load(folder, "cpu", slots=1) as engine:
        yield engine


@pytest.fixture
def warm(cold: STT, monkeypatch: pytest.MonkeyPatch) -> STT:
    latencies_s = dict.fromkeys(cold.lookaheads_ms, 0.005)
    monkeypatch.setattr(cold, "_final_latencies_s", latencies_s)
    return cold


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("de-DE", "de-DE"),
        (Language.EN_GB, "en-GB"),
        (Language.EN, "en-US"),
        (Language.DE_AT, "de-DE"),
        (Language.FR, "fr-CA"),
        (Language.JA, None),
    ],
)
def test_a_language_has_the_models_name(language: str | None, expected: str | None) -> None:
    assert model_language(language, LANGUAGES) == expected
    assert model_language(language, ()) == "auto", "a model of one language"


def test_a_code_is_a_language_of_pipecat() -> None:
    assert pipecat_language("de-DE") is Language.DE_DE
    assert pipecat_language("xx-XX") is None and pipecat_language(None) is None


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"language": Language.DE}, r"language is a setting: settings=.*Settings\(language=...\)"),
        ({"lookahead_ms": 160}, "lookahead_ms is a setting"),
        ({"keepalive_timeout": 3.0}, "keepalive_timeout cannot be set"),
        ({"api_key": "x"}, "has no argument api_key"),
        ({"engine": "nvidia/x"}, r"engine is 'nvidia/x'; .* use model=\.\.\. instead"),
        ({"settings": {"language": "de"}}, "must be a MegakernelSTTService.Settings"),
    ],
)
def test_arguments_that_would_have_no_effect_are_refused(
    warm: STT, keywords: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TypeError, match=sentence):
        MegakernelSTTService(**{"engine": warm} | keywords)  # type: ignore[arg-type]


def test_arguments_of_pipecats_class_are_accepted(warm: STT) -> None:
    service = MegakernelSTTService(engine=warm, name="ears", sample_rate=8000)
    assert service.name == "ears" and service.service_metadata_frame().ttfs_p99_latency == 0.21


def test_the_time_to_the_final_is_that_of_the_warm_up(warm: STT) -> None:
    warm._final_latencies_s[560] = 0.3
    slow = MegakernelSTTService(engine=warm, settings=Settings(lookahead_ms=560))
    assert slow.service_metadata_frame().ttfs_p99_latency == 0.5


def test_a_cold_engine_is_refused(cold: STT) -> None:
    with pytest.raises(ColdEngineError, match="awarmup"):
        MegakernelSTTService(engine=cold)


def test_an_engine_or_a_model_is_needed(warm: STT) -> None:
    with pytest.raises(ValueError, match="found neither"):
        MegakernelSTTService()
    with pytest.raises(ValueError, match="found both"):
        MegakernelSTTService(engine=warm, model="another")


def test_a_lookahead_that_the_model_lacks_is_refused(warm: STT) -> None:
    with pytest.raises(LookaheadError, match="lookahead_ms is 100"):
        MegakernelSTTService(engine=warm, settings=Settings(lookahead_ms=100))


def test_an_offline_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "tdt")
    with STT.load(tmp_path, "cpu") as offline:
        monkeypatch.setattr(offline, "_final_latencies_s", {None: 0.1})
        with pytest.raises(ValueError, match="is an offline model"):
            MegakernelSTTService(engine=offline)
