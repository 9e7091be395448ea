"""The comparison of a recording's tokens with those of transformers."""

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from megakernel_stt import STT, CheckpointError, LookaheadError, RecognitionError, Token, comparison
from megakernel_stt.comparison import Comparison, compare
from megakernel_stt.model.random_checkpoint import Kind, write_archive
from megakernel_tts import MissingExtraError
from tests.stt.conftest import MakeCheckpoint


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("audio") / "noise.wav"
    noise = np.random.default_rng(0).standard_normal(22_050) * 3000
    soundfile.write(file, noise.astype(np.int16), 22_050)
    return file


def tokens(*ids: int) -> tuple[Token, ...]:
    return tuple(Token(i, f" {i}", 0.0, 0.08, 1.0) for i in ids)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1,), 1), ((), (5,), 0), ((), (), None)],
)
def test_the_first_difference(
    ours: tuple[int, ...], theirs: tuple[int, ...], expected: int | None
) -> None:
    assert Comparison(tokens(*ours), theirs, ("",) * len(theirs)).first_difference == expected


class Reference:
    """Stands in for transformers: records what it is given, and gives tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ids: int) -> None:
        self.samples = np.zeros(0, np.float32)
        self.calls: list[tuple[int | None, dict]] = []
        self.fails = False
        self._ids = list(ids)
        monkeypatch.setattr(comparison, "_reference_class", lambda kind: self)
        monkeypatch.setattr(comparison, "load_reference", lambda folder, kind: self)
        monkeypatch.setattr(comparison, "extract_features", self._extract)
        monkeypatch.setattr(comparison, "generate", self._generate)

    def _extract(self, folder: Path, config: object, samples: np.ndarray) -> torch.Tensor:
        self.samples = samples
        return torch.zeros(1, 1)

    def _generate(
        self, model: object, mels: object, lookahead: int | None, **options: object
    ) -> list[list[int]]:
        if self.fails:
            raise IndexError("index out of range")
        self.calls.append((lookahead, options))
        return [self._ids]


def test_both_get_the_same_audio_lookahead_and_language(
    recogniser: MakeCheckpoint, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference(monkeypatch, 8, 9)
    folder = recogniser("multilingual")
    result = compare(str(folder), recording, "de-DE", 560)
    assert result.theirs == (8, 9) and result.their_texts == ("▁the", "ing")
    ((lookahead, options),) = reference.calls
    assert lookahead == 6 and options["prompt_ids"].tolist() == [1]
    assert len(reference.samples) == 16_000
    with STT.load(folder, "cpu", slots=1) as stt:
        ours = stt.transcribe((reference.samples, 16_000), "de-DE", 560)
    assert result.ours == ours.tokens
    compare(str(folder), recording)
    assert reference.calls[1][0] == 13, "the longest lookahead is the default"


def test_an_offline_model_has_no_lookahead(
    recogniser: MakeCheckpoint, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference(monkeypatch)
    assert compare(str(recogniser("rnnt")), recording).first_difference == 0
    assert reference.calls == [(None, {})]
    reference.fails = True
    with pytest.raises(RecognitionError, match="transformers fails: IndexError"):
        compare(str(recogniser("tdt")), recording)


def test_what_cannot_be_compared_is_refused(
    recogniser: MakeCheckpoint, recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "model.nemo"
    write_archive(archive, recogniser())
    with pytest.raises(CheckpointError, match="reads no archives"):
        compare(str(archive), recording)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="needs transformers"):
        compare(str(recogniser()), recording)
    Reference(monkeypatch)
    with pytest.raises(LookaheadError, match="100"):
        compare(str(recogniser()), recording, lookahead_ms=100)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["streaming", "multilingual", "rnnt"])
def test_tokens_are_those_of_transformers(
    kind: Kind, recogniser: MakeCheckpoint, recording: Path
) -> None:
    """From a file to tokens, with transformers' own features."""
    pytest.importorskip("transformers", "5.23")
    result = compare(str(recogniser(kind)), recording)
    assert result.ours and result.first_difference is None
