"""The built-in recogniser: what it writes for speech, and nothing for sounds without speech."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from examples.train_ears.evaluate import (
    Transcribe,
    error_rate,
    real_sets,
    spoken_recordings,
    words_of_noise,
)
from examples.train_ears.real_speech import Recording
from megakernel_common.checkpoint import Checkpoint, leaves
from megakernel_common.errors import CheckpointError
from megakernel_stt import STT
from megakernel_stt.comparison import compare
from megakernel_stt.model.config import SAMPLE_RATE, read_model_config
from megakernel_stt.model.hub import find_model
from megakernel_stt.model.weights import model_specs
from megakernel_tts import TTS
from tests.stt.sessions import ids, last_final, push_in_packets

MAX_ERROR_RATE = 0.1  # of the words of six sentences of the demo voice; 0.04 when written
RESULTS = Path(__file__).parents[2] / "bench/results/recogniser-demo.json"  # of the card
MARGIN = np.zeros(SAMPLE_RATE // 5, np.int16)


@pytest.fixture(scope="module")
def stt() -> Iterator[STT]:
    with STT.load("demo", device="cpu", slots=2) as stt:
        yield stt


@pytest.fixture(scope="module")
def spoken() -> list[Recording]:
    with TTS.load("demo", device="cpu", slots=1) as tts:
        return spoken_recordings(tts, 6)


def transcriber(stt: STT) -> Transcribe:
    """Recognises whole recordings with the longest lookahead."""
    return lambda pcm: stt.transcribe((pcm, SAMPLE_RATE), lookahead_ms=1120).text


def padded(recording: Recording) -> np.ndarray:
    return np.concatenate([MARGIN, recording.wave, MARGIN])


def test_it_recognises_the_demo_voice(stt: STT, spoken: list[Recording]) -> None:
    found = error_rate("demo voice", spoken, transcriber(stt))
    assert found["words"] > 30 and found["rate"] <= MAX_ERROR_RATE


@pytest.mark.parametrize("lookahead_ms", [80, 160, 1120])
def test_streamed_speech_is_recognised_as_a_whole(
    stt: STT, spoken: list[Recording], lookahead_ms: int
) -> None:
    pcm = padded(spoken[0])
    whole = stt.transcribe((pcm, SAMPLE_RATE), lookahead_ms=lookahead_ms)
    with stt.open(lookahead_ms=lookahead_ms) as session:
        push_in_packets(session, pcm, seed=1)
        streamed = last_final(session)
    assert len(ids(whole)) > 5 and ids(streamed) == ids(whole)
    starts = [word.start for word in whole.words]
    assert starts == sorted(starts) and 0 < starts[0] and starts[-1] < whole.seconds


def test_sounds_without_speech_have_no_word(stt: STT) -> None:
    found = words_of_noise(transcriber(stt))
    assert len(found) == 3 and not any(found.values())


def test_it_has_at_most_20_megabytes() -> None:
    folder = find_model("demo")
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 20e6
    assert (folder / "NOTICE").exists() and (folder / "README.md").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tokens_are_those_of_transformers(
    stt: STT, spoken: list[Recording], tmp_path: Path
) -> None:
    """Transformers gets the numbers of the int8 matrices times their scales."""
    pytest.importorskip("transformers", "5.23")
    pytest.importorskip("librosa")
    folder = find_model("demo")
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tree = model_specs(read_model_config(folder))
    loaded = Checkpoint(folder).load(tree, torch.device("cpu"), torch.float32)
    pairs = zip(leaves(tree), leaves(loaded), strict=True)
    tensors = {leaf.name: tensor.contiguous() for leaf, tensor in pairs}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for recording in spoken:
        wav = padded(recording), SAMPLE_RATE
        compared = compare(str(tmp_path), wav, lookahead_ms=1120)
        assert len(compared.ours) > 2 and compared.first_difference is None
        ours = ids(stt.transcribe(wav, lookahead_ms=1120))
        assert [token.id for token in compared.ours] == ours
    with pytest.raises(CheckpointError, match="int8"):
        compare("demo", (padded(spoken[0]), SAMPLE_RATE))


@pytest.mark.slow
def test_real_recordings_are_recognised_as_the_card_says(stt: STT, tmp_path: Path) -> None:
    """The recordings are downloaded."""
    script = Path(__file__).parents[2] / "examples/train_ears/get_recordings.sh"
    if subprocess.run(["bash", str(script), str(tmp_path)], capture_output=True).returncode:
        pytest.skip("the recordings cannot be downloaded")
    found = error_rate("asterisk", real_sets(tmp_path)["asterisk"], transcriber(stt))
    recorded = json.loads(RESULTS.read_text(encoding="utf-8"))["1120 ms"]["asterisk"]
    assert found["words"] == recorded["words"] > 1000
    assert found["rate"] == pytest.approx(recorded["rate"], abs=0.01)
