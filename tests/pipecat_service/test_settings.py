import pytest
import torch
from pipecat.transcriptions.language import Language

from megakernel_tts import ModelInfo, Voice, VoiceError
from pipecat_service.settings import check_voice, default_settings, language_name

ANNA = Voice(torch.zeros(4))
NAMED = ModelInfo("custom_voice", {"ryan": (), "vivian": ()}, ("english",), False, None)
BASE = ModelInfo("base", {}, ("english",), False, None)
DESIGN = ModelInfo("voice_design", {}, ("english",), True, None)


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
    assert set(given) == {"voice", "language", "instruct", "sampling"}
    assert set(given.values()) == {None}


def test_voices_of_the_model_are_accepted() -> None:
    check_voice("Vivian ", None, NAMED, {})
    check_voice("anna", None, BASE, {"Anna": ANNA})
    check_voice(None, "A calm voice.", DESIGN, {})


@pytest.mark.parametrize(
    ("name", "info", "cloned", "sentence"),
    [
        ("anna", NAMED, {}, "There is no voice 'anna'; choose one of: ryan, vivian."),
        ("ryan", BASE, {"anna": ANNA}, "There is no voice 'ryan'; choose one of: anna."),
        (None, BASE, {}, "A Base model speaks with cloned voices"),
        ("ryan", DESIGN, {}, "found the voice 'ryan'"),
        (None, DESIGN, {}, "needs a description"),
    ],
)
def test_other_voices_are_refused_with_the_choices(
    name: str | None, info: ModelInfo, cloned: dict[str, Voice], sentence: str
) -> None:
    with pytest.raises(VoiceError, match=sentence):
        check_voice(name, None, info, cloned)
