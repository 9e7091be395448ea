import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megakernel_tts
from megakernel_tts import (
    ChunkPolicy,
    Finish,
    MegakernelTTSError,
    ModelInfo,
    Sampling,
    TextError,
    Voice,
    VoiceError,
    Word,
)
from megakernel_tts.errors import DeviceError
from megakernel_tts.server.cluster.messages import (
    Cancel,
    Chunk,
    Clone,
    Cloned,
    End,
    ErrorInfo,
    Failed,
    Finished,
    Flush,
    Load,
    Loaded,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    PushText,
    Refused,
    Release,
    SessionRequest,
    VoiceHeader,
    Warm,
    encode,
    pack_voice,
    take,
    unpack_voice,
)
from megakernel_tts.server.errors import EngineProcessError

INFO = ModelInfo("custom_voice", {"ryan": ("english",), "eric": ()}, ("english",), True, None, "m")
CODES = np.arange(32, dtype=np.int64).reshape(2, 16)
VOICE = Voice(np.linspace(-1, 1, 5, dtype=np.float32), CODES, "What was said: \u00e9\u4e2d.")


def make_open(cloned: VoiceHeader | None, body: bytes) -> Open:
    request = SessionRequest(
        voice=None if cloned else "ryan",
        cloned=cloned,
        language="auto",
        instruct="Calm.",
        layout="streaming",
        sampling=Sampling(temperature=0.1 + 0.2, seed=(1 << 64) - 1, repetition_penalty=1),
        chunks=ChunkPolicy(1, 4, 12),
        speed=0.9,
        pronunciations='{"nginx": "engine ex"}',
        text="\ud800 \u4e2d\n",
        priority=2,
    )
    return Open(3, 1, request, body)


MESSAGES: list[Message] = [
    Load("cuda:0", "demo", "cuda", 8, "json"),
    make_open(None, b""),
    make_open(*pack_voice(VOICE)),
    Clone(4, "What was said.", b"RIFF"),
    Clone(4, None),
    Cloned(4, *pack_voice(VOICE)),
    PushText(3, "Hello \U0001f600"),
    Flush(3),
    End(3),
    Cancel(3),
    Release(3, 1 << 40),
    Loaded(INFO, Sampling(), 8),
    Ping(),
    Pong(0.004),
    Warm(),
    Failed(ErrorInfo("CheckpointError", "There is no model.")),
    Opened(3),
    Refused(3, ErrorInfo("VoiceError", "There is no voice.")),
    Chunk(3, 4, (Word("Hello,", 0.1 + 0.2, None, True), Word("you", 1e-17, 0.5, False)), 0.25),
    Finished(3, "eos", 7, None),
    Finished(3, "error", 7, "Speaking failed."),
]


def test_every_type_of_message_is_tested() -> None:
    assert {type(message) for message in MESSAGES} == set(Message.__subclasses__())


@given(data=st.data())
def test_messages_arrive_equal_however_the_bytes_are_divided(data: st.DataObject) -> None:
    content = b"".join(map(encode, MESSAGES))
    cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=20).map(sorted))
    buffer, received = bytearray(), list[Message]()
    for start, stop in zip([0, *cuts], [*cuts, len(content)], strict=True):
        buffer += content[start:stop]
        while (message := take(buffer)) is not None:
            received.append(message)
    assert received == MESSAGES
    assert not buffer


@pytest.mark.parametrize("voice", [VOICE, Voice(VOICE.x_vector)], ids=["transcript", "x-vector"])
def test_a_cloned_voice_arrives_equal(voice: Voice) -> None:
    header, body = pack_voice(voice)
    arrived = unpack_voice(header, body)
    assert np.array_equal(arrived.x_vector, voice.x_vector)
    assert arrived.text == voice.text
    assert (arrived.codes is None) == (voice.codes is None)
    if arrived.codes is not None and voice.codes is not None:
        assert np.array_equal(arrived.codes, voice.codes)


def test_the_layout_of_memory_does_not_change_a_voice() -> None:
    strided = Voice(np.arange(10, dtype=np.float32)[::2], np.asfortranarray(CODES), "Hi.")
    arrived = unpack_voice(*pack_voice(strided))
    assert np.array_equal(arrived.x_vector, [0, 2, 4, 6, 8])
    assert arrived.codes is not None and np.array_equal(arrived.codes, CODES)
    assert torch.tensor(arrived.x_vector).dtype == torch.float32


def test_invalid_values_of_a_voice_are_refused() -> None:
    with pytest.raises(VoiceError, match="NaN"):
        unpack_voice(VoiceHeader(2, 0, None), np.array([1, np.nan], "<f4").tobytes())


PUBLIC_ERRORS = [
    value
    for value in (getattr(megakernel_tts, name) for name in megakernel_tts.__all__)
    if isinstance(value, type) and issubclass(value, Exception)
]


@pytest.mark.parametrize("kind", [*PUBLIC_ERRORS, ValueError], ids=lambda kind: kind.__name__)
def test_public_errors_keep_class_and_message(kind: type[Exception]) -> None:
    error = ErrorInfo.of(kind("What was wrong.")).exception()
    assert type(error) is kind
    assert str(error) == "What was wrong."


def test_other_errors_become_the_nearest_public_class() -> None:
    class OddTextError(TextError):
        pass

    assert type(ErrorInfo.of(OddTextError("x")).exception()) is TextError
    assert type(ErrorInfo.of(DeviceError("x")).exception()) is MegakernelTTSError
    assert type(ErrorInfo.of(UnicodeDecodeError("utf-8", b"", 0, 1, "x")).exception()) is ValueError
    assert str(ErrorInfo.of(KeyError()).exception()) == "KeyError"
    assert type(ErrorInfo("SystemExit", "x").exception()) is MegakernelTTSError


def test_an_error_of_a_stream_arrives_with_its_finish() -> None:
    finish = Finished(1, "error", 7, "Speaking failed.").finish()
    assert (finish.reason, finish.frames) == ("error", 7)
    assert type(finish.error) is EngineProcessError and str(finish.error) == "Speaking failed."
    assert Finished(1, "length", 7, None).finish() == Finish("length", 7)


@pytest.mark.parametrize("content", [b"{}", b"[1]", b'{"type": "Exit"}', b'{"type": "Flush"}'])
def test_bytes_that_are_no_message_raise(content: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        take(bytearray(len(content).to_bytes(4, "little") + bytes(4) + content))
