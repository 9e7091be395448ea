"""The engine's record of one session: its request, its slot, and the segment that it speaks."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from megakernel_tts.align.alignment import Alignment, make_word_timer
from megakernel_tts.align.word_times import WordTimer
from megakernel_tts.align.words import Transcript
from megakernel_tts.backends.protocol import Frames
from megakernel_tts.engine.chunking import Chunking
from megakernel_tts.engine.delivery import Delivery
from megakernel_tts.engine.segment import Segment
from megakernel_tts.sampling import Sampling
from megakernel_tts.session import FRAME_S, ChunkPolicy, EventQueue, FinishReason
from megakernel_tts.text.prompt import Prefix, Prompt, PromptLayout
from megakernel_tts.text.text_queue import TextQueue, TextSegment

_SEVERITY: tuple[FinishReason, ...] = ("eos", "length", "guard")


@dataclass(frozen=True, kw_only=True)
class StreamRequest:
    """Parameters of a session.

    Attributes:
        prefix: The part of its prompts that does not depend on the text.
        vocoder_state: The vocoder's state at the start of every segment.
        layout: Where the text goes in the prompts.
        sampling: Sampling parameters, with a seed.
        chunks: Sizes of the chunks.
        alignment: Calibrated alignment heads; None estimates word times.
        max_retries: How often a segment that ran away is spoken again with the next seed.
        speed: How many times as fast as it was synthesised the speech is delivered.
        priority: Streams with a lower number get slots first.
    """

    prefix: Prefix
    vocoder_state: Any
    layout: PromptLayout
    sampling: Sampling
    chunks: ChunkPolicy
    alignment: Alignment | None = None
    max_retries: int = 0
    speed: float = 1.0
    priority: int = 0


class TextSnapshot(NamedTuple):
    """The text to speak now.

    Attributes:
        segment: The segment at the front of the text queue; None if no token is there.
        token_ids: Its tokens so far.
        text_ended: Whether they are all.
    """

    segment: TextSegment | None
    token_ids: list[int]
    text_ended: bool


class Stream:
    """One session in the engine. Its attributes are written by the engine thread only.

    Attributes:
        request: Parameters of the session.
        text_queue: Written by the session.
        events: Read by the session.
        delivery: Turns decoded frames into events.
        chunking: Sizes the chunks.
        slot: Slot of the backend and of the vocoder, while it has one.
        segment: The segment being spoken; None between segments.
        prompt: The prompt of the next segment, from when it was built to when it was run. Text that
            arrives in between does not change it.
        num_prefilled: Positions of `prompt` that are in place.
        num_sampled_frames: Frame numbers of the random generator that earlier segments have used.
        reason: The worst outcome of its segments.
    """

    def __init__(
        self, request: StreamRequest, text_queue: TextQueue, events: EventQueue, sample_rate: int
    ) -> None:
        """Starts without a slot.

        Args:
            request: Parameters of the session.
            text_queue: Its text, empty or not.
            events: Its event queue.
            sample_rate: In Hz.
        """
        self.request = request
        self.text_queue = text_queue
        self.events = events
        self.slot: int | None = None
        self.segment: Segment | None = None
        self.prompt: Prompt | None = None
        self.num_prefilled = 0
        self.num_sampled_frames = 0
        self.reason: FinishReason = "eos"
        self.delivery = Delivery(
            events,
            sample_rate,
            guarded=request.sampling.guard,
            max_retries=request.max_retries,
            speed=request.speed,
        )
        num_lookahead = request.alignment.lookahead if request.alignment else 0
        self.chunking = Chunking(request.chunks, num_lookahead, request.speed)
        self._resumed = False  # text was missing since the last step

    # --- state, read by the scheduler and the decode pipeline ---

    @property
    def active_segment(self) -> Segment:
        """The segment being spoken; there must be one."""
        assert self.segment is not None, "the stream is between segments"
        return self.segment

    @property
    def active_slot(self) -> int:
        """The stream's slot; there must be one."""
        assert self.slot is not None, "the stream has no slot"
        return self.slot

    @property
    def abandoned(self) -> bool:
        """Whether the session was cancelled or dropped."""
        return self.events.abandoned

    @property
    def leaving(self) -> bool:
        """Whether the stream, or its segment, is to be ended."""
        return self.abandoned or (self.segment is not None and self.segment.outcome is not None)

    @property
    def delivered(self) -> bool:
        """Whether all frames that the segment has made were delivered."""
        segment = self.segment
        return segment is None or not (segment.num_decoding or len(segment.pending))

    @property
    def exhausted(self) -> bool:
        """Whether the text has ended, and all of it was spoken."""
        if self.segment is not None:
            return False
        with self.text_queue.lock:
            return self.text_queue.exhausted

    @property
    def movable(self) -> bool:
        """Whether a frame can be made now."""
        segment = self.segment
        return (
            self.slot is not None and segment is not None and segment.ready and self.reader_keeps_up
        )

    @property
    def starved(self) -> bool:
        """Whether the stream makes no frame until more text arrives."""
        return self.prompt is None and (self.segment is None or not self.segment.ready)

    @property
    def waiting(self) -> bool:
        """Whether the stream has no slot and could use one."""
        if self.slot is not None or self.abandoned:
            return False
        snapshot = self.text_so_far()
        if self.segment is None:
            return snapshot.segment is not None and (
                snapshot.text_ended or self.request.layout == "streaming"
            )
        return self.reader_keeps_up and (self.segment.ready or self.has_new_text(snapshot))

    @property
    def speaking(self) -> bool:
        """Whether the stream has a slot, with a segment that has not ended."""
        return self.slot is not None and self.segment is not None and self.segment.outcome is None

    @property
    def stalled(self) -> bool:
        """Whether the stream has a slot and cannot use it."""
        return (
            self.speaking
            and not self.movable
            and not (self.reader_keeps_up and self.has_new_text())
        )

    @property
    def frame_playback_s(self) -> float:
        """Seconds for which a frame is played."""
        return FRAME_S / self.request.speed

    @property
    def deadline_s(self) -> float:
        """Clock time at which the audio so far has been played; -inf before the first chunk."""
        return self.chunking.played_until_s

    @property
    def reader_keeps_up(self) -> bool:
        """Whether the unread frames leave room for more."""
        return self.chunking.reader_keeps_up(self._num_unread)

    @property
    def _num_unread(self) -> int:
        """Frames that the reader has not read, including those not yet decoded."""
        if self.segment is None:
            return self.delivery.num_unread
        return self.delivery.num_unread + self.segment.num_decoding + len(self.segment.pending)

    @property
    def begins_speech(self) -> bool:
        """Whether the next frame, the first of its segment, completes the stream's first chunk."""
        is_first = self._first_chunk and not self.active_segment.num_frames
        return is_first and self.step_range()[0] == 1

    @property
    def _first_chunk(self) -> bool:
        """Whether the next chunk is the stream's first."""
        decoding = self.segment is not None and self.segment.num_decoding > 0
        return self.delivery.num_frames == 0 and not decoding

    # --- slot ---

    def enter_slot(self, slot: int) -> None:
        """Records the stream's slot."""
        assert self.slot is None, "the stream has a slot"
        self.slot = slot
        self.events.end_slot_wait()

    def leave_slot(self) -> int:
        """Records that the stream has no slot; returns the slot that it had."""
        segment, slot = self.segment, self.active_slot
        assert segment is None or segment.num_decoding == 0, "the slot's codes are being decoded"
        self.slot = self.prompt = None
        self.num_prefilled = 0
        return slot

    # --- text ---

    def text_so_far(self) -> TextSnapshot:
        """Returns the text to speak now."""
        with self.text_queue.lock:
            segment = self.text_queue.front()
            if segment is None:
                return TextSnapshot(None, [], False)
            return TextSnapshot(segment, list(segment.token_ids), segment.text_ended)

    def has_new_text(self, snapshot: TextSnapshot | None = None) -> bool:
        """Returns whether the segment's text has grown or ended since it was fed."""
        segment, snapshot = self.active_segment, snapshot or self.text_so_far()
        if segment.text_complete:
            return False
        return snapshot.text_ended or len(snapshot.token_ids) > segment.num_tokens

    def add_text(self, num_tokens: int, num_vectors: int, *, text_complete: bool) -> None:
        """Records text that was fed to the backend; see `Segment.add_text`."""
        segment = self.active_segment
        self._resumed |= segment.outcome is None and not segment.ready
        segment.add_text(num_tokens, num_vectors, text_complete=text_complete)

    def read_text(self) -> None:
        """Passes the segment's text, as far as it is known, to word alignment."""
        if self.segment is not None:
            self.delivery.read_text(self.segment.text)

    def deliver_breaks(self) -> None:
        """Delivers the breaks before the next segment, if the reader keeps up."""
        while self.segment is None and self.reader_keeps_up:
            with self.text_queue.lock:
                pause = self.text_queue.take_break()
            if pause is None:
                return
            self.delivery.add_silence(pause.seconds, self.request.chunks.largest)

    # --- frames and chunks ---

    @property
    def active_prompt(self) -> Prompt:
        """The prompt that is being run; there must be one."""
        assert self.prompt is not None, "no prompt is being run"
        return self.prompt

    @property
    def num_left_to_prefill(self) -> int:
        """Positions of the prompt that are to be run, without those that may be cached."""
        prompt = self.active_prompt
        return prompt.num_positions - max(self.num_prefilled, prompt.num_common)

    def set_prompt(self, prompt: Prompt | None) -> None:
        """Records the prompt of the next segment; None if text for it is missing."""
        self.prompt = prompt

    def record_prefill(self, num_prefilled: int) -> None:
        """Records how many positions of the prompt are in place."""
        self.num_prefilled = num_prefilled

    def begin_segment(self, segment: Segment, first_token_position: int) -> None:
        """Starts a segment whose prompt was run.

        Args:
            segment: With no frames.
            first_token_position: Position of its first token in the slot.
        """
        self.segment, self.prompt, self.num_prefilled = segment, None, 0
        self.delivery.begin_segment(self._make_word_timer(first_token_position))

    def _make_word_timer(self, first_token_position: int) -> WordTimer:
        transcript = Transcript(self.text_queue.token_bytes)
        return make_word_timer(self.request.alignment, transcript, first_token_position)

    def add_frames(self, frames: Frames, now_s: float) -> None:
        """Adds frames from a step that ended at `now_s` seconds."""
        segment = self.active_segment
        frames = segment.within_limit(frames)
        self.delivery.observe(frames, segment.text)
        segment.add_frames(frames, now_s)

    def plan_chunk(self, now_s: float) -> None:
        """Sizes the next chunk before a step at `now_s` seconds; see `Chunking`."""
        segment = self.active_segment
        num_out = self.delivery.num_frames + segment.num_decoding
        if self._resumed:
            self.chunking.resume(now_s, num_out)
        else:
            self.chunking.plan(now_s, num_out, len(segment.pending))
        self._resumed = False

    def round_up_first_chunk(self, multiple: int) -> None:
        """Makes the first chunk due after a multiple of frames; see `Chunking.round_up_first`."""
        if self._first_chunk:
            self.chunking.round_up_first(len(self.active_segment.pending), multiple)

    def shorten_chunk(self, num_upcoming: int) -> None:
        """Makes a chunk due after a step of `num_upcoming` frames; see `Chunking.shorten`."""
        self.chunking.shorten(len(self.active_segment.pending) + num_upcoming)

    def step_range(self) -> tuple[int, int]:
        """Returns the frames of a step, at least and at most; see `Chunking.step_range`."""
        return self.chunking.step_range(
            self.active_segment, self._num_unread, first=self._first_chunk
        )

    def num_expected(self, num_upcoming: int) -> int:
        """Returns the frames of the chunk due after a step; see `Chunking.num_expected`."""
        return self.chunking.num_expected(
            self.active_segment, num_upcoming, first=self._first_chunk
        )

    @property
    def due(self) -> bool:
        """Whether a chunk is to be decoded now."""
        return self.segment is not None and self.chunking.due(self.segment, first=self._first_chunk)

    def start_decoding(self) -> None:
        """Records that the chunk that is due is in the decode pipeline."""
        segment = self.active_segment
        segment.start_decoding(len(self.chunking.next_chunk(segment)))

    def end_segment(self) -> None:
        """Leaves the segment, which has ended; one that ran away is spoken again if it may be."""
        segment = self.active_segment
        assert segment.num_decoding == 0, "the last chunk was not delivered"
        assert segment.outcome is not None and segment.outcome != "error"
        again = self.delivery.end_segment(segment)
        self.segment = None
        if again:
            return
        if _SEVERITY.index(segment.outcome) > _SEVERITY.index(self.reason):
            self.reason = segment.outcome
        self.num_sampled_frames += segment.num_frames + 1  # the end of speech was sampled as well
        with self.text_queue.lock:
            self.text_queue.pop()
            self._resumed = self.text_queue.front() is None

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """Delivers the last event; further text is ignored."""
        assert self.segment is None or self.segment.num_decoding == 0, "a chunk was not delivered"
        with self.text_queue.lock:
            self.text_queue.close()
        self.events.end_slot_wait()
        self.delivery.finish(reason, error)
        self.segment = None
