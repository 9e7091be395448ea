from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from megakernel_tts import TTS, Sampling, Voice, VoiceError

SAMPLING = Sampling(seed=1, max_frames=6)


@pytest.fixture(scope="module")
def base(checkpoint: Callable[..., Path]):
    with TTS.load(checkpoint("base", "1b7"), device="cpu", slots=2) as tts:
        yield tts


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    rng = np.random.RandomState(0)
    path = tmp_path / "ref.wav"
    soundfile.write(path, 0.1 * rng.standard_normal((44_100, 2)), 44_100)
    return path


@pytest.mark.parametrize("text", [None, "the quick brown fox"])
def test_saving_a_voice_does_not_change_its_samples(
    base: TTS, recording: Path, tmp_path: Path, text: str | None
) -> None:
    voice = base.clone(recording, text)
    assert (voice.codes is None) == (text is None)
    voice.save(tmp_path / "voice.safetensors")
    loaded = Voice.load(tmp_path / "voice.safetensors")
    assert torch.equal(loaded.x_vector, voice.x_vector)
    assert loaded.text == text
    for layout in ("full", "streaming"):
        one = base.say("hello there", voice, layout=layout, sampling=SAMPLING)
        two = base.say("hello there", loaded, layout=layout, sampling=SAMPLING)
        np.testing.assert_array_equal(one.pcm, two.pcm)


def test_the_transcript_changes_the_codes(base: TTS, recording: Path) -> None:
    said = [
        base.say("hello", base.clone(recording, text), sampling=SAMPLING).codes.tolist()
        for text in (None, "the quick brown fox", "another text")
    ]
    assert said[0] != said[1] != said[2] != said[0]


def test_a_transcript_can_be_longer_than_its_recording(base: TTS, recording: Path) -> None:
    """Its rest is fed before the text, as in the official package."""
    voice = base.clone(recording, "a very long transcript " * 10)
    assert len(base.say("hello", voice, layout="streaming", sampling=SAMPLING).codes) == 6


def test_only_base_models_clone(tts: TTS, recording: Path) -> None:
    with pytest.raises(VoiceError, match="only Base models clone"):
        tts.clone(recording)
    with pytest.raises(VoiceError, match="choose one of: serena, ryan, eric, dylan"):
        tts.say("hello", Voice(torch.zeros(128)))


def test_a_voice_of_another_model_is_refused(base: TTS) -> None:
    with pytest.raises(VoiceError, match="5 values and this model needs 192"):
        base.say("hello", Voice(torch.zeros(5)))
    with pytest.raises(VoiceError, match="not those of this model's codec"):
        base.say("hello", Voice(torch.zeros(192), torch.full((4, 16), 999), "text"))
    with pytest.raises(VoiceError, match="no voice was given"):
        base.say("hello")
    with pytest.raises(VoiceError, match="found 'ryan'"):
        base.say("hello", "ryan")


def test_invalid_voice_files_and_values_are_refused(
    tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(VoiceError, match="does not exist"):
        Voice.load(tmp_path / "none.safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"no")
    with pytest.raises(VoiceError, match="is no voice file"):
        Voice.load(tmp_path / "a.safetensors")
    with pytest.raises(VoiceError, match=r"no voice was saved to it"):
        Voice.load(checkpoint() / "model.safetensors")
    for x_vector, codes in (
        (torch.tensor([1.0, torch.nan]), None),
        (torch.zeros(2, 2), None),
        (torch.zeros(2, dtype=torch.int64), None),
        (np.zeros(2, np.float32), None),
        (torch.zeros(2), torch.zeros(0, 16, dtype=torch.int64)),
        (torch.zeros(2), torch.zeros(3, 16)),
    ):
        with pytest.raises(VoiceError, match=r"x_vector|codes"):
            Voice(x_vector, codes, None if codes is None else "text")  # type: ignore[arg-type]
    with pytest.raises(VoiceError, match="cannot be written"):
        Voice(torch.zeros(3)).save(tmp_path / "none" / "a.safetensors")
    with pytest.raises(VoiceError, match="both codes and a transcript"):
        Voice(torch.zeros(3), None, "text")
