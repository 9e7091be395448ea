import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from megakernel_tts import TTS, AudioChunk, Finish, MegakernelTTSError, Sampling

TEXT = "Hello to the world, this is speech."
SHORT = Sampling(seed=5, max_frames=14)


def test_speech_is_saved_as_a_wav(tts: TTS, tmp_path: Path) -> None:
    speech = tts.say(TEXT, sampling=SHORT)
    speech.save(tmp_path / "a.wav")
    samples, rate = soundfile.read(tmp_path / "a.wav", dtype="int16")
    assert rate == 24_000
    np.testing.assert_array_equal(samples, speech.pcm)


def test_speech_is_compared_by_identity(tts: TTS) -> None:
    one, two = (tts.say(TEXT, sampling=SHORT) for _ in range(2))
    assert one != two and len({one, two, one}) == 2


def test_a_stream_that_was_cut_short_logs_a_warning(
    tts: TTS, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        list(tts.stream(TEXT, sampling=SHORT))
    assert [r.getMessage() for r in caplog.records] == [
        "The speech was ended after 14 frames: length."
    ]
    with caplog.at_level(logging.WARNING):
        list(tts.stream(TEXT, sampling=replace(SHORT, max_frames=1)))
    assert caplog.records[-1].getMessage() == "The speech was ended after 1 frame: length."


def test_a_stream_returns_its_finish(tts: TTS) -> None:
    stream = tts.stream(TEXT, sampling=SHORT)
    while True:
        try:
            next(stream)
        except StopIteration as end:
            assert end.value == Finish("length", 14)
            break


def test_leaving_a_stream_frees_its_slot(tts: TTS) -> None:
    whole = tts.say(TEXT, sampling=SHORT)
    for _ in range(6):  # more than there are slots
        got: list[AudioChunk] = []
        for chunk in tts.stream(TEXT, sampling=SHORT):
            got.append(chunk)
            if len(got) == 2:
                break
        codes = np.concatenate([c.codes for c in got])
        np.testing.assert_array_equal(codes, whole.codes[: len(codes)])


def test_closing_ends_a_running_stream(checkpoint: Callable[..., Path]) -> None:
    one = TTS.load(checkpoint(), device="cpu", slots=1)
    stream = one.stream("A long text. " * 50)
    next(stream)
    one.close()
    with pytest.raises(MegakernelTTSError, match="closed"):
        list(stream)
