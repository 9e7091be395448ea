"""From decoded frames to the session's events: runaway guard, word times, retries, speed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.align.word_times import WordTimer
from megakernel_tts.align.words import Word
from megakernel_tts.backends.protocol import Frames
from megakernel_tts.engine.guard import Guard
from megakernel_tts.engine.scaling import SegmentScaler
from megakernel_tts.engine.segment import Segment
from megakernel_tts.errors import SynthesisError
from megakernel_tts.session import FRAME_S, AudioChunk, EventQueue, Finish, FinishReason
from megakernel_tts.text.text_queue import TextSegment


class Delivery:
    """Delivers one stream's audio and its finish; the only writer of the session's event queue.

    While a segment may have to be spoken again, its chunks are held back until it has ended.

    Attributes:
        num_frames: Frames delivered.
        attempt: How often the current segment was spoken before.
    """

    def __init__(
        self,
        events: EventQueue,
        sample_rate: int,
        *,
        guarded: bool,
        max_retries: int,
        speed: float = 1.0,
    ) -> None:
        """Starts with nothing delivered.

        Args:
            events: The session's queue.
            sample_rate: In Hz.
            guarded: Whether the runaway guard may end a segment.
            max_retries: How often a segment that ran away is spoken again.
            speed: How many times as fast as it was synthesised the speech is delivered.
        """
        self.num_frames = 0
        self.attempt = 0
        self._events = events
        self._sample_rate = sample_rate
        self._guarded = guarded
        self._max_retries = max_retries
        self._speed = speed
        self._scaler: SegmentScaler | None = None  # None between segments, and at speed 1
        self._num_samples = 0  # delivered or deferred
        self._current_timer: WordTimer | None = None  # None between segments
        self._text_state = (-1, 0, 0)  # tokens, whole ones and replacements that the timer has
        self._guard = Guard()
        self._deferred_chunks: list[AudioChunk] = []  # of a segment that may be spoken again
        self._segment_frame = 0  # frames of the segment delivered or deferred
        self._segment_start = 0  # samples before the segment
        self._num_groups = 0
        self._segment_idx = 0

    @property
    def num_unread(self) -> int:
        """Frames in the session's queue."""
        return self._events.num_unread

    def begin_segment(self, word_timer: WordTimer) -> None:
        """Starts a segment, whose words `word_timer` finds."""
        self._current_timer = word_timer
        self._text_state = (-1, 0, 0)
        self._guard = Guard()
        self._segment_frame = 0
        self._segment_start = self._num_samples
        if self._speed != 1:
            self._scaler = SegmentScaler(self._speed, self._sample_rate)

    def read_text(self, text: TextSegment) -> None:
        """Passes the segment's text, as far as it is known, to word alignment."""
        state = len(text.token_ids), text.num_whole, len(text.replacements)
        if state == self._text_state:
            return
        self._text_state = state
        self._word_timer.update_text(text.token_ids, text.num_whole, text.replacements)

    def observe(self, frames: Frames, text: TextSegment) -> None:
        """Passes the attention of new frames to word alignment; `text` is that of the segment."""
        self._num_groups = frames.codes.shape[1]
        if frames.scores is not None:
            self.read_text(text)
            self._word_timer.add_scores(frames.scores.numpy())

    @property
    def _word_timer(self) -> WordTimer:
        assert self._current_timer is not None, "no segment was begun"
        return self._current_timer

    def deliver(
        self,
        segment: Segment,
        codes: NDArray[np.int64],
        samples: NDArray[np.int16],
        peaks: NDArray[np.uint16],
    ) -> None:
        """Delivers a decoded chunk, cut off at the frame in which the guard ends the segment.

        Args:
            segment: The stream's segment.
            codes: [frames, groups].
            samples: [frames * samples per frame].
            peaks: [frames, intervals], of the samples.
        """
        if self._guarded:
            num_kept = self._guard.find_end(
                codes[:, 0],
                np.maximum.reduce(peaks, axis=1),
                segment.text.expected_frames,
                used_up_at=segment.used_up_at,
                frames_since_end=self._word_timer.frames_since_end,
            )
            if num_kept is not None:
                segment.cut(self._segment_frame + num_kept)
                samples = samples[: num_kept * (len(samples) // len(codes))].copy()
                codes, peaks = codes[:num_kept], peaks[:num_kept]
        self._put_chunk(segment, codes, samples, peaks)

    def _put_chunk(
        self,
        segment: Segment,
        codes: NDArray[np.int64],
        samples: NDArray[np.int16],
        peaks: NDArray[np.uint16],
    ) -> None:
        """Puts a chunk, with the words that begin in it, into the queue or holds it back."""
        words = self._find_words(segment, peaks)
        if self._scaler is not None:
            samples, words = self._scaler.scale(samples, words)
        # A copy, so that a chunk that the reader keeps does not keep later codes.
        self._put(self._make_chunk(samples, codes.copy(), words))
        self._segment_frame += len(codes)

    def _find_words(self, segment: Segment, peaks: NDArray[np.uint16]) -> list[Word]:
        """Returns the words that begin in the next frames, timed from the segment's start."""
        self.read_text(segment.text)
        last = segment.outcome == "eos" and not len(segment.pending)
        return self._word_timer.add_audio(peaks, last=last)

    def _make_chunk(
        self, pcm: NDArray[np.int16], codes: NDArray[np.int64], words: Sequence[Word] = ()
    ) -> AudioChunk:
        """Makes the next chunk; `words` are timed from the start of the segment."""
        start_s = self._segment_start / self._sample_rate
        # Rounded, so that the end of a segment and the start of the next are the same number.
        timed = tuple(
            Word(word.text, round(start_s + word.start, 3), word.end, word.estimated)
            for word in words
        )
        chunk = AudioChunk(pcm, self._sample_rate, codes, self.num_frames, timed, self._segment_idx)
        self.num_frames += len(codes)
        self._num_samples += len(pcm)
        return chunk

    def _put(self, chunk: AudioChunk) -> None:
        if self.attempt < self._max_retries:
            self._deferred_chunks.append(chunk)
        else:
            self._events.put(chunk)

    @property
    def _no_codes(self) -> NDArray[np.int64]:
        return np.zeros((0, self._num_groups), np.int64)

    def end_segment(self, segment: Segment) -> bool:
        """Delivers deferred chunks, or drops them if the segment is to be spoken again.

        Returns:
            Whether it is.
        """
        self.read_text(segment.text)
        if (
            segment.outcome == "eos" and self._word_timer.num_pending
        ):  # no frame followed the last words
            no_samples, no_peaks = np.zeros(0, np.int16), np.zeros((0, 1), np.uint16)
            self._put_chunk(segment, self._no_codes, no_samples, no_peaks)
        self._current_timer = None
        if segment.outcome == "guard" and self._deferred_chunks:
            self.num_frames -= sum(len(chunk.codes) for chunk in self._deferred_chunks)
            self._num_samples = self._segment_start
            self._deferred_chunks = []
            self.attempt += 1
            return True
        self._end_scaling()
        self._release_deferred()
        self.attempt = 0
        self._segment_idx += 1
        return False

    def _end_scaling(self) -> None:
        """Puts what the segment's scaler holds back."""
        scaler, self._scaler = self._scaler, None
        if scaler is not None:
            pcm, words = scaler.end()
            if len(pcm) or words:
                self._put(self._make_chunk(pcm, self._no_codes, words))

    def add_silence(self, seconds: float, max_frames: int) -> None:
        """Delivers silence between two segments.

        Args:
            seconds: Its duration.
            max_frames: For which a chunk of it lasts at most.
        """
        num_left = round(seconds * self._sample_rate)
        max_samples = round(max_frames * FRAME_S * self._sample_rate)
        while num_left > 0:
            pcm = np.zeros(min(num_left, max_samples), np.int16)
            self._events.put(self._make_chunk(pcm, self._no_codes))
            num_left -= len(pcm)

    def finish(self, reason: FinishReason, error: BaseException | None) -> None:
        """Delivers deferred chunks and the last event."""
        if reason == "error":
            self._end_scaling()
        self._release_deferred()
        self._events.put(Finish(reason, self.num_frames, _synthesis_error(error)))

    def _release_deferred(self) -> None:
        for chunk in self._deferred_chunks:
            self._events.put(chunk)
        self._deferred_chunks = []


def _synthesis_error(error: BaseException | None) -> SynthesisError | None:
    """Wraps an error for the session, with the error as its cause."""
    if error is None or isinstance(error, SynthesisError):
        return error
    failure = SynthesisError(f"Speaking failed: {str(error) or type(error).__name__}")
    failure.__cause__ = error
    return failure
