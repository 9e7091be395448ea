"""The one loop: text in, frames out, for every stream at once.

A single thread owns the backend and the codec. Each turn hands over the text that has arrived,
gives slots to streams that can use them, makes frames for every stream that can move until the
first chunk is due, and begins to decode what is due: if it can, while the last frames are being
made, so that the device goes on by itself. That is delivered beside the next frames or prompts.
Streams join and leave between turns; who cannot wait so long (to join, to leave, to go on) ends the
turn's frames with the one at hand.

A stream that has stalled, because its text or its reader is late, keeps its slot until another
could use it; then it is suspended, and goes on later exactly where it stopped.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from megakernel_tts.backends.protocol import Backend, PrefillRequest
from megakernel_tts.codec.vocoder import Vocoder
from megakernel_tts.engine.decoding import DecodePipeline
from megakernel_tts.engine.stream import Segment, Stream, speaking
from megakernel_tts.engine.wakeup import Arrivals, Wakeup
from megakernel_tts.errors import DeviceError, SynthesisError
from megakernel_tts.session import Finish, FinishReason
from megakernel_tts.text.prompt import Prompt, PromptBuilder

_PROMPTS = 128  # positions of prompts' own, after which those who speak make a frame
_AHEAD = 16  # of them that go first: the device runs them while the others' prompts are built
_COURTESY = 5e-4  # seconds beside their prompts that those who begin wait for those who come
_PATIENCE = 1.0  # seconds that a stalled stream keeps a slot which another could use


class Loop:
    """Streams and what makes them speak.

    Attributes:
        wakeup: Wakes it.
        arrivals: Sessions that are being opened; those who begin wait for them a moment.
        streams: Everyone who speaks or waits, in the order in which they get a slot; under `lock`.
        sounding: What is being decoded, and for whom.
        closed: Set by anyone to end the loop.
        broken: What ended the loop, if it was a bug.
    """

    def __init__(self, backend: Backend, prompt_builder: PromptBuilder, vocoder: Vocoder) -> None:
        self.backend = backend
        self.prompt_builder = prompt_builder
        self.vocoder = vocoder
        self.wakeup = Wakeup()
        self.arrivals = Arrivals()
        self.lock = threading.Lock()
        self.streams: list[Stream] = []
        self.closed = False
        self.broken: BaseException | None = None
        self.free = list(range(backend.num_slots))
        self.sounding = DecodePipeline(vocoder)

    def stop(self) -> None:
        """Ends the loop after the frame at hand; may be called from a finaliser."""
        self.closed = True
        self.interrupt()

    def interrupt(self) -> None:
        """Has the loop look for news after the frame at hand; may be called from a finaliser."""
        self.backend.interrupt()
        self.wakeup.set()

    @torch.inference_mode()
    def run(self) -> None:
        """Takes turns until the loop is stopped; then nobody is left waiting."""
        try:
            while True:
                self.wakeup.clear()
                self.backend.clear_interrupt()
                if self.closed:  # looked at after the ring that tells of it
                    break
                if not self._turn():
                    held_up = any(stream.waiting for stream in self._everyone())
                    self.wakeup.wait(_PATIENCE if held_up else None)
        except BaseException as error:  # a bug: no session may hang because of it
            self.broken = error
        self.closed = True
        for stream in self._everyone():
            with suppress(Exception):  # everyone is told, whatever the backend says
                self._finish(stream, "error" if self.broken else "cancelled", self.broken)

    def _everyone(self) -> list[Stream]:
        with self.lock:
            return list(self.streams)

    def _turn(self) -> bool:
        """One turn; whether anything moved."""
        gone = [stream for stream in self._everyone() if stream.abandoned]
        if gone:
            self.sounding.deliver()  # before anybody takes the slots that are being decoded
        for stream in gone:
            self._guarded(stream, partial(self._finish, reason="cancelled"))
        for stream in self._everyone():
            self._guarded(stream, self._listen)
        in_line = self._seat()
        streams = self._everyone()
        moving = [s for s in streams if s.movable]
        self._step(moving, 1 if in_line else min((s.until_due for s in moving), default=0))
        due = [s for s in streams if s.due]
        if due or not moving:
            self.sounding.deliver()  # else it is done beside the next step
        self.sounding.decode(due)
        ended = [s for s in streams if s.utterance is not None and s.utterance.over is not None]
        if ended:
            self.sounding.deliver()
        for stream in ended:
            self._guarded(stream, self._end_piece)
        return bool(moving or ended)

    def _guarded(self, stream: Stream, act: Callable[[Stream], object]) -> None:
        """Does something for one stream; what goes wrong ends that stream alone."""
        try:
            act(stream)
        except Exception as error:
            self._fail(stream, error)

    def _fail(self, stream: Stream, error: Exception) -> None:
        """Ends a stream, after the frames that it has made already."""
        if stream.utterance is None:
            self._finish(stream, "error", error)
        else:
            stream.utterance.fail(error)

    def _listen(self, stream: Stream) -> None:
        """Hands over the text that has arrived, or finishes a stream that has said all."""
        if stream.utterance is None:
            with stream.script.lock:
                done = stream.script.done
            if done:
                self._finish(stream, stream.reason)
        elif stream.slot is not None:
            self._feed(stream, stream.utterance)

    def _seat(self) -> bool:
        """Gives slots to those who can use them, suspended ones before new ones.

        New ones begin together, so that their prompts share passes and nobody's first chunk waits
        for another's frame: also those who come while the first prompts run. If many begin, some go
        ahead, or else the device would have nothing to do until all prompts are built. But whoever
        speaks already waits meanwhile, with little more than a frame (80 ms) in his reader's hands:
        so there is a frame for all after a suspended one (it is copied from the host's memory), and
        after `_PROMPTS` positions (10 ms on an H200, 0.6B) beside what prompts have in common,
        which is run once.

        Returns:
            Whether somebody else may get one in the next turn, and should not wait for it long.
        """
        positions, most = 0, _AHEAD
        while True:
            streams = self._everyone()
            waiting = sorted((s for s in streams if s.waiting), key=lambda s: s.utterance is None)
            if waiting and not self.free:
                self._make_room(streams)
            beginning: list[tuple[Stream, Prompt]] = []
            suspended = False
            while waiting and self.free and positions < most and not suspended:
                stream = waiting.pop(0)
                suspended = stream.utterance is not None
                if suspended:
                    self._guarded(stream, self._go_on)
                elif prompt := self._prompt(stream):
                    stream.slot = self.free.pop(0)
                    beginning.append((stream, prompt))
                    positions += len(prompt.prefill) - prompt.num_common
            self._begin(beginning)
            if suspended or not beginning or not self.free or positions >= _PROMPTS:
                return bool(waiting and self.free)
            self.sounding.deliver()
            if not waiting:
                self.arrivals.wait(_COURTESY)  # the device has prompts to run
            most = _PROMPTS

    def _make_room(self, streams: Sequence[Stream]) -> None:
        """Suspends the one that has stalled longest, if any has for too long."""
        stalled = [s for s in streams if s.stalled(_PATIENCE)]
        if stalled:
            self.sounding.deliver()
            longest = min(speaking(stalled), key=lambda pair: pair[1].moved)
            self._guarded(longest[0], self._suspend)

    def _suspend(self, stream: Stream) -> None:
        slot, u = self._slot(stream), stream.utterance
        assert u is not None
        u.suspended = self.backend.swap_out(slot)
        u.sound = self.vocoder.save_slot(slot)
        stream.slot = None
        self.free.append(slot)

    def _go_on(self, stream: Stream) -> None:
        """Lets a suspended stream go on."""
        u = stream.utterance
        assert u is not None and u.suspended is not None
        stream.slot = self.free.pop(0)
        self.backend.swap_in(stream.slot, u.suspended)
        self.vocoder.load_slot(stream.slot, u.sound)
        u.suspended = u.sound = None
        self._feed(stream, u)

    def _prompt(self, stream: Stream) -> Prompt | None:
        """The prompt of a stream's next piece, if enough of its text is known and it fits."""
        _, ids, ended = stream.text()
        try:
            prompt = self.prompt_builder.build(stream.prefix, ids, stream.layout, ended=ended)
            if prompt is not None and len(prompt.prefill) >= self.backend.max_positions:
                raise SynthesisError(
                    f"The prompt takes {len(prompt.prefill)} positions and a slot has "
                    f"{self.backend.max_positions}: "
                    "use a shorter reference recording or instruction."
                )
        except Exception as error:
            self._fail(stream, error)
            return None
        return prompt

    def _begin(self, beginning: Sequence[tuple[Stream, Prompt]]) -> None:
        """Runs prompts together; if that fails, each alone, to find the culprit."""
        if not beginning:
            return
        try:
            self.backend.prefill([self._start(stream, prompt) for stream, prompt in beginning])
        except Exception as error:
            if len(beginning) == 1:
                self._fail(beginning[0][0], error)
                return
            for one in beginning:
                self._begin([one])
            return
        for stream, prompt in beginning:
            self._guarded(stream, partial(self._begun, prompt=prompt))

    def _start(self, stream: Stream, prompt: Prompt) -> PrefillRequest:
        sampling = stream.sampling.next_seed(stream.tries)
        return PrefillRequest(
            self._slot(stream), prompt.prefill, sampling, stream.draws, prompt.num_common
        )

    def _begun(self, stream: Stream, prompt: Prompt) -> None:
        """What follows a prompt: the sound's start, a long transcript's rest, the text so far."""
        self.vocoder.load_slot(self._slot(stream), stream.start)
        piece, _, _ = stream.text()
        assert piece is not None
        self.backend.feed(self._slot(stream), prompt.leading_text, prompt.text_complete)
        cap = min(stream.sampling.max_frames, self.backend.max_positions - len(prompt.prefill))
        times = stream.times(prompt.text_start, self.vocoder.sample_rate)
        progress = prompt.num_tokens, len(prompt.leading_text), prompt.text_complete
        stream.utterance = u = Segment(piece, cap, *progress, times, stream.seconds)
        self._feed(stream, u)

    def _slot(self, stream: Stream) -> int:
        assert stream.slot is not None
        return stream.slot

    def _feed(self, stream: Stream, u: Segment) -> None:
        """Hands over new text; its end goes in exactly once."""
        _, ids, ended = stream.text()
        new = ids[u.tokens :]
        if u.closed or not (new or ended):
            return
        vectors = self.prompt_builder.embed_text(new)
        if ended:
            vectors = torch.cat([vectors, self.prompt_builder.eos])
        self.backend.feed(self._slot(stream), vectors, ended)
        u.tokens += len(new)
        u.fed += len(vectors)
        u.closed = ended

    def _step(self, moving: Sequence[Stream], frames: int) -> None:
        """Makes frames for each stream; if that fails, one for each alone, to find the culprit.

        Beside it, what was decoded before is delivered and texts are read: the device need not wait
        for that.
        """
        if not moving:
            return
        try:
            slots = [self._slot(stream) for stream in moving]
            beside = partial(self._meanwhile, moving), partial(self.sounding.expect, moving)
            made = self.backend.step(slots, frames, *beside)
        except DeviceError as error:
            self.sounding.settle(failed=True)
            for stream in moving:
                self._fail(stream, error)
        except Exception as error:
            self.sounding.settle(failed=True)
            if (len(moving), frames) == (1, 1):
                self._fail(moving[0], error)
                return
            for stream in moving:
                self._step([stream] if stream.movable else [], 1)
        else:
            for (_, u), new in zip(speaking(moving), made, strict=True):
                if u.over is None:  # or it ran away in what was delivered meanwhile
                    u.take(new)
            self.sounding.settle()

    def _meanwhile(self, moving: Sequence[Stream]) -> None:
        """Beside the device's work: it does not wait for this, and nothing here raises."""
        self.sounding.deliver()
        for stream in moving:
            self._guarded(stream, Stream.read_text)

    def _end_piece(self, stream: Stream) -> None:
        """Leaves a piece that was spoken, and goes to the end of the line for the next one."""
        u = stream.utterance
        assert u is not None
        if u.over == "error":
            self._finish(stream, "error", u.error)
            return
        stream.end_piece(self.vocoder.sample_rate)
        self._release(stream)
        with self.lock:
            self.streams.remove(stream)
            self.streams.append(stream)

    def _release(self, stream: Stream) -> None:
        if stream.slot is not None:
            slot, stream.slot = stream.slot, None
            self.free.append(slot)
            self.backend.release(slot)

    def _finish(
        self, stream: Stream, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """Says the last word to a stream and forgets it."""
        with self.lock:
            if stream not in self.streams:
                return
            self.streams.remove(stream)
        with stream.script.lock:
            stream.script.close()
        with suppress(RuntimeError):  # the reader's event loop is gone: nobody is left to tell
            stream.flush()
            stream.mailbox.put(Finish(reason, stream.frames, _failure(error)))
        stream.utterance = None
        self._release(stream)


def _failure(error: BaseException | None) -> SynthesisError | None:
    """What a reader is told, with its cause."""
    if error is None or isinstance(error, SynthesisError):
        return error
    failure = SynthesisError(f"Speaking failed: {str(error) or type(error).__name__}")
    failure.__cause__ = error
    return failure
