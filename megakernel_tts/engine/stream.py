"""What the loop keeps of a session, and of the piece of text that it is speaking."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.align.alignment import Alignment, make_word_timer
from megakernel_tts.align.word_times import WordTimer
from megakernel_tts.align.words import Transcript, Word
from megakernel_tts.backends.protocol import Frames
from megakernel_tts.backends.slot_snapshot import SlotSnapshot
from megakernel_tts.codec.decoder import PendingDecodeRequest
from megakernel_tts.engine.guard import Guard
from megakernel_tts.sampling import Sampling
from megakernel_tts.session import AudioChunk, ChunkPolicy, EventQueue, FinishReason
from megakernel_tts.text.prompt import Layout, Prefix
from megakernel_tts.text.text_queue import TextQueue, TextSegment

_SEVERITY: tuple[FinishReason, ...] = ("eos", "length", "guard")


@dataclass(eq=False)
class Segment:
    """One piece of text being spoken: in a slot, or suspended with all that the slot held.

    Attributes:
        piece: The text.
        cap: Frames at most.
        tokens: Of the piece, handed to the backend.
        fed: Text vectors handed over after the prompt.
        closed: Whether the end of the text was handed over too.
        times: Finds out when its words are spoken.
        begins: When, in seconds from the start of the stream.
        groups: Codes of a frame.
        frames: Made so far, the last ones still `decoding`, or `pending`: nobody has begun to.
        held: Chunks that leave once the piece is over, if it may have to be said again.
        over: How it ended, once it did; `error` says what failed.
        suspended: What its slot of the backend held, while it has none.
        sound: What its slot of the vocoder held.
        moved: When it last took a step, in seconds of `time.monotonic`.
    """

    piece: TextSegment
    cap: int
    tokens: int
    fed: int
    closed: bool
    times: WordTimer
    begins: float = 0.0
    groups: int = 0
    frames: int = 0
    pending: list[Tensor] = field(default_factory=list[Tensor])
    decoding: int = 0
    held: list[AudioChunk] = field(default_factory=list[AudioChunk])
    guard: Guard = field(default_factory=Guard)
    over: FinishReason | None = None
    error: Exception | None = None
    suspended: SlotSnapshot[Any] | None = None
    sound: Any = None
    moved: float = field(default_factory=time.monotonic)

    @property
    def ready(self) -> bool:
        """Whether the next frame's text is there."""
        return self.over is None and (self.frames <= self.fed or self.closed)

    @property
    def possible(self) -> int:
        """Frames that can be made with the text that is there."""
        return (self.cap if self.closed else min(self.cap, self.fed + 1)) - self.frames

    def used_up(self, frame: int) -> bool:
        """Whether the talker had been given all of the text before this frame."""
        return self.closed and frame >= self.fed

    def read_text(self) -> None:
        """Takes note of the text as far as it is written, to tell its words."""
        self.times.update_text(self.piece.ids, self.piece.whole)

    def take(self, frames: Frames) -> None:
        """Takes the next frames, with which the speech may end."""
        self.moved = time.monotonic()
        self.read_text()
        if frames.scores is not None:
            self.times.add_scores(frames.scores.numpy())
        self.groups = frames.codes.shape[1]
        self.pending += frames.codes.unbind()
        self.frames += len(frames.codes)
        if frames.ended:
            self.over = "eos"
        elif self.frames >= self.cap:
            self.over = "length"

    def fail(self, error: Exception) -> None:
        """Ends the piece; frames that were made before still leave."""
        self.over, self.error = "error", error

    def runaway(self, codes: Tensor, samples: NDArray[np.int16]) -> int | None:
        """How many of these frames to keep, if the speech runs away within them.

        Args:
            codes: [frames, groups], the last ones that were made but for those still pending.
            samples: [frames, samples a frame].
        """
        first = self.frames - len(self.pending) - len(codes)
        for i, pcm in enumerate(samples):
            used_up, idle = self.used_up(first + i), self.times.frames_since_end(first + i)
            code, expected = int(codes[i, 0]), self.piece.frames
            if self.guard.runaway(code, pcm, expected, used_up=used_up, idle=idle):
                return i + 1
        return None

    def words(self, samples: NDArray[np.int16]) -> tuple[Word, ...]:
        """The words that begin in these frames, timed from the start of the stream.

        Args:
            samples: [frames, samples a frame]; in the last ones all words begin that are left.
        """
        self.read_text()
        last = self.over == "eos" and not self.pending
        found = self.times.add_audio(samples, last=last)
        return tuple(replace(word, start=word.start + self.begins) for word in found)


@dataclass(eq=False)
class Stream:
    """What the loop keeps of a session.

    Attributes:
        script: The text.
        mailbox: Where the audio goes.
        prefix: Of the prompts.
        start: The vocoder's state at the start of every piece.
        layout: Where the text goes in the prompts.
        sampling: With a seed.
        chunks: How frames leave.
        alignment: How words are found, where that was calibrated.
        retries: How often a piece that runs away is said again.
        tries: How often the piece at hand was said again.
        frames: Delivered.
        seconds: They last.
        draws: Numbers of frames that earlier pieces drew with; the next piece goes on after them.
        reason: The worst of its pieces.
        abandoned: Whether nobody listens any more.
        slot: Of the backend, while it has one.
        utterance: The piece that is being spoken.
    """

    script: TextQueue
    mailbox: EventQueue
    prefix: Prefix
    start: Any
    layout: Layout
    sampling: Sampling
    chunks: ChunkPolicy
    alignment: Alignment | None = None
    retries: int = 0
    tries: int = 0
    frames: int = 0
    seconds: float = 0.0
    draws: int = 0
    reason: FinishReason = "eos"
    abandoned: bool = False
    slot: int | None = None
    utterance: Segment | None = None

    def __post_init__(self) -> None:
        self.chunk = self.chunks.first  # frames of the next one

    def text(self) -> tuple[TextSegment | None, list[int], bool]:
        """The piece to speak now, its tokens so far, and whether they are all."""
        with self.script.lock:
            piece = self.script.front()
            return (piece, list(piece.ids), piece.ended) if piece else (None, [], False)

    def read_text(self) -> None:
        """Takes note of what is spoken now, as far as it is written."""
        if self.utterance is not None:
            self.utterance.read_text()

    @property
    def read(self) -> bool:
        """Whether its reader keeps up."""
        return self._unread < self.chunks.ahead

    @property
    def _unread(self) -> int:
        """Frames that its reader has not read, also those that have yet to be decoded."""
        u = self.utterance
        return self.mailbox.unread + (u.decoding + len(u.pending) if u else 0)

    @property
    def movable(self) -> bool:
        """Whether to make a frame for it now."""
        u = self.utterance
        return self.slot is not None and u is not None and u.ready and self.read

    @property
    def until_due(self) -> int:
        """Frames after which it is to be looked at: a chunk, the end, no text, or no reader."""
        u = self.utterance
        assert u is not None
        room = self.chunks.ahead - self._unread
        return min(self._wanted - len(u.pending), u.possible, room)

    def expect(self, coming: NDArray[np.int32]) -> PendingDecodeRequest | None:
        """The chunk that leaves after the frames that are coming, if all are made; None: no chunk.

        Args:
            coming: Where their codes will be, [frames, groups].
        """
        u = self.utterance
        assert u is not None and self.slot is not None
        there = len(u.pending) + len(coming)
        ends = len(coming) >= u.possible
        if u.over is not None or not (ends or there >= self._wanted):
            return None
        frames = there if ends else min(there, self.chunk)
        known = np.empty((0, coming.shape[1]), np.int64)
        if u.pending:
            known = torch.stack(u.pending[:frames]).numpy()
        return PendingDecodeRequest(self.slot, known, coming[: frames - len(known)])

    @property
    def _wanted(self) -> int:
        """Pending frames with which the next chunk leaves: so many that its words are known.

        The first chunk of all waits for nothing: no word but the first begins in it.
        """
        u = self.utterance
        first = self.frames == 0 and (u is None or u.decoding == 0)
        ahead = self.alignment.lookahead if self.alignment and not first else 0
        return min(self.chunk + ahead, self.chunks.ahead)

    @property
    def outgoing(self) -> list[Tensor]:
        """The frames of the next chunk, once it is `due`."""
        u = self.utterance
        assert u is not None
        return u.pending[: self.chunk] if u.ready else u.pending

    @property
    def starved(self) -> bool:
        """Whether it says nothing until more text comes."""
        u = self.utterance
        return u is None or not u.ready

    @property
    def waiting(self) -> bool:
        """Whether somebody listens, and it could use a slot but has none."""
        if self.slot is not None or self.abandoned:
            return False
        piece, ids, ended = self.text()
        u = self.utterance
        if u is None:
            return piece is not None and (ended or self.layout == "streaming")
        news = not u.closed and (ended or len(ids) > u.tokens)
        return self.read and (u.ready or news)

    def stalled(self, patience: float) -> bool:
        """Whether it has held its slot for `patience` seconds without using it."""
        u = self.utterance
        if self.slot is None or u is None or u.over is not None or self.movable:
            return False
        return time.monotonic() - u.moved >= patience

    @property
    def due(self) -> bool:
        """Whether frames are to be decoded now."""
        u = self.utterance
        if u is None or not u.pending:
            return False
        # A stream whose text has run dry gives out what it has.
        return not u.ready or len(u.pending) >= self._wanted

    def begin_decoding(self) -> None:
        """Takes note that what is outgoing is being decoded; the next chunk may be larger."""
        u = self.utterance
        assert u is not None
        u.decoding = len(self.outgoing)
        del u.pending[: u.decoding]
        self.chunk = min(2 * self.chunk, self.chunks.largest)

    def deliver(self, codes: Tensor, samples: NDArray[np.int16], rate: int) -> None:
        """Hands over what was decoded; a chunk in which the speech runs away is cut at that frame.

        Args:
            codes: [frames, groups].
            samples: [frames * samples a frame].
            rate: Samples a second.
        """
        u = self.utterance
        assert u is not None
        u.decoding = 0
        frames = samples.reshape(len(codes), -1)
        kept = u.runaway(codes, frames) if self.sampling.guard else None
        if kept is not None:
            u.over = u.over if u.over == "error" else "guard"
            u.frames -= len(codes) - kept + len(u.pending)
            u.pending = []
            frames, codes = frames[:kept], codes[:kept]
        self._leave(frames, codes, rate)

    def _leave(self, frames: NDArray[np.int16], codes: Tensor, rate: int) -> None:
        """Hands frames over, with the words that begin in them, or keeps them for the end."""
        u = self.utterance
        assert u is not None
        # Copies: a chunk that is kept must not keep those of the whole batch.
        pcm, numbers = frames.flatten(), codes.numpy().copy()
        chunk = AudioChunk(pcm, rate, numbers, self.frames, u.words(frames))
        self.frames += len(codes)
        self.seconds += frames.size / rate
        if self.tries < self.retries:
            u.held.append(chunk)
        else:
            self.mailbox.put(chunk)

    def times(self, text_start: int, rate: int) -> WordTimer:
        """What finds the times of the next piece's words.

        Args:
            text_start: The position of its first token.
            rate: Samples a second.
        """
        return make_word_timer(self.alignment, Transcript(self.script.spell), rate, text_start)

    def flush(self) -> None:
        """Hands over what was held back."""
        if self.utterance is not None:
            for chunk in self.utterance.held:
                self.mailbox.put(chunk)
            self.utterance.held = []

    def end_piece(self, rate: int) -> None:
        """Leaves a piece that was spoken; one that ran away is said again if it may be.

        Args:
            rate: Samples a second.
        """
        u = self.utterance
        assert u is not None and u.over is not None
        if u.over == "eos" and u.times.num_pending:  # no frame came after the last text
            nothing = torch.zeros(0, u.groups, dtype=torch.long)
            self._leave(np.zeros((0, 1), np.int16), nothing, rate)
        if u.over == "guard" and u.held:
            self.frames -= sum(len(chunk.codes) for chunk in u.held)
            self.seconds = u.begins
            self.tries += 1
            self.utterance = None
            return
        self.flush()
        self.utterance = None
        self.tries = 0
        if _SEVERITY.index(u.over) > _SEVERITY.index(self.reason):
            self.reason = u.over
        self.draws += u.frames + 1  # the end of the speech was drawn, too
        with self.script.lock:
            self.script.pop()


def speaking(streams: Sequence[Stream]) -> list[tuple[Stream, Segment]]:
    """Those who speak a piece, and the piece."""
    return [(s, s.utterance) for s in streams if s.utterance is not None]
