"""Ranks attention heads by how well they follow the text, and chooses heads and look-ahead."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.align.alignment import MAX_HEADS, MAX_LOOKAHEAD
from megakernel_tts.align.attention import unit_log_attention
from megakernel_tts.align.intervals import interval_peaks
from megakernel_tts.align.online import OnlineSearch
from megakernel_tts.align.word_times import AlignedWordTimer
from megakernel_tts.align.words import Transcript

FLOOR = 1e-4  # minimum attention; see `unit_log_attention`
_MAX_DISAGREEMENT_S = 0.08  # mean distance of word starts between two heads that are used together
_MIN_MONOTONICITY_SHARE = 0.8  # of the best head's monotonicity, for an additional head
_MAX_LOOKAHEAD_ERROR_S = 0.005  # mean error that a short look-ahead may add
_MIN_GAIN_S = 0.001  # by which an additional head must reduce the mean error

Head = tuple[int, int]


@dataclass(frozen=True)
class CapturedSpeech:
    """One speech in one layout, with the attention scores of all heads.

    Attributes:
        scores: [frames, layers, heads, tokens]; see `Frames.scores`.
        samples: [frames, samples per frame].
        transcript: Creates the transcript of the text.
        starts: The start of each word in seconds; None without ground truth.
    """

    scores: NDArray[np.float32]
    samples: NDArray[np.int16]
    transcript: Callable[[], Transcript]
    starts: list[float] | None

    def scores_of(self, heads: Sequence[Head]) -> NDArray[np.float32]:
        """The scores of some heads, [frames, heads, tokens]."""
        return np.stack([self.scores[:, layer, head] for layer, head in heads], axis=1)

    def word_starts(self, heads: Sequence[Head], lookahead: int | None = None) -> list[float]:
        """The start of each word in seconds according to some heads.

        Args:
            heads: Layer and head.
            lookahead: Frames with scores after each frame when its words are decided; None: all.
        """
        timer = AlignedWordTimer(self.transcript(), 0, FLOOR)
        scores, num_frames = self.scores_of(heads), len(self.scores)
        peaks = interval_peaks(self.samples)
        if lookahead is None:
            timer.add_scores(scores)
            return [word.start for word in timer.add_audio(peaks, last=True)]
        starts: list[float] = []
        timer.add_scores(scores[:lookahead])
        for frame in range(num_frames):
            timer.add_scores(scores[frame + lookahead :][:1])
            words = timer.add_audio(peaks[frame : frame + 1], last=frame == num_frames - 1)
            starts += [word.start for word in words]
        return starts


@dataclass(frozen=True)
class RankedHead:
    """How well a head follows the text.

    Attributes:
        head: Layer and head.
        monotonicity: See `monotonicity`; the lower value of the two layouts.
        error_s: Mean error of word starts in seconds; None without ground truth.
    """

    head: Head
    monotonicity: float
    error_s: float | None


def monotonicity(speech: CapturedSpeech, head: Head) -> float:
    """The log attention along a head's best path minus that of uniform attention.

    In nats per frame, averaged over the frames.
    """
    transcript, search = speech.transcript(), OnlineSearch()
    columns = unit_log_attention(speech.scores_of([head]), np.array(transcript.unit_starts), FLOOR)
    search.append_units(transcript.unit_silent)
    search.push_frames(columns)
    path = np.array(search.path(ended=True))
    log_attention = columns[np.arange(len(columns)), path]
    num_keys = np.isfinite(columns).sum(1)
    return float((log_attention + np.log(num_keys))[1:].mean())


def mean_error(speeches: Sequence[CapturedSpeech], heads: Sequence[Head]) -> float:
    """Mean absolute error of word starts in seconds, over the speeches with ground truth."""
    pairs = [(s.word_starts(heads), s.starts) for s in speeches if s.starts is not None]
    return _mean_distance(pairs)


def rank(layouts: Sequence[Sequence[CapturedSpeech]], heads: Iterable[Head]) -> list[RankedHead]:
    """Ranks heads, the best first: by error with ground truth, else by monotonicity.

    Args:
        layouts: The same speeches in each layout.
        heads: To rank.
    """
    all_speeches = [speech for speeches in layouts for speech in speeches]
    has_truth = any(speech.starts is not None for speech in all_speeches)
    ranked = [
        RankedHead(
            head,
            min(
                float(np.mean([monotonicity(speech, head) for speech in speeches]))
                for speeches in layouts
            ),
            mean_error(all_speeches, [head]) if has_truth else None,
        )
        for head in heads
    ]
    return sorted(ranked, key=lambda r: -r.monotonicity if r.error_s is None else r.error_s)


def choose_heads(
    layouts: Sequence[Sequence[CapturedSpeech]], ranked: Sequence[RankedHead]
) -> list[Head]:
    """Chooses the alignment heads: the best one and up to `MAX_HEADS - 1` others.

    With ground truth a head is added if the mean error falls. Without, a head is added if it is
    nearly as monotone as the best one and gives the same word starts.

    Args:
        layouts: The same speeches in each layout.
        ranked: From `rank`.
    """
    all_speeches = [speech for speeches in layouts for speech in speeches]
    best = ranked[0]
    chosen, error_s = [best.head], best.error_s
    for candidate in ranked[1:]:
        if len(chosen) == MAX_HEADS:
            break
        if error_s is not None:
            with_candidate = mean_error(all_speeches, [*chosen, candidate.head])
            if with_candidate < error_s - _MIN_GAIN_S:
                chosen, error_s = [*chosen, candidate.head], with_candidate
        elif candidate.monotonicity >= _MIN_MONOTONICITY_SHARE * best.monotonicity:
            pairs = [
                (speech.word_starts([best.head]), speech.word_starts([candidate.head]))
                for speech in all_speeches
            ]
            if _mean_distance(pairs) <= _MAX_DISAGREEMENT_S:
                chosen.append(candidate.head)
    return chosen


def lookahead_errors(speeches: Sequence[CapturedSpeech], heads: Sequence[Head]) -> list[float]:
    """Errors that a short look-ahead adds.

    Returns:
        For 0 to `MAX_LOOKAHEAD` frames of look-ahead, the mean distance in seconds of word starts
        from those with the scores of all frames.
    """
    final = [speech.word_starts(heads) for speech in speeches]
    return [
        _mean_distance(zip([s.word_starts(heads, frames) for s in speeches], final, strict=True))
        for frames in range(MAX_LOOKAHEAD + 1)
    ]


def choose_lookahead(errors_s: Sequence[float]) -> int:
    """The shortest look-ahead with a negligible error; the longest if none has."""
    negligible = (
        frames for frames, seconds in enumerate(errors_s) if seconds <= _MAX_LOOKAHEAD_ERROR_S
    )
    return next(negligible, len(errors_s) - 1)


def _mean_distance(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    return float(np.mean(np.concatenate([np.abs(np.subtract(a, b)) for a, b in pairs])))
