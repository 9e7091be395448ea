"""`transcribe` and `listen`, with a tiny recogniser."""

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from megakernel_stt import STT, Word
from megakernel_stt.model.random_checkpoint import write_checkpoint
from megakernel_tts.cli.listen import _microphone_pcm
from megakernel_tts.cli.main import main
from megakernel_tts.cli.transcribe import subtitles

RATE = 16_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("recogniser")
    write_checkpoint(folder)
    return str(folder)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("audio") / "noise.wav"
    noise = np.random.default_rng(0).standard_normal(RATE) * 3000
    soundfile.write(file, noise.astype(np.int16), RATE)
    return file


@pytest.fixture(scope="module")
def text(model: str, recording: Path) -> str:
    with STT.load(model, "cpu", slots=1) as stt:
        return stt.transcribe(recording).text


def test_text_and_words(
    model: str, recording: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transcribe", "--model", model, str(recording)]) == 0
    assert text and capsys.readouterr().out == text + "\n"
    assert main(["transcribe", "--model", model, "--words", str(recording)]) == 0
    first, *words = capsys.readouterr().out.splitlines()
    assert first == text
    assert " ".join(line.split(maxsplit=3)[3] for line in words) == text


def test_json_has_an_object_per_file(
    model: str, recording: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(recording)] * 2
    assert main(["transcribe", "--model", model, "--json", *files]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [o["file"] for o in objects] == files and objects[0] == objects[1]
    assert objects[0]["text"] == text and objects[0]["seconds"] == 1.0
    assert set(objects[0]["words"][0]) == {"text", "start", "end", "confidence"}
    assert main(["transcribe", "--model", model, *files]) == 0
    assert capsys.readouterr().out == f"{recording}: {text}\n" * 2


def test_subtitles_end_at_sentences_pauses_and_limits() -> None:
    def word(text: str, start: float) -> Word:
        return Word(text, start, start + 0.3, 1.0)

    words = [word("One.", 0.0), word("Two", 0.5), word("three", 3661.25)]
    lines = list(subtitles(words))
    assert lines[:4] == ["1", "00:00:00,000 --> 00:00:00,300", "One.", ""]
    assert lines[8:] == ["3", "01:01:01,250 --> 01:01:01,550", "three", ""]
    long = [word("abcdefghi", 0.4 * i) for i in range(60)]
    cues = list(subtitles(long))
    texts, times = cues[2::4], cues[1::4]
    assert " ".join(texts) == " ".join(w.text for w in long)
    assert all(len(text) <= 84 for text in texts) and len(texts) == len(times) > 3
    assert list(subtitles([])) == []


def test_subtitles_of_a_file(
    model: str, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transcribe", "--model", model, "--srt", str(recording)]) == 0
    assert re.match(r"1\n\d\d:\d\d:\d\d,\d{3} --> ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a.wav"], 1, "a.wav does not exist"),
        (["--srt", "a.wav", "b.wav"], 2, "--srt takes one file"),
        (["--words", "--json", "a.wav"], 2, "--words is for text"),
        (["--model", "MODEL", "missing.wav"], 1, "missing.wav does not exist"),
        (["--model", "MODEL", "--lookahead", "100", "FILE"], 1, "lookahead_ms is 100"),
        (["--model", "MODEL", "--language", "en", "FILE"], 1, "auto only"),
    ],
)
def test_errors_are_messages(
    arguments: list[str],
    code: int,
    message: str,
    model: str,
    recording: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {"MODEL": model, "FILE": str(recording)}
    assert main(["transcribe", *(values.get(a, a) for a in arguments)]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("rate", [8_000, 16_000])
def test_listen_prints_the_text_of_standard_input(
    rate: int,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = (np.random.default_rng(1).standard_normal(rate) * 3000).astype("<i2")
    with STT.load(model, "cpu", slots=1) as stt:
        text = stt.transcribe((noise, rate), lookahead_ms=160).text
    read, write = os.pipe()

    def feed() -> None:
        data = noise.tobytes() + b"x"  # half a sample at the end
        for start in range(0, len(data), 1001):
            os.write(write, data[start : start + 1001])
        os.close(write)

    feeder = threading.Thread(target=feed)
    feeder.start()
    with open(read, encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["listen", "--model", model, "--rate", str(rate)]) == 0
    feeder.join()
    assert text and capsys.readouterr().out == text + "\n"


def test_listen_refuses_an_invalid_rate_and_a_closed_input(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.write(write, b"0000")
    os.close(write)
    with open(read, encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["listen", "--model", model, "--rate", "1"]) == 1
    assert "sample_rate is 1" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["listen", "--model", model]) == 2
    assert "standard input is closed" in capsys.readouterr().err


class PortAudioError(Exception):
    """As sounddevice's."""


def microphone(pcm: bytes, opened: list[tuple]) -> SimpleNamespace:
    """Stands in for sounddevice: a microphone that is unplugged after some audio."""

    class RawInputStream:
        def __init__(self, *arguments: object, **keywords: object) -> None:
            opened.append((*arguments, keywords))
            self._pcm = pcm

        def __enter__(self) -> "RawInputStream":
            return self

        def __exit__(self, *_: object) -> None:
            opened.append(("closed",))

        def read(self, size: int) -> tuple[memoryview, bool]:
            if not self._pcm:
                raise PortAudioError("Device unavailable")
            packet, self._pcm = self._pcm[: 2 * size], self._pcm[2 * size :]
            return memoryview(packet), False

    return SimpleNamespace(RawInputStream=RawInputStream, PortAudioError=PortAudioError)


def test_listen_takes_the_audio_of_the_microphone(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = (np.random.default_rng(1).standard_normal(8_000) * 3000).astype("<i2")
    opened: list[tuple] = []
    monkeypatch.setitem(sys.modules, "sounddevice", microphone(noise.tobytes(), opened))
    audio = b"".join(until_unplugged(_microphone_pcm(8_000)))
    assert audio == noise.tobytes()
    assert opened == [(8_000, 160, {"channels": 1, "dtype": "int16"}), ("closed",)]
    assert main(["listen", "--model", model, "--rate", "8000", "--microphone"]) == 1
    assert "The microphone cannot be read: Device unavailable" in capsys.readouterr().err


def until_unplugged(packets: Iterator[bytes]) -> Iterator[bytes]:
    with suppress(OSError):
        yield from packets


def test_a_missing_microphone_package_is_reported(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert main(["listen", "--model", model, "--microphone"]) == 1
    assert "--microphone needs the extra listen and PortAudio" in capsys.readouterr().err
