import contextlib
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megakernel_tts import TTS, InstructionError, Sampling, Voice, VoiceError

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
    np.testing.assert_array_equal(loaded.x_vector, voice.x_vector)
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
    with pytest.raises(VoiceError, match="is no voice file: it is larger than 4 MiB"):
        Voice.load(checkpoint() / "model.safetensors")
    save_file({"x_vector": torch.zeros(3)}, str(tmp_path / "a.safetensors"))
    with pytest.raises(VoiceError, match="no voice was saved to it"):
        Voice.load(tmp_path / "a.safetensors")
    for x_vector, codes in (
        (torch.tensor([1.0, torch.nan]), None),
        (torch.zeros(2, 2), None),
        (torch.zeros(2, dtype=torch.int64), None),
        (object(), None),
        ([[0.0], [0.0, 0.0]], None),
        (torch.zeros(2), torch.zeros(0, 16, dtype=torch.int64)),
        (torch.zeros(2), torch.zeros(3, 0, dtype=torch.int64)),
        (torch.zeros(2), torch.zeros(3, 16)),
        (torch.zeros(2), torch.zeros(3, 16, dtype=torch.int32)),
        (torch.zeros(2), torch.full((3, 16), -1)),
        (torch.zeros(2), torch.full((3, 16), 1 << 40)),
        (torch.zeros(0), None),
        (torch.zeros(2, dtype=torch.float64), None),
        (torch.tensor([1.0, -torch.inf]), None),
        (torch.tensor([1.0, 3e38]), None),
    ):
        with pytest.raises(VoiceError, match=r"x_vector|codes"):
            Voice(x_vector, codes, None if codes is None else "text")  # type: ignore[arg-type]
    with pytest.raises(VoiceError, match="cannot be written"):
        Voice(torch.zeros(3)).save(tmp_path / "none" / "a.safetensors")
    with pytest.raises(VoiceError, match="both codes and a transcript"):
        Voice(torch.zeros(3), None, "text")
    with pytest.raises(VoiceError, match="is a folder; name a voice file"):
        Voice.load(tmp_path)


def _saved(file: Path, tensors: dict[str, torch.Tensor], text: str | None) -> Path:
    """A file with the tensors and the metadata of a voice, which `Voice` would refuse."""
    metadata = {"format": "megakernel-tts-voice-1"} | ({} if text is None else {"text": text})
    save_file(tensors, str(file), metadata=metadata)
    return file


CODES = torch.zeros(4, 16, dtype=torch.int64)


@pytest.mark.parametrize(
    ("tensors", "text", "message"),
    [
        ({"x_vector": torch.zeros(3), "codes": CODES + 1}, None, "both codes and a transcript"),
        ({"x_vector": torch.zeros(3)}, "text", "both codes and a transcript"),
        ({"codes": CODES}, "text", "x_vector"),
        ({"x_vector": torch.zeros(3).half()}, None, "must be a float32 array"),
        ({"x_vector": torch.zeros(3).bfloat16()}, None, "must be a float32 array"),
        ({"x_vector": torch.zeros(3).to(torch.float8_e4m3fn)}, None, "must be a float32 array"),
        ({"x_vector": torch.full((3,), torch.inf)}, None, "NaN, infinity or very large"),
        ({"x_vector": torch.zeros(3), "codes": CODES.int()}, "text", "must be an int64 array"),
        ({"x_vector": torch.zeros(3), "codes": CODES - 1}, "text", "must be from 0 to 1,048,575"),
        ({"x_vector": torch.zeros(3), "codes": CODES.repeat(512, 1)}, "text", "has 2,048 frames"),
        ({"x_vector": torch.zeros(3), "codes": torch.zeros(1 << 40, 0).long()}, "text", "codes"),
        ({"x_vector": torch.zeros(3), "codes": CODES.repeat(1 << 14, 1)}, "text", "than 4 MiB"),
        ({"x_vector": torch.zeros(3), "codes": CODES}, "text " * (1 << 20), "than 4 MiB"),
    ],
    ids=itertools.count(),
)
def test_voice_file_with_invalid_content_is_refused_at_load(
    tmp_path: Path, tensors: dict[str, torch.Tensor], text: str | None, message: str
) -> None:
    file = _saved(tmp_path / "a.safetensors", tensors, text)
    with pytest.raises(VoiceError, match=message) as caught:
        Voice.load(file)
    assert str(file) in str(caught.value)


def test_a_voice_is_checked_as_a_session_checks_it(
    base: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    def embed(codes: bytes) -> torch.Tensor:
        raise AssertionError(len(codes))

    monkeypatch.setattr(base._loaded.engine.prompt_builder, "_embed_recording", embed)
    base.check_voice(Voice(torch.zeros(192), CODES, "text"), "english")
    for voice, language, instruct in [
        (Voice(torch.zeros(5)), "auto", None),
        (Voice(torch.zeros(192), torch.full((4, 16), 999), "text"), "auto", None),
        (Voice(torch.zeros(192), CODES[:1].expand(2040, -1).contiguous(), "text"), "auto", None),
        (Voice(torch.zeros(192)), "klingon", None),
        (Voice(torch.zeros(192)), "auto", "Calmly."),
        ("ryan", "auto", None),
        (None, "auto", None),
    ]:
        with pytest.raises(VoiceError) as checked:
            base.check_voice(voice, language, instruct)
        with pytest.raises(VoiceError) as opened:
            base.open(voice, language, instruct)
        assert str(checked.value) == str(opened.value)
    assert base._loaded.engine.num_sessions == 0


def test_recording_longer_than_a_slot_is_refused_before_its_codes_are_read() -> None:
    codes = torch.zeros(1, 1, dtype=torch.int64).expand(1 << 50, 16)  # reading takes years
    with pytest.raises(VoiceError, match=r"has 1,125,899,906,842,624 frames"):
        Voice(torch.zeros(3), codes, "text")


def test_recording_that_leaves_no_position_for_text_is_refused_before_it_is_embedded(
    base: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    def embed(codes: bytes) -> torch.Tensor:
        raise AssertionError(len(codes))

    monkeypatch.setattr(base._loaded.engine.prompt_builder, "_embed_recording", embed)
    codes = CODES[:1].expand(2040, -1).contiguous()
    for layout in ("full", "streaming"):
        with pytest.raises(VoiceError, match=r"takes 2,0\d\d positions"):
            base.open(Voice(torch.zeros(192), codes, "hello"), layout=layout)


def test_instruction_longer_than_a_slot_is_refused(checkpoint: Callable[..., Path]) -> None:
    with TTS.load(checkpoint("voice_design", "1b7"), device="cpu", slots=1) as tts:
        with pytest.raises(InstructionError, match=r"instruction has [\d,]+ tokens"):
            tts.open(instruct="hello there " * 10_000)
        num_tokens = len(tts._loaded.tokenizer.encode(" hello" * 100)) // 100
        with pytest.raises(InstructionError, match=r"takes 2,0\d\d positions"):
            tts.check_voice(instruct="hello " * (2043 // num_tokens))


def test_transcript_longer_than_a_slot_is_refused_before_it_is_embedded(
    base: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    voice = Voice(torch.zeros(192), CODES, "hello there " * 10_000)
    builder = base._loaded.engine.prompt_builder
    embed = builder.embed_text
    lengths: list[int] = []

    def record(ids: list[int]) -> torch.Tensor:
        lengths.append(len(ids))
        return embed(ids)

    monkeypatch.setattr(builder, "embed_text", record)
    for layout in ("full", "streaming"):
        with pytest.raises(VoiceError, match=r"transcript has [\d,]+ tokens"):
            base.open(voice, layout=layout)
    assert max(lengths) < 100


JUNK = [None, True, -1, 0.5, 10**30, "", "x", "F64", "I64", "F8_E4M3", [], [0], [-1, 5], {}]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_voice_file_raises_voice_error_only(tmp_path: Path, data: st.DataObject) -> None:
    """The file may also load, if the damage leaves it valid."""
    file = tmp_path / "a.safetensors"
    Voice(torch.zeros(3), CODES, "text").save(file)
    good = file.read_bytes()
    length = struct.unpack("<Q", good[:8])[0]
    damage = data.draw(st.sampled_from(["truncated", "bytes", "field"]))
    if damage == "truncated":
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    elif damage == "bytes":
        at = data.draw(st.integers(0, 8 + length - 1))
        bad = good[:at] + data.draw(st.binary(min_size=1, max_size=8)) + good[at + 1 :]
    else:
        header = section = json.loads(good[8 : 8 + length])
        key = data.draw(st.sampled_from(sorted(section)))
        if data.draw(st.booleans()):
            section = section[key]
            key = data.draw(st.sampled_from(sorted(section)))
        section[key] = data.draw(st.sampled_from(JUNK))
        content = json.dumps(header).encode()
        bad = struct.pack("<Q", len(content)) + content + good[8 + length :]
    file.write_bytes(bad)
    with contextlib.suppress(VoiceError):
        Voice.load(file)
