import base64
import io
import json
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from megakernel_tts import TTS, Voice
from megakernel_tts.server.cloning import MAX_INLINE_BYTES
from megakernel_tts.server.openai_voices import MAX_RECORDING_BYTES
from megakernel_tts.server.settings import ServerSettings
from tests.fakes import TIMEOUT_S
from tests.server.cloned_speech import (
    CONSENT,
    RECORDING,
    SAMPLING,
    TEXT,
    TRANSCRIPT,
    assert_same,
    audio_file,
    error_of,
    expected,
    listed,
    pcm_of,
    speak,
    upload,
)
from tests.server.running import RunningServer, running_server, wait_until


@pytest.fixture(scope="module")
def base(checkpoint: Callable[..., Path]) -> Iterator[TTS]:
    """A Base model with random weights."""
    with TTS.load(checkpoint("base", "1b7", shallow=True), device="cpu", slots=2) as tts:
        tts._warm = True
        yield tts


@pytest.fixture
def base_server(base: TTS) -> Iterator[RunningServer]:
    with running_server(base) as server:
        yield server


def test_servers_that_share_an_address_refuse_uploads_and_take_recordings(base: TTS) -> None:
    with running_server(base, ServerSettings(uploads=False)) as server:
        refused = upload(server)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            400,
            "uploads_unsupported",
        )
        assert httpx.get(f"{server.url}/status").json()["takes_voices"] is False
        assert listed(server)["voices"] == []
        recording = base64.b64encode(RECORDING).decode()
        assert_same(pcm_of(speak(server, ref_audio=recording)), expected(base, None))


def test_an_uploaded_voice_is_listed_speaks_and_is_deleted(base_server: RunningServer) -> None:
    reply = upload(base_server, ref_text=TRANSCRIPT, speaker_description="A calm voice")
    assert reply.status_code == 200 and reply.json()["success"] is True
    described = reply.json()["voice"]
    assert described == {
        "name": "Anna",
        "consent": CONSENT,
        "created_at": described["created_at"],
        "file_size": len(RECORDING),
        "mime_type": "audio/wav",
        "ref_text": TRANSCRIPT,
        "speaker_description": "A calm voice",
    }
    assert listed(base_server) == {"voices": ["anna"], "uploaded_voices": [described]}
    pcm = pcm_of(speak(base_server, voice="Anna"))
    assert_same(pcm, expected(base_server.tts, TRANSCRIPT))
    assert_same(pcm_of(speak(base_server, voice="alloy")), pcm)

    deleted = httpx.delete(f"{base_server.url}/v1/audio/voices/ANNA")
    assert deleted.json()["success"] is True
    assert listed(base_server) == {"voices": [], "uploaded_voices": []}
    assert error_of(speak(base_server, voice="Anna"))["param"] == "voice"
    assert error_of(httpx.delete(f"{base_server.url}/v1/audio/voices/anna"), 404)["param"] == "name"


@pytest.mark.parametrize("text", [None, TRANSCRIPT])
def test_uploaded_voices_survive_a_restart_in_their_folder(
    base: TTS, tmp_path: Path, text: str | None
) -> None:
    settings = ServerSettings(voice_dir=tmp_path)
    with running_server(base, settings) as server:
        assert upload(server, ref_text=text or "").status_code == 200
        before = listed(server)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["anna.json", "anna.safetensors"]
    with running_server(base, settings) as server:
        assert listed(server) == before
        assert_same(pcm_of(speak(server, voice="anna")), expected(base, text))
        httpx.delete(f"{server.url}/v1/audio/voices/anna")
    assert not [*tmp_path.iterdir()]


def test_voices_of_the_command_line_come_first_and_stay(base: TTS) -> None:
    voice = base.clone(io.BytesIO(RECORDING))
    with running_server(base, ServerSettings(voices={"Henry": voice})) as server:
        assert error_of(upload(server, name="henry"))["code"] == "voice_exists"
        assert upload(server).status_code == 200
        assert listed(server)["voices"] == ["henry", "anna"]
        assert error_of(httpx.delete(f"{server.url}/v1/audio/voices/henry"), 404)


def as_base64(recording: bytes) -> str:
    return base64.b64encode(recording).decode()


@pytest.mark.parametrize("head", ["", "data:audio/wav;base64,", "data:;base64,"])
@pytest.mark.parametrize("x_vector_only", [False, True])
def test_a_recording_in_the_request_is_the_voice(
    base_server: RunningServer, head: str, x_vector_only: bool
) -> None:
    reply = speak(
        base_server,
        voice="alloy",
        ref_audio=head + as_base64(RECORDING),
        ref_text=TRANSCRIPT,
        x_vector_only_mode=x_vector_only,
    )
    assert_same(pcm_of(reply), expected(base_server.tts, None if x_vector_only else TRANSCRIPT))
    assert listed(base_server)["voices"] == []


def test_a_recording_may_be_the_only_one_of_an_array(base_server: RunningServer) -> None:
    reply = speak(base_server, ref_audio=[as_base64(RECORDING)], ref_text=TRANSCRIPT)
    assert_same(pcm_of(reply), expected(base_server.tts, TRANSCRIPT))


@pytest.mark.parametrize("recordings", [[], 2 * [as_base64(RECORDING)], [None], [["YQ=="]]])
def test_other_arrays_of_recordings_are_refused(
    base_server: RunningServer, recordings: list[Any]
) -> None:
    assert error_of(speak(base_server, ref_audio=recordings))["param"] == "ref_audio"


@pytest.mark.parametrize("text", [None, TRANSCRIPT])
def test_references_hold_the_recording_and_its_transcript(
    base_server: RunningServer, text: str | None
) -> None:
    reference = {"audio_path": f"data:audio/wav;base64,{as_base64(RECORDING)}", "text": text}
    pcm = pcm_of(speak(base_server, references=[reference]))
    assert_same(pcm, expected(base_server.tts, text))


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"references": []}, "references"),
        ({"references": ["a"]}, "references"),
        ({"references": {"audio_path": "a"}}, "references"),
        ({"references": 2 * [{"audio_path": as_base64(RECORDING)}]}, "references"),
        ({"references": [{"audio_path": "YQ=="}], "ref_audio": "YQ=="}, "references"),
        ({"references": [{"text": "Hello."}]}, "references[0].audio_path"),
        ({"references": [{"audio_path": "/etc/hostname"}]}, "references[0].audio_path"),
        ({"references": [{"audio_path": "file:///etc/hostname"}]}, "references[0].audio_path"),
        ({"references": [{"audio_path": "https://a/b.wav"}]}, "references[0].audio_path"),
        ({"references": [{"audio_path": 1}]}, "audio_path"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_references_of_another_form_are_refused(
    base_server: RunningServer, fields: dict[str, Any], parameter: str
) -> None:
    assert error_of(speak(base_server, **fields))["param"] == parameter


def test_an_embedding_in_the_request_is_the_voice(base_server: RunningServer) -> None:
    voice = base_server.tts.clone(io.BytesIO(RECORDING))
    embedding = voice.x_vector.tolist()
    pcm = pcm_of(speak(base_server, speaker_embedding=embedding))
    assert_same(pcm, expected(base_server.tts, None))
    make = base_server.server.streams.cloner.of_embedding
    assert make(embedding, parameter="") is make(embedding, parameter=""), "its prefix is cached"


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        ("abc", "must be an array"),
        ([], "array"),
        ([0.1, "0.2"], "array of at most 8,192 numbers"),
        ([0.1, True], "array of at most 8,192 numbers"),
        ([[0.1] * 64], "array of at most 8,192 numbers"),
        ([0.1] * 8193, "array of at most 8,192 numbers"),
        ([0.1, 1e300], "very large values"),
        ([10**400], "too large"),
        ([0.1] * 3, "3 values"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_embedding_of_another_form_is_refused(
    base_server: RunningServer, embedding: object, message: str
) -> None:
    error = error_of(speak(base_server, speaker_embedding=embedding))
    assert error["param"] in ("speaker_embedding", "voice") and message in error["message"]


def test_a_recording_and_an_embedding_are_refused(base_server: RunningServer) -> None:
    reply = speak(base_server, speaker_embedding=[0.1], ref_audio=as_base64(RECORDING))
    assert error_of(reply)["param"] == "speaker_embedding"


def test_items_of_a_batch_have_voices_of_their_own(base_server: RunningServer) -> None:
    items = [{}, {"ref_text": TRANSCRIPT}, {"ref_audio": "/etc/hostname"}]
    body = SAMPLING | {
        "items": [{"input": TEXT} | item for item in items],
        "ref_audio": as_base64(RECORDING),
        "response_format": "pcm",
    }
    reply = httpx.post(f"{base_server.url}/v1/audio/speech/batch", json=body)
    *spoken, failed = reply.json()["results"]
    for result, text in zip(spoken, (None, TRANSCRIPT), strict=True):
        pcm = np.frombuffer(base64.b64decode(result["audio_data"]), "<i2")
        assert_same(pcm, expected(base_server.tts, text))
    assert failed["audio_data"] is None and "no valid base64" in failed["error"]


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_recordings_may_be_compressed(base_server: RunningServer, kind: str) -> None:
    reply = speak(base_server, ref_audio=as_base64(audio_file(kind=kind)))
    assert len(pcm_of(reply)) == 6 * 1920


def test_a_repeated_recording_is_cloned_once(
    base_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloned: list[str | None] = []
    clone = base_server.tts.clone

    def recorded(recording: Any, text: str | None) -> Voice:
        cloned.append(text)
        return clone(recording, text)

    monkeypatch.setattr(base_server.tts, "clone", recorded)
    for text in (None, TRANSCRIPT, None, TRANSCRIPT):
        pcm_of(speak(base_server, ref_audio=as_base64(RECORDING), ref_text=text))
    assert cloned == [None, TRANSCRIPT]


@pytest.mark.parametrize(
    ("recording", "message"),
    [
        ("https://example.com/a.wav", "Other URLs and paths are not read"),
        ("file:///etc/hostname", "Other URLs and paths are not read"),
        ("data:audio/wav,abc", "Other URLs and paths are not read"),
        ("", "Other URLs and paths are not read"),
        ("/etc/hostname", "no valid base64"),
        ("data:audio/wav;base64,a", "no valid base64"),
        (as_base64(b"no audio at all!"), "not readable as audio"),
        (as_base64(audio_file(0.1)), "at least 0.5 s"),
        (["https://example.com/a.wav"], "Other URLs and paths are not read"),
        ({"url": "a"}, "must be a string"),
    ],
)
def test_other_references_are_refused(
    base_server: RunningServer, recording: object, message: str
) -> None:
    error = error_of(speak(base_server, ref_audio=recording))
    assert error["param"] == "ref_audio" and message in error["message"]


def test_a_path_is_not_opened(base_server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "aaaa").write_bytes(RECORDING)  # whose path may be valid base64
    for reference in (str(tmp_path / "aaaa"), f"file://{tmp_path}/aaaa", f"data:{tmp_path}/aaaa"):
        error_of(speak(base_server, ref_audio=reference))


def test_large_recordings_are_refused(base_server: RunningServer) -> None:
    too_large = bytes(MAX_INLINE_BYTES + 1000)
    error = error_of(speak(base_server, ref_audio=as_base64(too_large)), 413)
    assert "upload it" in error["message"]
    error_of(speak(base_server, ref_audio=as_base64(bytes(2 * MAX_INLINE_BYTES))), 413)
    error_of(upload(base_server, bytes(MAX_RECORDING_BYTES + (1 << 20))), 413)


def test_a_large_upload_writes_no_temporary_file(
    base_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    recording = audio_file(30, rate=48_000)
    assert len(recording) > 2 << 20
    assert upload(base_server, recording).status_code == 200


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"name": ""}, "name"),
        ({"name": "../anna"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"consent": " "}, "consent"),
        ({"ref_text": "a" * 5000}, "ref_text"),
    ],
    ids=str,
)
def test_invalid_fields_of_an_upload_are_refused(
    base_server: RunningServer, fields: dict[str, str], parameter: str
) -> None:
    assert error_of(upload(base_server, RECORDING, **fields))["param"] == parameter
    assert listed(base_server)["voices"] == []


def test_a_recording_that_is_no_speech_is_refused(base_server: RunningServer) -> None:
    for recording in (b"", b"no audio", audio_file(0.1), audio_file(61)):
        assert error_of(upload(base_server, recording))["param"] == "audio_sample"


def test_forms_without_a_recording_are_refused(base_server: RunningServer) -> None:
    url = f"{base_server.url}/v1/audio/voices"
    fields = {"name": "anna", "consent": CONSENT}
    as_text = {name: (None, value) for name, value in (fields | {"audio_sample": "abc"}).items()}
    assert error_of(httpx.post(url, files=as_text))["param"] == "audio_sample"
    assert error_of(httpx.post(url, data=fields))["code"] == "invalid_form"
    assert error_of(httpx.post(url, json=fields))["code"] == "invalid_form"
    headers = {"Content-Type": "multipart/form-data"}
    assert error_of(httpx.post(url, content=b"abc", headers=headers))["code"] == "invalid_form"
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    body = b'--x\r\nContent-Disposition: form-data; nom="a"\r\n\r\na\r\n--x--'
    assert error_of(httpx.post(url, content=body, headers=headers))["code"] == "invalid_form"


def test_models_with_named_voices_refuse_recordings(server: RunningServer) -> None:
    replies = [
        upload(server),
        speak(server, ref_audio=as_base64(RECORDING)),
        speak(server, references=[{"audio_path": as_base64(RECORDING)}]),
        speak(server, speaker_embedding=[0.1]),
    ]
    for reply in replies:
        error = error_of(reply)
        assert error["code"] == "cloning_unsupported" and "Base" in error["message"]


def test_cloning_delays_neither_the_event_loop_nor_the_engine(
    base: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, num_waiting = threading.Event(), threading.Semaphore(0)
    clone = base.clone

    def delayed(recording: Any, text: str | None) -> Voice:
        num_waiting.release()
        assert release.wait(TIMEOUT_S)
        return clone(recording, text)

    voice = base.clone(io.BytesIO(RECORDING))
    monkeypatch.setattr(base, "clone", delayed)
    with (
        running_server(base, ServerSettings(voices={"henry": voice})) as server,
        ThreadPoolExecutor(8) as clients,
    ):
        waiting = [clients.submit(upload, server, name=f"anna-{i}") for i in range(8)]
        assert num_waiting.acquire(timeout=TIMEOUT_S)
        pcm_of(speak(server, voice="henry"))
        wait_until(lambda: server.server.streams.cloner._num_pending == 8)
        assert httpx.get(f"{server.url}/health").status_code == 200
        refused = upload(server)
        error_of(refused, 429)
        assert "retry-after" in refused.headers
        release.set()
        assert all(reply.result().status_code == 200 for reply in waiting)
        assert len(listed(server)["voices"]) == 9


def test_a_voice_that_cannot_be_saved_is_not_added(base: TTS, tmp_path: Path) -> None:
    folder = tmp_path / "voices"
    folder.mkdir()
    with running_server(base, ServerSettings(voice_dir=folder)) as server:
        folder.rmdir()
        assert error_of(upload(server), 500)["code"] == "voice_not_saved"
        assert listed(server)["voices"] == []
        folder.mkdir()
        assert upload(server).status_code == 200


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot become larger than this, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("num_bytes", [0, 1000])
def test_a_full_disk_leaves_neither_part_of_a_voice_nor_affects_others(
    base: TTS, tmp_path: Path, num_bytes: int
) -> None:
    """The description of the voice does not fit, or the voice itself."""
    voice = base.clone(io.BytesIO(RECORDING))
    settings = ServerSettings(voices={"henry": voice}, voice_dir=tmp_path)
    with running_server(base, settings) as server:
        with full_disk(num_bytes):
            assert error_of(upload(server, ref_text=TRANSCRIPT), 500)["code"] == "voice_not_saved"
            assert_same(pcm_of(speak(server, voice="henry")), expected(base, None))
        assert not [*tmp_path.iterdir()]
        assert upload(server, ref_text=TRANSCRIPT).status_code == 200
        sizes = sorted(file.stat().st_size for file in tmp_path.iterdir())
        assert 0 < sizes[0] < 1000 < sizes[1]
        assert listed(server)["voices"] == ["henry", "anna"]


def test_simultaneous_uploads_of_a_name_add_one_voice(base: TTS, tmp_path: Path) -> None:
    with (
        running_server(base, ServerSettings(voice_dir=tmp_path)) as server,
        ThreadPoolExecutor() as clients,
    ):
        replies = [*clients.map(lambda _: upload(server), range(4))]
        assert sorted(reply.status_code for reply in replies) == [200, 400, 400, 400]
        stored = json.loads((tmp_path / "anna.json").read_text())
        assert [stored] == listed(server)["uploaded_voices"]
