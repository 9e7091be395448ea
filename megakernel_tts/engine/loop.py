"""The engine's main loop: text in, frames out, for all streams together.

One thread owns the backend, the vocoder and the state of every stream. An iteration delivers, ends
finished segments, swaps out a stalled stream, feeds text and assigns slots to waiting streams. It
then chooses the size of each stream's next chunk, steps the streams that can move until the first
chunk is due, and starts to decode the chunks that are due. Streams join and leave
between steps. A new session, a cancellation, or text for a stream that lacks it ends the step with
the frame under way.

Delivery. The decode pipeline has at most one batch in flight. It is delivered

- beside the next work of the device, a prefill or a step, so that the device does not wait for it;
- at the start of an iteration, if a stream may leave its slot in it, or if the iteration before
  launched no step that could hide it.

Hence a slot never changes hands while its codes are being decoded (asserted in `Scheduler`).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from megakernel_common.process import OwnerProcess
from megakernel_common.wakeup import Wakeup
from megakernel_tts.backends.protocol import Backend
from megakernel_tts.codec.vocoder import Vocoder
from megakernel_tts.engine.decoding import DecodePipeline
from megakernel_tts.engine.feeding import TextFeeder
from megakernel_tts.engine.pending_opens import PendingOpens
from megakernel_tts.engine.scheduler import Scheduler, SchedulingPolicy
from megakernel_tts.engine.stream import Stream
from megakernel_tts.errors import DeviceError
from megakernel_tts.session import FinishReason
from megakernel_tts.text.prompt import Prompt, PromptBuilder


class Loop:
    """The engine thread's work.

    Attributes:
        wakeup: Wakes the loop while it waits.
        pending_opens: Sessions that are being opened.
        scheduler: Streams and slots.
        decoding: Codes in the codec.
        closed: Ends the loop; set by any thread.
        broken: The error that ended the loop, if it was a defect.
    """

    def __init__(
        self,
        backend: Backend,
        prompt_builder: PromptBuilder,
        vocoder: Vocoder,
        policy: SchedulingPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the loop; `run` runs it.

        Args:
            backend: Makes frames.
            prompt_builder: Builds prompts.
            vocoder: Decodes frames.
            policy: Scheduling limits; the defaults if None.
            clock: Returns the time in seconds.
        """
        self.wakeup = Wakeup()
        self.pending_opens = PendingOpens()
        self.scheduler = Scheduler(backend, vocoder, policy or SchedulingPolicy(), clock)
        self.decoding = DecodePipeline(vocoder)
        self.closed = False
        self.broken: BaseException | None = None
        self._process = OwnerProcess()
        self._backend = backend
        self._feeder = TextFeeder(backend, prompt_builder, vocoder)
        self._stepped = False  # in the last iteration

    def stop(self) -> None:
        """Ends the loop after the frame under way. Takes no lock: a finaliser may call it."""
        self.closed = True
        self.interrupt()

    def interrupt(self) -> None:
        """Has the loop begin an iteration after the frame under way. Takes no lock.

        Does nothing in a forked process, where finalisers may call it and the GPU's memory is not.
        """
        if self._process.is_current:
            self._backend.interrupt()
            self.wakeup.set()

    @torch.inference_mode()
    def run(self) -> None:
        """Runs iterations until the loop is stopped, then finishes every stream."""
        try:
            while True:
                self.wakeup.clear()
                self._backend.clear_interrupt()
                if self.closed:  # read after the wake-up that announces it was cleared
                    break
                if not self._iterate():
                    timeout_s = self.scheduler.policy.stall_timeout_s
                    self.wakeup.wait(timeout_s if self.scheduler.waiting else None)
        except BaseException as error:  # a defect must not leave a session waiting
            self.broken = error
        self.closed = True
        self.decoding.discard()
        for stream in self.scheduler.streams:
            with suppress(Exception):  # every session gets its finish, even if a slot is not freed
                self._finish(stream, "error" if self.broken else "cancelled", self.broken)

    def _iterate(self) -> bool:
        """Delivers if required, ends segments, swaps, feeds, admits, steps and decodes.

        Returns:
            Whether the next iteration has work without a wake-up.
        """
        self._deliver_if_required()
        # A stream that another thread cancels or opens after this check waits for an iteration.
        if not self.decoding.in_flight:
            self._end_segments()
            self._swap_out_one()
        self._feed_or_finish()
        others_wait = self._admit()
        streams = self.scheduler.streams
        moving = [stream for stream in streams if stream.movable]
        now_s = self.scheduler.clock()
        for stream in moving:
            stream.plan_chunk(now_s)
        self._step(moving, self.scheduler.num_frames(moving, others_wait=others_wait))
        self.decoding.decode([stream for stream in streams if stream.due])
        self._stepped = bool(moving)
        return self._stepped or self.decoding.in_flight or bool(self.scheduler.leaving)

    def _deliver_if_required(self) -> None:
        """Delivers the batch in flight if no device work overlaps it, or a slot may become free."""
        scheduler = self.scheduler
        if not self._stepped or scheduler.leaving or scheduler.swap_candidate is not None:
            self.decoding.deliver()

    def _beside_device_work(self, moving: Sequence[Stream] = ()) -> None:
        """Runs while the device computes: delivers the batch in flight and reads new text."""
        self.decoding.deliver()
        for stream in moving:
            self._isolate(stream, Stream.read_text)

    def _end_segments(self) -> None:
        """Ends streams that were abandoned or failed, and segments that are over."""
        for stream in self.scheduler.leaving:
            self._isolate(stream, self._end_segment)

    def _end_segment(self, stream: Stream) -> None:
        if stream.abandoned:
            self._finish(stream, "cancelled")
        elif stream.active_segment.outcome == "error":
            self._finish(stream, "error", stream.active_segment.error)
        else:
            stream.end_segment()
            self.scheduler.release(stream)
            self.scheduler.requeue(stream)

    def _swap_out_one(self) -> None:
        """Swaps out the stream whose slot another needs, if there is one."""
        if (stream := self.scheduler.swap_candidate) is not None:
            self._isolate(stream, self.scheduler.swap_out)

    def _feed_or_finish(self) -> None:
        """Feeds the text that has arrived; finishes streams whose whole text was spoken."""
        for stream in self.scheduler.streams:
            if stream.segment is None:
                self._isolate(stream, Stream.deliver_breaks)
            if stream.exhausted:
                self._isolate(stream, partial(self._finish, reason=stream.reason))
            elif stream.slot is not None and not stream.leaving:
                self._isolate(stream, self._feeder.feed)

    def _admit(self) -> bool:
        """Assigns free slots to waiting streams: one that was swapped out, or as many new ones.

        New streams begin together: their prompts share prefills, and their first frames share
        steps. That includes streams opened while the first prompts run. A small first prefill keeps
        the device busy while the other prompts are built. Streams that speak already wait during
        all of this with little more than one frame (80 ms) of audio unread. So every stream gets a
        frame after one stream was swapped in, or after `prefill_budget_positions`.

        Returns:
            Whether a waiting stream can get a slot in the next iteration.
        """
        scheduler, policy = self.scheduler, self.scheduler.policy
        num_positions, max_positions = 0, policy.first_prefill_positions
        while True:
            waiting, swapped_in = scheduler.waiting, False
            beginning: list[tuple[Stream, Prompt]] = []
            while waiting and scheduler.num_free_slots and num_positions < max_positions:
                stream = waiting.pop(0)
                if stream.segment is not None:
                    self._isolate(stream, self._swap_in)
                    swapped_in = True
                    break
                if prompt := self._build_prompt(stream):
                    scheduler.acquire(stream)
                    beginning.append((stream, prompt))
                    num_positions += len(prompt.prefill) - prompt.num_common
            self._prefill(beginning)
            budget_left = num_positions < policy.prefill_budget_positions
            if swapped_in or not beginning or not scheduler.num_free_slots or not budget_left:
                scheduler.note_waiting(waiting)
                return bool(waiting and scheduler.num_free_slots)
            self._beside_device_work()
            if not waiting:
                self.pending_opens.wait(policy.join_window_s)
            max_positions = policy.prefill_budget_positions

    def _swap_in(self, stream: Stream) -> None:
        self.scheduler.swap_in(stream)
        self._feeder.feed(stream)

    def _build_prompt(self, stream: Stream) -> Prompt | None:
        """Returns the prompt of a stream's next segment, unless it fails or lacks text."""
        try:
            return self._feeder.build_prompt(stream)
        except Exception as error:
            self._fail(stream, error)
            return None

    def _prefill(self, beginning: Sequence[tuple[Stream, Prompt]]) -> None:
        """Runs prompts together; if that fails, each alone, to find the stream at fault."""
        if not beginning:
            return
        try:
            self._feeder.prefill(beginning)
        except Exception as error:
            if len(beginning) == 1:
                self._fail(beginning[0][0], error)
                return
            for one in beginning:
                self._prefill([one])
            return
        now_s = self.scheduler.clock()
        for stream, prompt in beginning:
            begin = partial(self._feeder.begin_segment, prompt=prompt, now_s=now_s)
            self._isolate(stream, begin)

    def _step(self, moving: Sequence[Stream], num_frames: int) -> None:
        """Makes frames for streams; if that fails, one for each alone, to find the one at fault."""
        if not moving:
            return
        overlap = partial(self._beside_device_work, moving)
        on_last_frame = partial(self.decoding.begin_early, moving)
        try:
            slots = [stream.active_slot for stream in moving]
            made = self._backend.step(slots, num_frames, overlap, on_last_frame)
        except DeviceError as error:
            self.decoding.confirm_early(step_failed=True)
            for stream in moving:
                self._fail(stream, error)
        except Exception as error:
            self.decoding.confirm_early(step_failed=True)
            if len(moving) == num_frames == 1:
                self._fail(moving[0], error)
                return
            for stream in moving:
                self._step([stream] if stream.movable else [], 1)
        else:
            now_s = self.scheduler.clock()
            for stream, frames in zip(moving, made, strict=True):
                if stream.active_segment.outcome is None:  # not ended by what was delivered
                    stream.add_frames(frames, now_s)
            self.decoding.confirm_early()

    def _isolate(self, stream: Stream, action: Callable[[Stream], object]) -> None:
        """Runs an action for one stream; an error ends that stream and no other."""
        try:
            action(stream)
        except Exception as error:
            self._fail(stream, error)

    def _fail(self, stream: Stream, error: Exception) -> None:
        """Ends a stream after the frames that it has made."""
        if stream.segment is None:
            self._finish(stream, "error", error)
        else:
            stream.segment.fail(error)

    def _finish(
        self, stream: Stream, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """Ends a stream at once: delivers its last event and frees its slot."""
        if self.scheduler.remove(stream):
            stream.finish(reason, error)
            self.scheduler.release(stream)
