import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megakernel_tts import TTS
from megakernel_tts.calibration.ground_truth import FORMAT
from megakernel_tts.cli.main import main
from megakernel_tts.model.hub import find_checkpoint

SENTENCES = ["Thank you for calling.", "Can you tell me more?"]


def timed_speeches() -> list[dict[str, object]]:
    """The demo voice's own speech with the word starts of its alignment head."""
    speeches: list[dict[str, object]] = []
    with TTS.load("demo", "cpu", slots=1) as tts:
        for text in SENTENCES:
            speech = tts.say(text, "clara", sampling=tts.sampling.seeded())
            starts = [word.start for word in speech.words]
            codes = speech.codes.tolist()
            speeches.append({"text": text, "voice": "clara", "codes": codes, "starts": starts})
    return speeches


@pytest.fixture
def uncalibrated(tmp_path: Path) -> Path:
    """The demo voice without its calibration."""
    folder = tmp_path / "demo"
    shutil.copytree(find_checkpoint("demo"), folder)
    (folder / "alignment.json").unlink()
    return folder


@pytest.mark.gpu
def test_calibration_on_a_gpu_finds_the_heads_of_a_cpu(uncalibrated: Path, tmp_path: Path) -> None:
    """The speech is given, so that both measure the same."""
    truth = tmp_path / "truth.json"
    truth.write_text(json.dumps({"format": FORMAT, "speeches": timed_speeches()}))
    found: list[object] = []
    for device in ("cpu", "cuda"):
        command = ["calibrate", str(uncalibrated), "--truth", str(truth), "--device", device]
        assert main(command) == 0
        found.append(json.loads((uncalibrated / "alignment.json").read_text())["heads"])
    assert found[0] == found[1]


def test_calibration_with_own_speech_finds_the_trained_heads(
    uncalibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The alignment head of the demo voice is found, and word times come from attention."""
    with TTS.load(uncalibrated, "cpu", slots=1) as tts:
        assert not tts.aligned
        before = tts.say("Hello there.", sampling=tts.sampling.seeded())
        assert before.words and all(word.estimated for word in before.words)
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    assert (
        main(["calibrate", str(uncalibrated), "--sentences", str(sentences), "--device", "cpu"])
        == 0
    )
    output = capsys.readouterr()
    assert "alignment.json" in output.err and "nats above chance" in output.out
    written = json.loads((uncalibrated / "alignment.json").read_text())
    assert [3, 0] in written["heads"] and written["made"]["truth"] is None
    with TTS.load(uncalibrated, "cpu", slots=1) as tts:
        assert tts.aligned
        words = tts.say("Hello there.").words
        assert [word.text for word in words] == ["Hello", "there."]
        assert not any(word.estimated for word in words)


def test_ground_truth_ranks_heads_by_error(tmp_path: Path) -> None:
    speeches = timed_speeches()
    truth, output = tmp_path / "truth.json", tmp_path / "found.json"
    truth.write_text(json.dumps({"format": FORMAT, "speeches": speeches}))
    arguments = ["calibrate", "demo", "--truth", str(truth), "-o", str(output), "--device", "cpu"]
    assert main(arguments) == 0
    written = json.loads(output.read_text())
    assert written["heads"][0] in ([3, 0], [2, 0])
    assert written["made"]["error_s"] < 0.08


def test_wrong_number_of_word_starts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = tmp_path / "truth.json"
    speech = {"text": "Thank you for calling.", "codes": [[0] * 16] * 20, "starts": [0.1, 0.2, 0.3]}
    truth.write_text(json.dumps({"format": FORMAT, "speeches": [speech]}))
    assert main(["calibrate", "demo", "--truth", str(truth), "-o", str(tmp_path / "a.json")]) == 1
    assert "has 4 words (Thank, you, for, calling.) and 3 starts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("\n\n", "contains no sentences"),
        ("One.\n" + "x" * 201 + "\n", "line 2 has 201 characters"),
        (None, "cannot be read as UTF-8 text"),
    ],
)
def test_invalid_sentences_are_refused_before_the_model_is_loaded(
    tmp_path: Path, lines: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.txt"
    if lines is not None:
        file.write_text(lines, encoding="utf-8")
    assert main(["calibrate", "no/such/model", "--sentences", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_unwritable_output_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "no/such/model", "-o", str(tmp_path / "none" / "a.json")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_unwritable_default_output_is_refused_before_the_model_is_loaded(
    uncalibrated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (uncalibrated / "alignment.json").mkdir()
    load = "megakernel_tts.calibration.calibrate.load_checkpoint"
    monkeypatch.setattr(load, lambda *_: pytest.fail("a model was loaded"))
    assert main(["calibrate", str(uncalibrated)]) == 2
    assert "alignment.json is a folder" in capsys.readouterr().err


def test_sentences_and_ground_truth_exclude_each_other(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["calibrate", str(checkpoint()), "--truth", "t.json", "--sentences", "s.txt"]
    assert main(command) == 2
    assert "leave --sentences out" in capsys.readouterr().err
