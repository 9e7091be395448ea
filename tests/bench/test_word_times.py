import numpy as np
import pytest

from megakernel_tts import TTS

pytest.importorskip("pocketsphinx")
from bench.word_times import estimated


def test_estimate_gives_a_start_for_every_word() -> None:
    loud = np.full((10, 1920), 10_000, np.int16)
    with TTS.load("demo", "cpu", slots=1) as tts:
        starts = estimated(tts._loaded, "Hello there, how are you?", loud)
    assert len(starts) == 5 and starts == sorted(starts)
