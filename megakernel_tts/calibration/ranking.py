"""Which heads follow the text best, and how far ahead one must look."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.align.alignment import MAX_HEADS, MAX_LOOKAHEAD
from megakernel_tts.align.attention import unit_log_attention
from megakernel_tts.align.online import OnlineSearch
from megakernel_tts.align.word_times import AlignedWordTimer
from megakernel_tts.align.words import Transcript

FLOOR = 1e-4
_NEAR = 0.08  # seconds: heads that differ by more on average do not follow the same thing
_SHARE = 0.8  # of the best head's monotonicity that another one needs
_LATE = 0.005  # seconds that a short look-ahead may cost on average
_GAIN = 0.001  # seconds of the mean error that a head must be worth

Head = tuple[int, int]


@dataclass(frozen=True)
class CapturedSpeech:
    """One speech in one layout, with what every head looked at.

    Attributes:
        scores: [frames, layers, heads, tokens]; see `Frames.scores`.
        samples: [frames, samples a frame].
        rate: Samples a second.
        transcript: Makes the text's transcript anew.
        starts: When each word begins, in seconds, if it is known.
    """

    scores: NDArray[np.float32]
    samples: NDArray[np.int16]
    rate: int
    transcript: Callable[[], Transcript]
    starts: list[float] | None

    def of(self, heads: Sequence[Head]) -> NDArray[np.float32]:
        """[frames, heads, tokens]."""
        return np.stack([self.scores[:, layer, head] for layer, head in heads], axis=1)

    def word_starts(self, heads: Sequence[Head], lookahead: int | None = None) -> list[float]:
        """When each word begins by these heads.

        Args:
            heads: Layer and head.
            lookahead: Frames beyond each one that are known when it leaves; None: all.
        """
        times, scores = AlignedWordTimer(self.transcript(), self.rate, 0, FLOOR), self.of(heads)
        frames = len(scores)
        if lookahead is None:
            times.add_scores(scores)
            return [word.start for word in times.add_audio(self.samples, last=True)]
        found: list[float] = []
        times.add_scores(scores[:lookahead])
        for frame in range(frames):
            times.add_scores(scores[frame + lookahead :][:1])
            words = times.add_audio(self.samples[frame : frame + 1], last=frame == frames - 1)
            found += [word.start for word in words]
        return found


@dataclass(frozen=True)
class Ranked:
    """How well a head follows the text.

    Attributes:
        head: Layer and head.
        monotonicity: By how much the attention along its best path through the text is above
            chance, in nats a frame, in the layout where it is less.
        error: The mean distance of its words' starts from the truth in seconds, if that is known.
    """

    head: Head
    monotonicity: float
    error: float | None


def monotonicity(overheard: CapturedSpeech, head: Head) -> float:
    """How far the attention along a head's best path is above chance, in nats a frame."""
    transcript, search = overheard.transcript(), OnlineSearch()
    found = unit_log_attention(overheard.of([head]), np.array(transcript.unit_starts), FLOOR)
    search.append_units(transcript.unit_silent)
    search.push_frames(found)
    path = np.array(search.path(ended=True))
    chosen = found[np.arange(len(found)), path]
    known = np.isfinite(found).sum(1)
    return float((chosen + np.log(known))[1:].mean())


def error(speeches: Sequence[CapturedSpeech], heads: Sequence[Head]) -> float:
    """The mean distance of the words' starts from the truth, in seconds."""
    pairs = [(s.word_starts(heads), s.starts) for s in speeches if s.starts is not None]
    return _distance(pairs)


def rank(layouts: Sequence[Sequence[CapturedSpeech]], heads: Iterable[Head]) -> list[Ranked]:
    """Ranks heads, the best first: by the truth where it is known, else by monotonicity.

    Args:
        layouts: For each layout the same speeches.
        heads: To rank.
    """
    everything = [speech for speeches in layouts for speech in speeches]
    told = any(speech.starts is not None for speech in everything)
    ranked = [
        Ranked(
            head,
            min(float(np.mean([monotonicity(s, head) for s in ones])) for ones in layouts),
            error(everything, [head]) if told else None,
        )
        for head in heads
    ]
    return sorted(ranked, key=lambda r: -r.monotonicity if r.error is None else r.error)


def choose(layouts: Sequence[Sequence[CapturedSpeech]], ranked: Sequence[Ranked]) -> list[Head]:
    """The heads to watch: the best one, and those that make it better or agree with it.

    With a truth a head is taken if the mean error falls by it; without, if it is nearly as
    monotone as the best and finds the words at the same times.
    """
    everything = [speech for speeches in layouts for speech in speeches]
    best = ranked[0]
    chosen = [best.head]
    least = best.error
    for other in ranked[1:]:
        if len(chosen) == MAX_HEADS:
            break
        if least is not None:
            if (found := error(everything, [*chosen, other.head])) < least - _GAIN:
                chosen, least = [*chosen, other.head], found
        elif other.monotonicity >= _SHARE * best.monotonicity:
            pairs = [(s.word_starts([best.head]), s.word_starts([other.head])) for s in everything]
            chosen += [other.head] * (_distance(pairs) <= _NEAR)
    return chosen


def lateness(speeches: Sequence[CapturedSpeech], heads: Sequence[Head]) -> list[float]:
    """What a short look-ahead costs.

    Returns:
        For 0, 1, .. `MAX_LOOKAHEAD` frames the mean distance of the words' starts from where they
        are when all of the speech is known, in seconds.
    """
    whole = [speech.word_starts(heads) for speech in speeches]
    return [
        _distance(zip([s.word_starts(heads, frames) for s in speeches], whole, strict=True))
        for frames in range(MAX_LOOKAHEAD + 1)
    ]


def choose_lookahead(late: Sequence[float]) -> int:
    """The least look-ahead that costs next to nothing; the longest if none does."""
    return next((frames for frames, s in enumerate(late) if s <= _LATE), len(late) - 1)


def _distance(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    return float(np.mean(np.concatenate([np.abs(np.subtract(a, b)) for a, b in pairs])))
