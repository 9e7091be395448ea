import pytest

from bench.simulation import simulated_tts
from megakernel_tts import TTS, Sampling, VoiceError
from pipecat_service import ColdEngineError, MegakernelTTSService

pytestmark = pytest.mark.contract

Settings = MegakernelTTSService.Settings


def test_a_cold_engine_is_refused() -> None:
    with simulated_tts() as cold, pytest.raises(ColdEngineError, match=r"awarmup\(\)"):
        MegakernelTTSService(engine=cold)


@pytest.mark.parametrize("voice", ["unknown", ""])
def test_a_voice_that_the_model_lacks_is_refused(engine: TTS, voice: str) -> None:
    with pytest.raises(VoiceError, match="ryan, serena"):
        MegakernelTTSService(engine=engine, settings=Settings(voice=voice))


def test_the_default_voice_is_the_first(engine: TTS) -> None:
    for settings in (None, Settings(), Settings(voice=None)):
        tts = MegakernelTTSService(engine=engine, settings=settings)
        assert tts.settings.given_fields()["voice"] == "ryan"


def test_settings_are_kept(engine: TTS) -> None:
    settings = Settings(voice="Serena", language="german", sampling=Sampling(seed=7))
    tts = MegakernelTTSService(engine=engine, settings=settings)
    assert tts.settings.given_fields() == {
        "model": "simulated",
        "voice": "Serena",
        "language": "german",
        "instruct": None,
        "sampling": Sampling(seed=7),
        "speed": None,
        "pronunciations": None,
    }
