"""Speech of the teacher with the times of its phonemes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from examples.train_voice.phonemes import PUNCTUATION, phone_indices

SAMPLE_RATE = 24_000
FRAME = 1920  # samples, 80 ms
# Silence around the speech. In the layout `streaming` a frame adds one token of 2 characters: after
# two silent frames the talker has three tokens of the first word when it begins to speak it.
_BEFORE_S, _AFTER_S = 0.16, 0.16
# The teacher's voices differ by 4 dB and are quiet. The losses of the codec have absolute floors.
_LEVEL = 0.1  # root mean square of speech without pauses: -20 dBFS
_PEAK = 0.8  # largest sample; `Recordings.crops` amplifies by up to 1.26
_WINDOW = 480  # samples of a level
_QUIET = 0.03  # level of a pause, relative to the loudest window
_SILENT = PUNCTUATION | {" "}


@dataclass(frozen=True)
class TeacherSpeech:
    """Synthesised speech.

    Attributes:
        audio: float32 [samples] in [-1, 1] at 24 kHz.
        phonemes: Phonemes and punctuation marks, one character each.
        starts: [phonemes], start of each character in seconds.
        ends: [phonemes], end of each character in seconds.
    """

    audio: NDArray[np.float32]
    phonemes: str
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]

    def trimmed(self) -> "TeacherSpeech":
        """The speech after 0.16 s of silence, and without most of the silence behind it."""
        spoken = [i for i, c in enumerate(self.phonemes) if c not in _SILENT] or [0]
        first = round((self.starts[spoken[0]] - _BEFORE_S) * SAMPLE_RATE)
        last = round((self.ends[spoken[-1]] + _AFTER_S) * SAMPLE_RATE)
        shift = first / SAMPLE_RATE
        audio = np.pad(self.audio[max(0, first) : last], (max(0, -first), 0))
        return TeacherSpeech(audio, self.phonemes, self.starts - shift, self.ends - shift)

    def levelled(self) -> "TeacherSpeech":
        """The speech, of at least a window, at the level of all recordings; quieter with a peak."""
        windows = self.audio[: len(self.audio) // _WINDOW * _WINDOW].reshape(-1, _WINDOW)
        power = np.square(windows).mean(1)
        level = np.sqrt(power[power >= _QUIET**2 * power.max()].mean())
        gain = min(_LEVEL / max(level, 1e-6), _PEAK / max(np.abs(self.audio).max(), 1e-6))
        return replace(self, audio=(self.audio * gain).astype(np.float32))

    def frames(
        self, spans: Sequence[tuple[int, int]]
    ) -> tuple[NDArray[np.int16], NDArray[np.uint8], NDArray[np.int16]]:
        """Labels the frames of 80 ms.

        Args:
            spans: The span of each word in the phonemes, as `split_words` gives them.

        Returns:
            int16 samples, padded with silence to whole frames; phones [frames, 2] at 1/4 and 3/4 of
            each frame, indices into `PHONES`; words [frames, 2] at these times, -1 between words.
        """
        wave = np.pad(self.audio, (0, -len(self.audio) % FRAME))
        samples = np.clip(np.round(wave * 32767), -32768, 32767).astype(np.int16)
        count = len(samples) // FRAME
        times = (np.arange(count)[:, None] + np.array([0.25, 0.75])) * (FRAME / SAMPLE_RATE)
        position = np.searchsorted(self.ends, times).clip(max=len(self.ends) - 1)
        before = times < self.starts[0]
        after = times > self.ends[-1]
        phones = np.array(phone_indices(self.phonemes))[position]
        phones[before | after] = 0
        words = np.array(self._words(spans))[position]
        words[before | after] = -1
        return samples, phones.astype(np.uint8), words.astype(np.int16)

    def _words(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Index of the word of each character, -1 for marks and blanks between words."""
        words = [-1] * len(self.phonemes)
        for i, (first, last) in enumerate(spans):
            inside = range(first, min(last, len(words)))
            spoken = [k for k in inside if self.phonemes[k] not in _SILENT]
            if spoken:
                words[spoken[0] : spoken[-1] + 1] = [i] * (spoken[-1] + 1 - spoken[0])
        return words

    def word_starts(self, spans: Sequence[tuple[int, int]]) -> list[float]:
        """Start of each word in seconds; of a word that is not spoken, the next one's."""
        words = self._words(spans)
        found: list[float] = []
        next_start = float(self.ends[-1])
        for i in reversed(range(len(spans))):
            if i in words:
                next_start = max(0.0, float(self.starts[words.index(i)]))
            found.append(next_start)
        return found[::-1]


# Speaks a list of (phonemes, style).
Synthesiser = Callable[[list[tuple[str, str]]], list[TeacherSpeech]]


def starts_of_words(text: str, starts: Sequence[float]) -> list[float]:
    """Starts of the words that the engine counts.

    Args:
        text: A text.
        starts: Start of each of its pieces between spaces, in seconds.

    Returns:
        Those of pieces with a letter or digit. A piece without, such as a currency's sign, belongs
        to the word before it.
    """
    pieces = zip(text.split(), starts, strict=True)
    return [start for piece, start in pieces if any(map(str.isalnum, piece))]
