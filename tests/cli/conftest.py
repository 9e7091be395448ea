import pytest

from megakernel_tts import TTS, Sampling


@pytest.fixture
def short_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits speech to four frames, for tests of the command line."""
    short = property(lambda self: Sampling(seed=1, max_frames=4))
    monkeypatch.setattr(TTS, "sampling", short)
