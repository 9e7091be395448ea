"""Live text of `megakernel-tts say -`: spoken while it is written, and read no further."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import soundfile

from megakernel_tts import AudioChunk, audio
from megakernel_tts.cli.main import main
from megakernel_tts.cli.say import _MAX_WAITING_SEGMENTS, _stream_live
from tests.fakes import TIMEOUT_S
from tests.rig import Rig

SENTENCE = "hello to the world, this is a test of speech. "  # four of them are a segment


class Input:
    """Standard input with sentences.

    Attributes:
        num_read: Sentences read.
    """

    def __init__(self, num_sentences: int) -> None:
        self.num_read = 0
        self._num_sentences = num_sentences

    def __iter__(self) -> Iterator[str]:
        for _ in range(self._num_sentences):
            self.num_read += 1
            yield SENTENCE


def test_standard_input_is_read_at_the_rate_of_synthesis(rig: Rig) -> None:
    text = Input(100_000)
    session = rig.open(None)
    chunks = _stream_live(session, iter(text))
    num_frames = 0
    for chunk in islice(chunks, 60):
        assert isinstance(chunk, AudioChunk)
        num_frames += len(chunk.codes)
        assert session.num_waiting_segments <= _MAX_WAITING_SEGMENTS + 1
    num_spoken = num_frames / len(rig.loaded.tokenizer.encode(SENTENCE))
    num_buffered = 5 * 5  # sentences of the segments that wait, are spoken and are being written
    assert num_spoken - 1 <= text.num_read <= num_spoken + num_buffered
    chunks.close()
    assert rig.idle()


def test_all_of_standard_input_is_spoken(rig: Rig) -> None:
    text = Input(20)
    session = rig.open(None)
    num_frames = sum(len(chunk.codes) for chunk in _stream_live(session, iter(text)))
    assert text.num_read == 20
    assert session.finish is not None and session.finish.reason == "eos"
    assert num_frames > 20 * len(rig.loaded.tokenizer.encode(SENTENCE.strip()))
    assert session.num_waiting_segments == 0


@contextmanager
def standard_input(monkeypatch: pytest.MonkeyPatch) -> Iterator[BinaryIO]:
    """A pipe to the standard input of commands in this process."""
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as stdin, open(writer, "wb", buffering=0) as pipe:
        monkeypatch.setattr("sys.stdin", stdin)
        yield pipe


def test_say_reads_standard_input_and_writes_pcm_to_standard_output(
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
    short_speech: None,
) -> None:
    with standard_input(monkeypatch) as pipe:
        pipe.write(b"Hello")
        pipe.close()
        assert main(["say", "-"]) == 0
    assert len(capsysbinary.readouterr().out) == 4 * 1920 * 2


@pytest.fixture
def say_live(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, bytes, bytes], int]:
    """Speaks a text to a file in this process; the second part follows the first chunk of audio.

    Returns the exit status.
    """
    written = threading.Event()
    write = audio.WavWriter.write

    def write_and_announce(writer: audio.WavWriter, pcm: np.ndarray) -> None:
        write(writer, pcm)
        written.set()

    monkeypatch.setattr(audio.WavWriter, "write", write_and_announce)

    def say(output: Path, first: bytes, second: bytes) -> int:
        found: list[bool] = []

        def type_text(pipe: BinaryIO) -> None:
            pipe.write(first)
            found.append(written.wait(TIMEOUT_S))
            pipe.write(second)
            pipe.close()

        with standard_input(monkeypatch) as pipe:
            typing = threading.Thread(target=type_text, args=(pipe,))
            typing.start()
            status = main(["say", "-", "-o", str(output)])
            typing.join()
        assert found == [True], "no audio before the end of the text"
        return status

    return say


def test_standard_input_is_synthesised_while_it_is_written(
    tmp_path: Path, say_live: Callable[[Path, bytes, bytes], int], short_speech: None
) -> None:
    """Audio exists before the text ends, and before its last character is complete."""
    output = tmp_path / "a.wav"
    assert say_live(output, b"Once upon a t\xc3", b"\xa4me to you.") == 0
    assert soundfile.info(output).frames == 4 * 1920


@pytest.mark.parametrize(
    ("content", "offset"), [(b"Hi \xc3\xa4 \xff.", 6), (b"Hi \xc3", 3), (b"\xff\xfe\xff", 0)]
)
def test_standard_input_that_is_not_utf8_is_refused_with_the_byte_offset(
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
    content: bytes,
    offset: int,
) -> None:
    with standard_input(monkeypatch) as pipe:
        pipe.write(content)
        pipe.close()
        assert main(["say", "-"]) == 2
    assert capsysbinary.readouterr().err.decode().splitlines()[-1].endswith(f" at byte {offset}")


def test_invalid_utf8_after_the_first_audio_stops_the_speech(
    tmp_path: Path,
    say_live: Callable[[Path, bytes, bytes], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "a.wav"
    assert say_live(output, b"Once upon a t\xc3", b" you.") == 2
    error = capsys.readouterr().err
    assert "not UTF-8 text" in error and "at byte 13" in error
    assert soundfile.info(output).frames >= 1920


def test_whitespace_on_standard_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.wav"
    with standard_input(monkeypatch) as pipe:
        pipe.write(b" \n\n")
        pipe.close()
        assert main(["say", "-", "-o", str(output)]) == 1
    assert "nothing to say" in capsys.readouterr().err
    assert not output.exists()
