from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from loguru import logger
from pipecat.services.settings import TTSSettings
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory

from megakernel_tts import (
    MegakernelTTSError,
    ModelInfo,
    Pronunciations,
    Sampling,
    Voice,
    VoiceError,
)
from pipecat_service.errors import error_category
from pipecat_service.settings import (
    MegakernelTTSSettings,
    SettingsCheck,
    default_settings,
    language_name,
)

LANGUAGES = ("english", "german")
VOICES = {"ryan": LANGUAGES, "dylan": ("beijing_dialect", *LANGUAGES)}
NAMED = ModelInfo("custom_voice", VOICES, LANGUAGES, False, None, "named")
BASE = ModelInfo("base", {}, LANGUAGES, False, None, "base")
DESIGN = ModelInfo("voice_design", {}, LANGUAGES, True, None, "design")
CURRENT = {  # of a service with a model of a kind
    "custom_voice": {"voice": "ryan"},
    "base": {"voice": "anna"},
    "voice_design": {"instruct": "A calm voice."},
}


def cloned(info: ModelInfo) -> dict[str, Voice]:
    """Cloned voices of a service with a model."""
    return {"anna": Voice(torch.zeros(4))} if info is BASE else {}


def accept(voice: str | Voice | None, language: str, instruct: str | None) -> None:
    """A model that accepts what the other checks accept."""


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Warnings that were logged."""
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    yield lines
    logger.remove(handler)


def settings(**given: Any) -> MegakernelTTSSettings:
    chosen = default_settings("a model")
    chosen.apply_update(MegakernelTTSSettings(**given))
    return chosen


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        (Language.EN, "english"),
        (Language.EN_IN, "english"),
        (Language.DE_CH, "german"),
        (Language.ZH_CN, "chinese"),
        (Language.PT_BR, "portuguese"),
        (Language.SW, None),
    ],
)
def test_regions_map_to_their_language(language: Language, expected: str | None) -> None:
    assert language_name(language) == expected


def test_defaults_give_every_setting() -> None:
    given = default_settings("demo").given_fields()
    assert given.pop("model") == "demo"
    assert set(given) == {
        "voice", "language", "instruct", "sampling", "speed", "pronunciations",
    }  # fmt: skip
    assert set(given.values()) == {None}


@pytest.mark.parametrize(
    ("info", "given"),
    [
        (NAMED, {"voice": "Dylan ", "sampling": Sampling(seed=1)}),
        (NAMED, {"voice": "ryan", "instruct": " "}),
        (NAMED, {"voice": "ryan", "speed": 1.5, "pronunciations": {"GPU": "gee pee you"}}),
        (NAMED, {"voice": "ryan", "speed": None, "pronunciations": Pronunciations({"a": "b"})}),
        (BASE, {"voice": "Anna"}),
        (DESIGN, {"instruct": "A calm voice."}),
    ],
)
def test_settings_that_suit_the_model_are_kept(info: ModelInfo, given: dict[str, Any]) -> None:
    check, chosen = SettingsCheck(info, cloned(info), accept), settings(**given)
    check.complete(chosen)
    delta, errors = check.accepted(chosen, MegakernelTTSSettings(**given))
    assert chosen == settings(**given)
    assert delta == MegakernelTTSSettings(**given) and not errors


@pytest.mark.parametrize(
    ("info", "given", "sentence"),
    [
        (NAMED, {"voice": "anna"}, "There is no voice 'anna'; choose one of: ryan, dylan."),
        (NAMED, {"voice": 3}, "There is no voice 3"),
        (NAMED, {"instruct": "Calmly."}, "follows no instruction"),
        (NAMED, {"instruct": 3}, "must be a string"),
        (NAMED, {"sampling": "greedy"}, "must be a Sampling"),
        (NAMED, {"speed": 3}, "speed is 3"),
        (NAMED, {"speed": "fast"}, "speed is 'fast'"),
        (NAMED, {"pronunciations": ["GPU"]}, "list"),
        (NAMED, {"pronunciations": {"two words": "x"}}, "has a space"),
        (BASE, {"voice": "ryan"}, "There is no voice 'ryan'; choose one of: anna."),
        (BASE, {"instruct": "Calmly."}, "follows no instruction"),
        (DESIGN, {"instruct": "Calm.", "voice": "ryan"}, "found the voice 'ryan'"),
        (DESIGN, {"instruct": None}, "needs a description"),
    ],
)
def test_other_settings_are_refused_one_by_one(
    info: ModelInfo, given: dict[str, Any], sentence: str
) -> None:
    check = SettingsCheck(info, cloned(info), accept)
    with pytest.raises(MegakernelTTSError, match=sentence) as caught:
        check.complete(settings(**given))
    assert error_category(caught.value) is ErrorCategory.INVALID_REQUEST
    valid: dict[str, Any] = {"language": "german"} | (
        {"voice": None} if "voice" not in given else {}
    )
    current = settings(**CURRENT[info.kind])
    delta, (error,) = check.accepted(current, MegakernelTTSSettings(**valid | given))
    assert sentence in str(error)
    kept = delta.given_fields()
    assert kept["language"] == "german" and ("voice" in kept) == ("voice" in valid)


def test_what_the_model_refuses_is_refused_with_the_other_settings_of_the_service() -> None:
    """A voice is checked with the present instruction, an instruction with the new voice."""
    requested: list[tuple[object, str | None]] = []

    def refuse_loud(voice: object, language: str, instruct: str | None) -> None:
        requested.append((voice, instruct))
        if instruct == "Loud.":
            raise VoiceError("too loud")

    info = replace(NAMED, takes_instruct=True)
    check, current = SettingsCheck(info, {}, refuse_loud), settings(voice="ryan", instruct="Low.")
    new = MegakernelTTSSettings(voice="dylan", instruct="Loud.")
    delta, (error,) = check.accepted(current, new)
    assert requested == [("dylan", "Low."), ("dylan", "Loud.")]
    assert str(error) == "too loud" and delta.given_fields() == {"voice": "dylan"}
    assert current.voice == "ryan", "the settings of the service were changed"
    with pytest.raises(VoiceError, match="too loud"):
        check.complete(settings(instruct="Loud."))


def test_cloned_voices_are_for_base_models() -> None:
    with pytest.raises(VoiceError, match="only Base models speak with cloned voices"):
        SettingsCheck(NAMED, cloned(BASE), accept).complete(settings())
    voices = cloned(BASE)
    check = SettingsCheck(BASE, voices, accept)
    assert check.voice(settings(voice=" ANNA")) is voices["anna"]


def test_a_base_model_without_cloned_voices_is_refused() -> None:
    with pytest.raises(VoiceError, match="A Base model speaks with cloned voices"):
        SettingsCheck(BASE, {}, accept).complete(settings())


def test_no_voice_is_the_first() -> None:
    chosen = settings()
    SettingsCheck(NAMED, {}, accept).complete(chosen)
    assert chosen.voice == "ryan"
    delta, errors = SettingsCheck(NAMED, {}, accept).accepted(chosen, TTSSettings(voice=None))
    assert delta.voice == "ryan" and not errors


@pytest.mark.parametrize(
    ("voice", "language", "expected", "num_warnings"),
    [
        ("ryan", None, None, 0),
        ("ryan", "auto", None, 0),
        ("ryan", "german", "german", 0),
        ("ryan", "English ", "english", 0),
        ("dylan", "beijing_dialect", "beijing_dialect", 0),
        ("ryan", "de-XX", "german", 1),
        ("ryan", "beijing_dialect", None, 1),
        ("ryan", "french", None, 1),
        ("ryan", Language.FR_CA, None, 1),
        ("ryan", Language.SW, None, 1),
        ("ryan", "klingon", None, 1),
        ("ryan", "", None, 1),
    ],
)
def test_an_unknown_language_falls_back_to_its_base_language_and_then_to_the_text(
    warnings: list[str], voice: str, language: Any, expected: str | None, num_warnings: int
) -> None:
    chosen = settings(voice=voice, language=language)
    SettingsCheck(NAMED, {}, accept).complete(chosen)
    assert chosen.language == expected
    assert len(warnings) == num_warnings
    assert all(str(expected or "the language of the text") in line for line in warnings)
