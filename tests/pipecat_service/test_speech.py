import numpy as np
import pytest

from bench.simulation import CharacterTokenizer
from megakernel_tts import AudioChunk, Word
from megakernel_tts.session import EventQueue, Session
from megakernel_tts.text.splitter import Splitter
from megakernel_tts.text.text_queue import TextQueue
from pipecat_service.speech import Speech

RATE = 24_000


def test_words_are_timed_from_the_start_of_the_trimmed_audio() -> None:
    """A word that was timed within the silence before speech starts at once."""
    text = TextQueue(CharacterTokenizer(), Splitter())
    speech = Speech(Session(text, EventQueue(lambda: None, lambda: None), lambda: None), RATE)
    pcm = np.concatenate([np.zeros(6000, np.int16), np.full(18_000, 3000, np.int16)])
    words = (Word("One", 0.24, None, False), Word("two", 0.5, None, False))
    before = speech.process(AudioChunk(pcm[:2400], RATE, np.zeros((1, 16), np.int64), 0))
    assert len(before.pcm) == 0
    output = speech.process(AudioChunk(pcm[2400:], RATE, np.zeros((9, 16), np.int64), 1, words))
    lead_s = 0.005  # kept before the onset
    assert len(output.pcm) == 18_000 + lead_s * RATE
    assert [word.start for word in output.words] == pytest.approx([0.0, 0.25 + lead_s])
    assert [word.text for word in output.words] == ["One", "two"]


def test_the_silence_of_a_break_is_not_trimmed() -> None:
    """A break before the first word lasts as long as it says; silence of the speech does not."""
    text = TextQueue(CharacterTokenizer(), Splitter())
    speech = Speech(Session(text, EventQueue(lambda: None, lambda: None), lambda: None), RATE)
    none, one = np.zeros((0, 16), np.int64), np.zeros((1, 16), np.int64)
    pause = speech.process(AudioChunk(np.zeros(4800, np.int16), RATE, none, 0))
    silent = speech.process(AudioChunk(np.zeros(1920, np.int16), RATE, one, 0))
    word = Word("One", 0.28, None, False)
    loud = speech.process(AudioChunk(np.full(1920, 3000, np.int16), RATE, one, 1, (word,)))
    assert [len(output.pcm) for output in (pause, silent)] == [4800, 0]
    assert loud.words[0].start == pytest.approx(0.205) and len(loud.pcm) == 1920 + 120


def test_a_word_is_output_with_the_audio_that_completes_its_output_block() -> None:
    """An output plays whole blocks of 40 ms: later samples wait, and so does their word."""
    text = TextQueue(CharacterTokenizer(), Splitter())
    speech = Speech(Session(text, EventQueue(lambda: None, lambda: None), lambda: None), RATE)
    pcm = np.full(1900, 3000, np.int16)  # 79 ms
    words = (Word("One", 0.02, None, False), Word("two", 0.06, None, False))
    codes = np.zeros((1, 16), np.int64)
    first = speech.process(AudioChunk(pcm, RATE, codes, 0, words))
    second = speech.process(AudioChunk(pcm[:20], RATE, codes, 1))
    late = speech.process(AudioChunk(pcm[:20], RATE, codes, 2, (Word("end", 0.08, None, False),)))
    chunks = [first, second, late, speech.end()]
    assert [[word.text for word in chunk.words] for chunk in chunks] == [
        ["One"], ["two"], [], ["end"],
    ]  # fmt: skip
