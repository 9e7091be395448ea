import pytest
import torch

from megakernel_tts import ModelInfo, Voice
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.voices import OPENAI_VOICES, Catalog

LANGUAGES = ("english", "chinese")
NAMED = ModelInfo(
    "custom_voice",
    {"Ryan": LANGUAGES, "Eric": ("sichuan", *LANGUAGES)},
    LANGUAGES,
    False,
    None,
    "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
)
BASE = ModelInfo("base", {}, LANGUAGES, False, None, "/models/base")
DESIGN = ModelInfo("voice_design", {}, LANGUAGES, True, None, "/models/design")


def test_names_of_voices_ignore_case_and_the_default_is_the_first() -> None:
    catalog = Catalog(NAMED, {})
    assert [catalog.voice(name) for name in ("ryan", " ERIC", None)] == ["Ryan", "Eric", "Ryan"]
    with pytest.raises(RequestError, match="Ryan, Eric"):
        catalog.voice("nobody")


def test_names_of_openai_are_distributed_over_the_voices() -> None:
    voices = [Catalog(NAMED, {}).voice(name) for name in OPENAI_VOICES]
    assert len(voices) == 13 and set(voices) == {"Ryan", "Eric"}


def test_a_voice_of_the_model_is_preferred_to_a_name_of_openai() -> None:
    info = ModelInfo(
        "custom_voice", {"x": LANGUAGES, "Echo": LANGUAGES}, LANGUAGES, False, None, "m"
    )
    assert Catalog(info, {}).voice("echo") == "Echo"


@pytest.mark.parametrize(
    ("name", "language"),
    [
        (None, "auto"), ("", "auto"), ("Auto", "auto"), ("English", "english"), ("en", "english"),
        ("en-US", "english"), ("zh-CN", "chinese"), ("Sichuan", "sichuan"),
    ],
)  # fmt: skip
def test_languages_are_names_or_codes(name: str | None, language: str) -> None:
    assert Catalog(NAMED, {}).language(name) == language


@pytest.mark.parametrize("name", ["de", "klingon", "-"])
def test_other_languages_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match="auto or one of: english, chinese"):
        Catalog(NAMED, {}).language(name)


def test_the_model_has_its_last_name_and_those_of_openai() -> None:
    catalog = Catalog(NAMED, {})
    assert catalog.model == "Qwen3-TTS-12Hz-0.6B-CustomVoice"
    for name in (None, catalog.model, NAMED.name, "tts-1", "gpt-4o-mini-tts"):
        catalog.check_model(name)
    with pytest.raises(RequestError) as caught:
        catalog.check_model("tts-9")
    assert caught.value.status == 404
    assert Catalog(BASE, {}).model == "base"


def test_a_base_model_speaks_with_its_cloned_voices() -> None:
    voice = Voice(torch.zeros(4))
    catalog = Catalog(BASE, {"anna": voice})
    assert catalog.voices == ["anna"]
    assert catalog.voice("ANNA") is catalog.voice(None) is catalog.voice("alloy") is voice
    with pytest.raises(RequestError, match="--voice"):
        Catalog(BASE, {}).voice(None)


def test_a_designed_voice_has_no_name() -> None:
    assert Catalog(DESIGN, {}).voice("alloy") is None
