"""The one loop: sessions in, frames out.

A single thread owns the backend and the codec. Each turn gives free slots to streams that have
something to say, hands over the text that has arrived, makes one frame for every stream that can
move, and decodes and delivers what is due. Streams join and leave between turns.
"""

import atexit
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.audio import pcm16
from megakernel_tts.backend import Backend
from megakernel_tts.codec.decoder import Decoder, State
from megakernel_tts.errors import EngineBusyError, EngineClosedError, SynthesisError
from megakernel_tts.guard import Guard
from megakernel_tts.prompt import Layout, Prefix, Prompter
from megakernel_tts.sampling import Sampling
from megakernel_tts.script import Piece, Script
from megakernel_tts.session import AudioChunk, ChunkPolicy, Finish, FinishReason, Mailbox, Session

if TYPE_CHECKING:
    from megakernel_tts.voice import Voice

_SEVERITY: tuple[FinishReason, ...] = ("eos", "length", "guard")
_PRIME_FRAMES = 64  # reference frames decoded at a time


class _Bell:
    """Wakes the engine. `ring` takes no lock, so that it may be called from a finaliser."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """Wakes the engine now, or keeps it from falling asleep."""
        self._rings.put(None)

    def clear(self) -> None:
        """Forgets earlier rings."""
        with suppress(queue.Empty):
            while True:
                self._rings.get_nowait()

    def wait(self) -> None:
        """Sleeps until it rings."""
        self._rings.get()


class _Utterance:
    """One piece of text being spoken in a slot."""

    def __init__(self, piece: Piece, state: State, cap: int) -> None:
        self.piece = piece
        self.state = state  # of the codec, after the frames that were decoded
        self.cap = cap
        self.guard = Guard()
        self.tokens = 0  # of the piece, handed to the backend
        self.fed = 0  # text vectors handed over after the prompt
        self.closed = False  # whether the end of the text was handed over too
        self.frames = 0
        self.pending: list[Tensor] = []  # frames not yet decoded
        self.over: FinishReason | None = None

    @property
    def ready(self) -> bool:
        """Whether the next frame's text is there."""
        return self.over is None and (self.frames <= self.fed or self.closed)

    def used_up(self, frame: int) -> bool:
        """Whether the talker had been given all of the text before this frame."""
        return self.closed and frame >= self.fed


class _Stream:
    """What the engine keeps of a session."""

    def __init__(
        self,
        script: Script,
        mailbox: Mailbox,
        prefix: Prefix,
        start: State,
        layout: Layout,
        sampling: Sampling,
        chunks: ChunkPolicy,
    ) -> None:
        self.script = script
        self.mailbox = mailbox
        self.prefix = prefix
        self.start = start  # the codec's state at the start of every piece
        self.layout: Layout = layout
        self.sampling = sampling
        self.chunks = chunks
        self.chunk = chunks.first  # frames of the next one
        self.frames = 0
        self.reason: FinishReason = "eos"  # the worst of its pieces
        self.abandoned = False
        self.slot: int | None = None
        self.utterance: _Utterance | None = None

    @property
    def movable(self) -> bool:
        """Whether to make a frame for it now."""
        u = self.utterance
        if u is None or not u.ready:
            return False
        return self.mailbox.unread + len(u.pending) < self.chunks.ahead

    @property
    def due(self) -> bool:
        """Whether frames are to be decoded now."""
        u = self.utterance
        if u is None or not u.pending:
            return False
        # A stream whose text has run dry gives out what it has.
        return not u.ready or len(u.pending) >= self.chunk


class Engine:
    """Speaks for many sessions at once on one thread."""

    def __init__(
        self, backend: Backend, prompter: Prompter, decoder: Decoder, *, waiting: int = 64
    ) -> None:
        """Starts the thread.

        Args:
            backend: Runs the networks; the engine owns it from now on.
            prompter: Builds prompts.
            decoder: The codec.
            waiting: Sessions beyond the backend's slots that may be open and wait for one.
        """
        self.backend = backend
        self.prompter = prompter
        self.decoder = decoder
        self._most = backend.slots + waiting
        self._free = list(range(backend.slots))
        self._streams: list[_Stream] = []
        self._lock = threading.Lock()  # of the list and of the two fields below
        self._closed = False
        self._broken: BaseException | None = None
        self._bell = _Bell()
        self._primed = lru_cache(maxsize=32)(self._prime)
        self._thread = threading.Thread(target=self._run, name="megakernel-tts-engine", daemon=True)
        self._thread.start()
        # A thread that is still computing while the interpreter goes away aborts the process.
        atexit.register(self.close)

    def open(
        self,
        script: Script,
        prefix: Prefix,
        voice: "Voice | None",
        layout: Layout,
        sampling: Sampling,
        chunks: ChunkPolicy,
    ) -> Session:
        """Opens a session.

        Args:
            script: Empty, or with text already.
            prefix: Of the prompts: voice, language, instruction.
            voice: A cloned voice, whose recording the codec hears first; None for the others.
            layout: Where the text goes in the prompts.
            sampling: With a seed.
            chunks: How frames leave.

        Raises:
            EngineBusyError: Too many sessions are open.
            EngineClosedError: The engine was closed or broke.
        """
        start = self._primed(voice)
        mailbox = Mailbox(on_read=self._bell.ring)
        stream = _Stream(script, mailbox, prefix, start, layout, sampling, chunks)
        with self._lock:
            if self._closed or self._broken:
                raise EngineClosedError("The engine is closed; load a new one.") from self._broken
            live = sum(not stream.abandoned for stream in self._streams)
            if live >= self._most:
                raise EngineBusyError(
                    f"{self.backend.slots} streams can speak at once, and {live} "
                    "sessions are open, as many as may wait. Try again later, or load with more "
                    "slots."
                )
            self._streams.append(stream)
        self._bell.ring()
        return Session(script, mailbox, self._bell.ring, partial(_abandon, stream, self._bell))

    @property
    def sessions(self) -> int:
        """How many sessions are open."""
        with self._lock:
            return len(self._streams)

    def close(self) -> None:
        """Cancels every session and stops the thread; may be called twice."""
        with self._lock:
            self._closed = True
        self._bell.ring()
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.inference_mode()
    def _prime(self, voice: "Voice | None") -> State:
        """The codec's state after a voice's recording."""
        state = self.decoder.start()
        if voice is not None and voice.codes is not None:
            for part in voice.codes.to(state.position.device).split(_PRIME_FRAMES):
                _, state = self.decoder.decode(part[None], state)
        return state

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while not self._closed:
                self._bell.clear()
                if not self._turn():
                    self._bell.wait()
        except BaseException as error:  # a bug: no session may hang because of it
            self._broken = error
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            with suppress(Exception):  # everyone is told, whatever the backend says
                self._finish(stream, "error" if self._broken else "cancelled", self._broken)

    def _turn(self) -> bool:
        """One turn; whether anything moved."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            self._guarded(stream, self._prepare)
        moving = [s for s in streams if s.movable]
        self._step(moving)
        self._decode([s for s in streams if s.due])
        ended = [s for s in streams if s.utterance is not None and s.utterance.over is not None]
        for stream in ended:
            self._guarded(stream, self._end_piece)
        return bool(moving or ended)

    def _guarded(self, stream: _Stream, act: Callable[[_Stream], None]) -> None:
        """Does something for one stream; what goes wrong ends that stream alone."""
        try:
            act(stream)
        except Exception as error:
            self._finish(stream, "error", error)

    def _prepare(self, stream: _Stream) -> None:
        """Cancels, finishes, starts or feeds a stream, as its state asks for."""
        if stream.abandoned:
            self._finish(stream, "cancelled")
            return
        with stream.script.lock:
            piece = stream.script.front()
            done = stream.script.done
            ids, ended = (list(piece.ids), piece.ended) if piece else ([], False)
        if stream.utterance is not None:
            self._feed(stream, stream.utterance, ids, ended)
        elif piece is not None:
            self._start(stream, piece, ids, ended)
        elif done:
            self._finish(stream, stream.reason)

    def _start(self, stream: _Stream, piece: Piece, ids: list[int], ended: bool) -> None:
        """Gives a stream a slot and runs the prompt of its next piece."""
        if not self._free:
            return
        prompt = self.prompter.start(stream.prefix, ids, stream.layout, ended=ended)
        if prompt is None:
            return
        room = self.backend.positions - len(prompt.prefill)
        if room < 1:
            raise SynthesisError(
                f"The prompt takes {len(prompt.prefill)} positions and a slot has "
                f"{self.backend.positions}: use a shorter reference recording or instruction."
            )
        stream.slot = self._free.pop(0)
        self.backend.prefill(stream.slot, prompt.prefill, stream.sampling, stream.frames)
        u = _Utterance(piece, stream.start, min(stream.sampling.max_frames, room))
        u.tokens, u.fed, u.closed = prompt.taken, len(prompt.lead), prompt.closed
        self.backend.feed(stream.slot, prompt.lead, prompt.closed)
        stream.utterance = u
        self._feed(stream, u, ids, ended)

    def _feed(self, stream: _Stream, u: _Utterance, ids: list[int], ended: bool) -> None:
        """Hands over the text that has arrived; the end of the text goes in exactly once."""
        assert stream.slot is not None
        new = ids[u.tokens :]
        if u.closed or not (new or ended):
            return
        vectors = self.prompter.text(new)
        if ended:
            vectors = torch.cat([vectors, self.prompter.eos])
        self.backend.feed(stream.slot, vectors, ended)
        u.tokens += len(new)
        u.fed += len(vectors)
        u.closed = ended

    def _step(self, moving: Sequence[_Stream]) -> None:
        """Makes one frame for each stream; if that fails, for each alone, to find the culprit."""
        if not moving:
            return
        try:
            frames = self.backend.step([s.slot for s in moving if s.slot is not None])
        except Exception as error:
            if len(moving) == 1:
                self._finish(moving[0], "error", error)
                return
            for stream in moving:
                self._step([stream])
            return
        for stream, codes in zip(moving, frames, strict=True):
            self._take(stream, codes)

    def _take(self, stream: _Stream, codes: Tensor | None) -> None:
        """Takes a frame into its utterance."""
        u = stream.utterance
        assert u is not None
        if codes is None:
            u.over = "eos"
            return
        u.pending.append(codes)
        u.frames += 1
        stream.frames += 1
        if u.frames >= u.cap:
            u.over = "length"

    def _decode(self, due: Sequence[_Stream]) -> None:
        """Decodes and delivers pending frames: streams with as many together."""
        groups: dict[int, list[_Stream]] = {}
        for stream in due:
            assert stream.utterance is not None
            groups.setdefault(len(stream.utterance.pending), []).append(stream)
        for group in groups.values():
            try:
                self._decode_group(group)
            except Exception as error:
                if len(group) == 1:
                    self._finish(group[0], "error", error)
                    continue
                for stream in group:
                    self._decode([stream])

    def _decode_group(self, group: Sequence[_Stream]) -> None:
        utterances = [s.utterance for s in group if s.utterance is not None]
        codes = torch.stack([torch.stack(u.pending) for u in utterances])
        state = State.stack([u.state for u in utterances])
        waves, state = self.decoder.decode(codes.to(state.position.device), state)
        pcm = pcm16(waves.float().cpu().numpy())
        for stream, u, part, samples, after in zip(
            group, utterances, codes, pcm, state.split(), strict=True
        ):
            u.state, u.pending = after, []
            self._guarded(stream, partial(self._deliver, u=u, codes=part, samples=samples))

    def _deliver(
        self, stream: _Stream, u: _Utterance, codes: Tensor, samples: NDArray[np.int16]
    ) -> None:
        """Hands a chunk over; one in which the speech runs away is cut at that frame."""
        count, frame = len(codes), self.decoder.frame
        first = stream.frames - count
        if stream.sampling.guard:
            for i in range(count):
                pcm = samples[i * frame : (i + 1) * frame]
                used_up = u.used_up(u.frames - count + i)
                if u.guard.runaway(int(codes[i, 0]), pcm, u.piece.frames, used_up=used_up):
                    u.over = "guard"
                    codes, samples = codes[: i + 1], samples[: (i + 1) * frame]
                    stream.frames = first + i + 1
                    break
        stream.chunk = min(2 * stream.chunk, stream.chunks.largest)
        # Copies: a chunk that is kept must not keep those of the whole batch.
        pcm, rows = samples.copy(), codes.numpy().copy()
        stream.mailbox.put(AudioChunk(pcm, self.decoder.sample_rate, rows, first))

    def _end_piece(self, stream: _Stream) -> None:
        """Leaves a piece that was spoken, and goes to the end of the line for the next one."""
        u = stream.utterance
        assert u is not None and u.over is not None and stream.slot is not None
        if _SEVERITY.index(u.over) > _SEVERITY.index(stream.reason):
            stream.reason = u.over
        with stream.script.lock:
            stream.script.pop()
        self._free_slot(stream)
        with self._lock:
            self._streams.remove(stream)
            self._streams.append(stream)

    def _free_slot(self, stream: _Stream) -> None:
        stream.utterance = None
        if stream.slot is not None:
            slot, stream.slot = stream.slot, None
            self._free.append(slot)
            self._bell.ring()  # somebody may be waiting for it
            self.backend.release(slot)

    def _finish(
        self, stream: _Stream, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """Says the last word to a stream and forgets it."""
        with self._lock:
            if stream not in self._streams:
                return
            self._streams.remove(stream)
        with stream.script.lock:
            stream.script.close()
        failure = error if isinstance(error, SynthesisError) else None
        if error is not None and failure is None:
            failure = SynthesisError(str(error) or type(error).__name__)
            failure.__cause__ = error
        with suppress(RuntimeError):  # the reader's event loop is gone: nobody is left to tell
            stream.mailbox.put(Finish(reason, stream.frames, failure))
        self._free_slot(stream)


def _abandon(stream: _Stream, bell: _Bell) -> None:
    stream.abandoned = True
    bell.ring()
