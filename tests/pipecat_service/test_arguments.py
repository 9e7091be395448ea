from pathlib import Path
from typing import Any

import pytest
import torch
from pipecat.services.tts_service import TextAggregationMode

from megakernel_tts import TTS, Voice, VoiceError
from pipecat_service import MegakernelTTSService
from pipecat_service.arguments import choose_model

pytestmark = pytest.mark.contract

CLONED = Voice(torch.zeros(4))
Settings = MegakernelTTSService.Settings


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"voice": "ryan"}, r"voice is a setting: settings=.*Settings\(voice=...\)"),
        ({"language": "german"}, "language is a setting"),
        ({"stop_frame_timeout_s": 3.0}, "stop_frame_timeout_s cannot be set"),
        ({"push_text_frames": True}, "push_text_frames cannot be set"),
        ({"aggregate_sentences": False}, "aggregate_sentences cannot be set"),
        ({"reuse_context_id_within_turn": False}, "reuse_context_id_within_turn cannot be set"),
        ({"pause_watchdog_timeout_s": 1.0}, "pause_watchdog_timeout_s cannot be set"),
        ({"api_key": "x"}, "has no argument api_key"),
        ({"engine": "demo"}, r"engine is 'demo'; .* use model=\.\.\. instead"),
        ({"settings": {"voice": "ryan"}}, "must be a MegakernelTTSService.Settings"),
    ],
)
def test_arguments_that_would_have_no_effect_are_refused(
    engine: TTS, keywords: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TypeError, match=sentence):
        MegakernelTTSService(**{"engine": engine} | keywords)  # type: ignore[arg-type]


def test_a_model_is_a_name_or_a_folder() -> None:
    with pytest.raises(TypeError, match="must be demo, a folder or a hub id"):
        MegakernelTTSService(model=3)  # type: ignore[arg-type]


def test_arguments_of_pipecats_base_classes_are_accepted(engine: TTS) -> None:
    tts = MegakernelTTSService(
        engine=engine,
        name="speaker",
        sample_rate=8000,
        text_aggregation_mode=TextAggregationMode.SENTENCE,
    )
    assert tts.name == "speaker"


@pytest.mark.parametrize(
    ("voices", "error", "sentence"),
    [
        (["anna"], TypeError, "must be a mapping"),
        ({"anna": "anna.safetensors"}, TypeError, "a str for a voice"),
        ({1: CLONED}, TypeError, "has 1 for a name"),
        ({"Anna": CLONED, " anna": CLONED}, ValueError, "'Anna' and ' anna', which are the same"),
        ({"anna": CLONED}, VoiceError, "only Base models speak with cloned voices"),
    ],
)
def test_cloned_voices_that_could_not_be_used_are_refused(
    engine: TTS, voices: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        MegakernelTTSService(engine=engine, voices=voices)


def test_token_aggregation_is_refused(engine: TTS) -> None:
    with pytest.raises(ValueError, match="text_aggregation_mode=TOKEN is not supported"):
        MegakernelTTSService(engine=engine, text_aggregation_mode=TextAggregationMode.TOKEN)


def test_the_model_is_named_by_the_argument_or_the_setting() -> None:
    assert choose_model(None, Path("some/model"), None) == "some/model"
    assert choose_model(None, None, Settings(model="some/model")) == "some/model"
    assert choose_model(None, "demo", Settings(model="demo", voice="low")) == "demo"
    assert choose_model("simulated", None, Settings(model=None)) is None
    assert choose_model("simulated", None, Settings(model="simulated")) is None


def test_a_service_takes_either_an_engine_or_a_model(engine: TTS) -> None:
    with pytest.raises(ValueError, match="found neither"):
        MegakernelTTSService()
    with pytest.raises(ValueError, match="found both"):
        MegakernelTTSService(engine=engine, model="demo")
    with pytest.raises(ValueError, match="found both"):
        MegakernelTTSService(engine=engine, settings=Settings(model="another"))
    with pytest.raises(ValueError, match="model is 'demo' and Settings"):
        MegakernelTTSService(model="demo", settings=Settings(model="another"))
