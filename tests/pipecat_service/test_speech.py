import numpy as np
import pytest

from bench.simulation import CharacterTokenizer
from megakernel_tts import AudioChunk, Word
from megakernel_tts.session import EventQueue, Session
from megakernel_tts.text.splitter import Splitter
from megakernel_tts.text.text_queue import TextQueue
from pipecat_service.speech import Speech

RATE = 24_000


def test_words_are_timed_from_where_the_audio_begins_that_leaves() -> None:
    """The silence before speech is cut off; a word that was timed within it begins at once."""
    script = TextQueue(CharacterTokenizer(), Splitter())
    speech = Speech(Session(script, EventQueue(lambda: None), lambda: None, lambda: None), RATE)
    pcm = np.concatenate([np.zeros(6000, np.int16), np.full(18_000, 3000, np.int16)])
    words = (Word("One", 0.24, None, False), Word("two", 0.5, None, False))
    quiet = speech.hear(AudioChunk(pcm[:2400], RATE, np.zeros((1, 16), np.int64), 0))
    assert len(quiet.pcm) == 0
    heard = speech.hear(AudioChunk(pcm[2400:], RATE, np.zeros((9, 16), np.int64), 1, words))
    kept = 0.005  # seconds before the onset
    assert len(heard.pcm) == 18_000 + kept * RATE
    assert [word.start for word in heard.words] == pytest.approx([0.0, 0.25 + kept])
    assert [word.text for word in heard.words] == ["One", "two"]
