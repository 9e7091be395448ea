import asyncio
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from megakernel_tts import TTS, Voice
from megakernel_tts.server.app import Server
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.voice_library import UploadedVoice, VoiceLibrary

VOICE = Voice(torch.ones(4))


def uploaded(name: str, created_at: int = 1) -> UploadedVoice:
    return UploadedVoice(
        name=name,
        voice=VOICE,
        consent="given",
        created_at=created_at,
        file_size=10,
        mime_type="audio/wav",
        speaker_description=None,
    )


def test_names_ignore_case_and_the_order_is_that_of_the_uploads(tmp_path: Path) -> None:
    library = VoiceLibrary({" Henry ": VOICE}, tmp_path)
    for number, name in enumerate(["Zoe", "anna"]):
        asyncio.run(library.add(uploaded(name, number)))
    for one in (library, VoiceLibrary({"henry": VOICE}, tmp_path)):
        assert [*one] == ["henry", "zoe", "anna"] and len(one) == 3
        assert [upload.name for upload in one.uploaded] == ["Zoe", "anna"]
        with pytest.raises(RequestError, match="choose another name"):
            one.check_name("ZOE")


def test_files_of_say_are_voices_too(tmp_path: Path) -> None:
    VOICE.save(tmp_path / "anna.safetensors")
    (upload,) = VoiceLibrary({}, tmp_path).uploaded
    assert (upload.name, upload.consent, upload.speaker_description) == ("anna", "", None)
    assert np.array_equal(upload.voice.x_vector, VOICE.x_vector)


def test_files_that_are_no_voices_are_logged_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"no voice")
    for name, description in (("b", "no json"), ("c", "[]"), ("d", '{"created_at": []}')):
        VOICE.save(tmp_path / f"{name}.safetensors")
        (tmp_path / f"{name}.json").write_text(description)
    VOICE.save(tmp_path / "a voice.safetensors")
    VOICE.save(tmp_path / "good.safetensors")
    (tmp_path / "e.json").write_text(json.dumps({"name": "e"}))
    with caplog.at_level(logging.WARNING):
        assert [*VoiceLibrary({}, tmp_path)] == ["good"]
    assert len([record for record in caplog.records if "left out" in record.message]) == 5
    assert len([*tmp_path.iterdir()]) == 10


def test_a_voice_without_a_folder_is_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    library = VoiceLibrary({}, None)
    asyncio.run(library.add(uploaded("anna")))
    assert asyncio.run(library.remove("Anna")).name == "anna"
    assert not library and not [*tmp_path.iterdir()]


def test_the_number_of_voices_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakernel_tts.server.voice_library._MAX_UPLOADED", 2)
    library = VoiceLibrary({}, None)
    for name in ("a", "b"):
        asyncio.run(library.add(uploaded(name)))
    with pytest.raises(RequestError, match="delete one"):
        asyncio.run(library.add(uploaded("c")))


def test_a_folder_of_voices_needs_a_model_that_clones(engine: TTS, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Base model"):
        Server(engine, ServerSettings(voice_dir=tmp_path))
    with pytest.raises(ValueError, match="is not a folder"):
        ServerSettings(voice_dir=tmp_path / "none")
