"""The teacher's speech: labels of frames, and comparison of intonation."""

import numpy as np
import pytest
from numpy.typing import NDArray

from examples.train_voice import pitch
from examples.train_voice.phonemes import PHONES, join_words, phone_indices, split_words
from examples.train_voice.speak import SpokenCodes, ends
from examples.train_voice.speech import FRAME, SAMPLE_RATE, TeacherSpeech, starts_of_words

RATE = 24_000


def hum(hz: NDArray[np.float64]) -> NDArray[np.int16]:
    """A buzz with the given pitch in Hz at each sample."""
    phase = 2 * np.pi * np.cumsum(hz) / RATE
    harmonics = np.arange(1, 8)[:, None]
    return (3000 * (np.sin(harmonics * phase) / harmonics).sum(0)).astype(np.int16)


def test_phonemes_of_written_words_have_spans() -> None:
    text, spans = split_words(join_words(["tˈɛn ˈA ˈɛm,", "", "jˈɛs."]))
    assert text == "tˈɛn ˈA ˈɛm, jˈɛs."
    assert [text[a:b] for a, b in spans] == ["tˈɛn ˈA ˈɛm,", "", "jˈɛs."]


def test_modifiers_take_the_phone_beside_them() -> None:
    names = [PHONES[i] for i in phone_indices("ˈaː, b")]
    assert names == ["a", "a", "a", "pause", "pause", "b"]


def test_frames_are_labelled_with_phones_and_words() -> None:
    """Characters of 80 ms: each frame has its character's phone and word."""
    phonemes, spans = split_words("ab|k,|d.")
    edges = np.linspace(0.5, 0.5 + 0.08 * len(phonemes), len(phonemes) + 1)
    audio = np.ones(round((edges[-1] + 1) * SAMPLE_RATE), np.float32)
    speech = TeacherSpeech(audio, phonemes, edges[:-1], edges[1:]).trimmed()
    assert speech.starts[0] == pytest.approx(0.16)
    samples, phones, words = speech.frames(spans)
    assert len(samples) == len(words) * FRAME and samples.dtype == np.int16
    names = [PHONES[i] for i in phones[:9, 0]]  # at 1/4 of a frame; 160 ms of silence precede
    assert names == ["pause", "pause", "a", "b", "pause", "k", "pause", "pause", "d"]
    spoken = [word for word in dict.fromkeys(words.flatten().tolist()) if word >= 0]
    assert spoken == [0, 1, 2] and (words[-1] == -1).all()
    assert speech.word_starts(spans) == pytest.approx([0.16, 0.40, 0.64])


def test_silence_that_is_missing_before_speech_is_added() -> None:
    audio = np.ones(SAMPLE_RATE, np.float32)
    whole = TeacherSpeech(audio, "ab", np.array([0.1, 0.2]), np.array([0.2, 0.3]))
    speech = whole.trimmed()
    assert speech.starts.tolist() == pytest.approx([0.16, 0.26])
    added = round(0.06 * SAMPLE_RATE)
    assert not speech.audio[:added].any() and speech.audio[added:].all()
    assert len(speech.audio) == pytest.approx((0.16 + 0.2 + 0.16) * SAMPLE_RATE, abs=1)


def test_recordings_have_one_level_and_no_peak() -> None:
    tone = np.sin(np.arange(SAMPLE_RATE) / 10).astype(np.float32)
    tone[: SAMPLE_RATE // 2] = 0  # a pause does not count
    for scale in (0.01, 1.0):
        speech = TeacherSpeech(scale * tone, "a", np.zeros(1), np.ones(1)).levelled()
        spoken = speech.audio[SAMPLE_RATE // 2 :]
        assert np.sqrt(np.square(spoken).mean()) == pytest.approx(0.1, rel=0.01)
    tone[-1] = 20
    loud = TeacherSpeech(tone, "a", np.zeros(1), np.ones(1)).levelled().audio
    assert np.abs(loud).max() == pytest.approx(0.8)
    assert not TeacherSpeech(0 * tone, "a", np.zeros(1), np.ones(1)).levelled().audio.any()


def test_a_word_that_is_not_spoken_starts_with_the_next() -> None:
    phonemes, spans = split_words("|ab")
    speech = TeacherSpeech(
        np.zeros(9000, np.float32), phonemes, np.array([0.1, 0.2]), np.array([0.2, 0.3])
    )
    assert speech.word_starts(spans) == [0.1, 0.1]


def test_a_piece_without_letters_or_digits_is_no_word() -> None:
    starts = starts_of_words("Cuesta 14,50 € hoy.", [0.1, 0.5, 1.2, 1.4])
    assert starts == [0.1, 0.5, 1.4]


@pytest.mark.parametrize("low", [90, 160, 300])
def test_pitch_is_found(low: float) -> None:
    hz = np.linspace(low, 1.2 * low, RATE)
    found = np.exp(pitch.log_f0(pitch.frames_of(hum(hz), RATE)))
    expected = np.interp(np.arange(len(found)) * 0.02, np.arange(RATE) / RATE, hz)
    assert np.nanmedian(np.abs(found / expected - 1)) < 0.03 and np.isnan(found).mean() < 0.1
    noise = np.random.default_rng(0).normal(0, 3000, RATE).astype(np.int16)
    assert np.isnan(pitch.log_f0(pitch.frames_of(noise, RATE))).mean() > 0.9


def test_intonation_is_compared_along_the_alignment() -> None:
    t = np.arange(2 * RATE) / RATE
    wave = np.sin(2 * np.pi * t)
    original = hum(150 * 2 ** (0.4 * wave))
    same = pitch.compare(original, original, RATE)
    assert same is not None and same[0] > 0.999 and same[1] == pytest.approx(1)
    flatter = pitch.compare(original, hum(150 * 2 ** (0.2 * wave)), RATE)
    assert flatter is not None and flatter[0] > 0.9 and flatter[1] == pytest.approx(0.5, abs=0.1)
    assert pitch.compare(original, np.zeros(RATE, np.int16), RATE) is None


def test_alignment_follows_a_pause() -> None:
    rng = np.random.default_rng(0)
    sound = rng.normal(0, 3000, RATE).astype(np.int16)
    later = np.concatenate([np.zeros(RATE // 2, np.int16), sound])
    pairs = pitch.align(pitch.frames_of(sound, RATE), pitch.frames_of(later, RATE))
    assert np.median(pairs[10:, 1] - pairs[10:, 0]) == pytest.approx(25, abs=1)


def test_speech_that_does_not_end_is_counted() -> None:
    corpus = [("clara", "x" * n) for n in range(10, 110)]
    spoken = [SpokenCodes(np.zeros((5 + len(text), 16), np.int64), "eos") for _, text in corpus]
    spoken[7] = SpokenCodes(np.zeros((600, 16), np.int64), "length")
    found = ends(corpus, spoken)
    assert found["ended"] == 99 and found["runaways"] == 1
    assert found["odd"][0]["text"] == corpus[7][1]
