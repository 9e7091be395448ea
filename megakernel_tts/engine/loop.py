"""The engine's main loop: text in, frames out, for all streams together.

One thread owns the backend, the vocoder and the state of every stream. An iteration delivers, ends
finished segments, swaps out a stream whose slot another one needs, feeds text, assigns slots to
waiting streams and runs prefill chunks within a budget. It then chooses the size of each stream's
next chunk, steps the streams that can move until their chunks are due or a playback deadline is
near (`deadlines`), and starts to decode the chunks that are due. If a stream begins and they can
wait, they are decoded behind its first chunk, before the next step of other streams. Streams join
and leave between steps. A new session, a cancellation, or text for a stream that lacks it ends the
step with the frame under way (`Interrupts`), and so does recognition on the same device, which then
goes first (`DeviceArbiter`). While many streams can make a frame, steps of two frames do not end
for sessions that are opened, cancelled, or go on without a slot.

Delivery. The decode pipeline has at most one batch in flight. It is delivered

- beside the next work of the device, a prefill or a step, so that the device does not wait for it
  (before a prefill, if the backend runs it on this thread);
- at the start of an iteration, if a stream must leave its slot in it, if there is no step that
  could hide the delivery, or if few streams are open and one of them waits for its first chunk.

A segment that is over ends after the delivery of its last chunk, thus beside a step if its slot is
not needed at once. Prompts of streams that get slots next are built beside a step, too.

A slot is not assigned to another stream while its codes are being decoded (asserted in `Stream`).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from megakernel_common.device_arbiter import DeviceArbiter, LongWork
from megakernel_common.events import ReaderWakeups
from megakernel_common.wakeup import Wakeup
from megakernel_tts.backends.protocol import Backend
from megakernel_tts.codec.vocoder import Vocoder
from megakernel_tts.engine.decoding import DecodePipeline
from megakernel_tts.engine.feeding import TextFeeder
from megakernel_tts.engine.interrupts import Interrupts
from megakernel_tts.engine.lock_pauses import LockPauses
from megakernel_tts.engine.pending_opens import PendingOpens
from megakernel_tts.engine.scheduler import Scheduler, SchedulingPolicy
from megakernel_tts.engine.stream import Stream
from megakernel_tts.engine.work_times import IterationWork
from megakernel_tts.errors import DeviceError
from megakernel_tts.session import FinishReason
from megakernel_tts.text.prompt import PromptBuilder


class Loop:
    """The engine thread's work.

    Attributes:
        wakeup: Wakes the loop while it waits.
        interrupts: Ends steps early.
        pending_opens: Sessions that are being opened.
        reader_wakeups: Wakes the readers of the sessions: when a batch has been delivered, before
            the device's work, and at the end of an iteration.
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
        arbiter: DeviceArbiter,
        policy: SchedulingPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the loop; `run` runs it.

        Args:
            backend: Makes frames.
            prompt_builder: Builds prompts.
            vocoder: Decodes frames.
            arbiter: Of the backend's device.
            policy: Scheduling limits; the defaults if None.
            clock: Returns the time in seconds.
        """
        self.wakeup = Wakeup()
        self.interrupts = Interrupts(backend, self.wakeup.set)
        self.pending_opens = PendingOpens(self.wakeup.set)
        self.reader_wakeups = ReaderWakeups()
        self.scheduler = Scheduler(backend, vocoder, policy or SchedulingPolicy(), clock)
        self._pauses = LockPauses(clock)
        self.decoding = DecodePipeline(vocoder, self.reader_wakeups.wake, self._pauses)
        self.closed = False
        self.broken: BaseException | None = None
        self._backend = backend
        self._feeder = TextFeeder(backend, prompt_builder, vocoder)
        # From the first prefill or frame of an iteration to the end of its step.
        self._device_work = LongWork(arbiter, self.interrupts.interrupt)
        self._stepped = False  # in the last iteration
        self._work = IterationWork()

    def stop(self) -> None:
        """Ends the loop after the frame under way. Takes no lock: a finaliser may call it."""
        self.closed = True
        self.interrupts.interrupt()

    @torch.inference_mode()
    def run(self) -> None:
        """Runs iterations until the loop is stopped, then finishes every stream."""
        try:
            while True:
                self.wakeup.clear()
                self.interrupts.clear()
                if self.closed:  # read after the wake-up that announces it was cleared
                    break
                has_work = self._iterate()
                self.reader_wakeups.wake()
                if not has_work:
                    if self.pending_opens.count:
                        with suppress(Exception):  # the prompt that follows reports it
                            self._backend.prepare()
                    timeout_s = self.scheduler.policy.stall_timeout_s
                    self.wakeup.wait(timeout_s if self.scheduler.waiting else None)
                    self._pauses.restart()
        except BaseException as error:  # a defect must not leave a session waiting
            self.broken = error
        self.closed = True
        self._device_work.end()
        self.decoding.discard()
        for stream in self.scheduler.streams:
            with suppress(Exception):  # every session gets its finish, even if a slot is not freed
                self._finish(stream, "error" if self.broken else "cancelled", self.broken)
        self.reader_wakeups.wake()

    def _iterate(self) -> bool:
        """Delivers if required, ends segments, swaps, feeds, admits, steps and decodes.

        Returns:
            Whether the next iteration has work without a wake-up.
        """
        scheduler, begin_s = self.scheduler, self.scheduler.clock()
        self._work = IterationWork()
        self._pauses.few_open = scheduler.few_open
        self._deliver_if_required()
        # A stream that another thread cancels or opens after this check waits for an iteration.
        if not self.decoding.in_flight:
            self._end_segments()
            if (stream := scheduler.choose_swap()) is not None:  # another needs its slot
                self._isolate(stream, scheduler.swap_out)
        self._feed_or_finish()
        others_wait = self._admit()
        movable = self._plan_chunks()
        self._step_until_due(movable, others_wait=others_wait)
        self._end_device_work()  # a prefill without a step, or a step that failed
        due = [stream for stream in scheduler.streams if stream.due]
        if not scheduler.postpone_chunks(due, movable, first_chunk=self.decoding.has_first_chunk):
            self.decoding.decode(due)
        self._stepped = bool(movable)
        self._work.total_s = scheduler.clock() - begin_s
        scheduler.deadlines.times.add(self._work)
        has_work = self._stepped or self.decoding.in_flight or scheduler.frame_lacks_memory
        return has_work or bool(scheduler.prefilling or scheduler.leaving)

    def _plan_chunks(self) -> list[Stream]:
        """Sizes the next chunks of the streams that can make a frame, and returns these streams."""
        movable = self.scheduler.reserve_frames()
        now_s = self.scheduler.clock()
        for stream in movable:
            stream.plan_chunk(now_s)
            self._pauses.pause_if_due()
        return movable

    def _step_until_due(self, movable: Sequence[Stream], *, others_wait: bool) -> None:
        """Steps as many streams as a launch takes until chunks are due or a deadline is near.

        Args:
            movable: Streams that can make a frame, whose chunks are planned.
            others_wait: Whether another stream may start after the step, which is then short.
        """
        deadlines, now_s = self.scheduler.deadlines, self.scheduler.clock()
        chosen, left_out = deadlines.choose(movable, now_s, others_wait=others_wait)
        postponed = self.scheduler.postponed  # they wait for a step of first frames only
        if postponed and not all(stream.begins_speech for stream in chosen):
            self.decoding.decode(postponed)
            movable, now_s = self._plan_chunks(), self.scheduler.clock()
            chosen, left_out = deadlines.choose(movable, now_s, others_wait=others_wait)
        num_frames = deadlines.plan_step(chosen, left_out, now_s, others_wait=others_wait)
        deadlines.shorten_chunks(chosen, num_frames, now_s)
        self._work.num_streams = len(chosen)
        self._work.only_first_frames = bool(left_out) and all(s.begins_speech for s in chosen)
        self.interrupts.step_is_shared = num_frames <= deadlines.shared_frames(len(movable))
        self._work.num_frames = self._step(chosen, num_frames)
        self._work.step_s = self.scheduler.clock() - now_s

    def _deliver_if_required(self) -> None:
        """Delivers the batch in flight if it cannot wait until the device has work."""
        if self.scheduler.few_open and self.decoding.has_first_chunk:
            if self.decoding.deliver():
                self._pauses.pause_for_reader()
        elif not self._stepped or self.scheduler.must_free_slot:
            self.decoding.deliver()

    def _beside_device_work(self, moving: Sequence[Stream] = ()) -> None:
        """Runs while the device computes: delivers the batch in flight and reads new text."""
        self._pauses.pause_if_due()
        if self.decoding.deliver():
            self._pauses.pause()  # for the readers that were woken
        for stream in moving:
            self._isolate(stream, Stream.read_text)

    def _beside_step(self, moving: Sequence[Stream]) -> None:
        """Runs while the device makes frames: what would delay the next iteration, too."""
        self._beside_device_work(moving)
        stepped = set(moving)
        for stream in self.scheduler.leaving:
            if stream not in stepped and stream.delivered:
                self._isolate(stream, self._end_segment)
                if stream.exhausted:
                    self._isolate(stream, partial(self._finish, reason=stream.reason))
        self._build_prompts()
        self.reader_wakeups.wake()

    def _build_prompts(self) -> None:
        """Builds the prompts of the streams that get slots in the next iteration."""
        num_left = self.scheduler.policy.prefill_budget_positions
        for stream in self.scheduler.waiting[: self.scheduler.num_free_slots]:
            if num_left <= 0 or stream.segment is not None:
                return
            if stream.prompt is None:
                self._isolate(stream, self._feeder.build_prompt)
            if stream.prompt is not None:
                num_left -= stream.num_left_to_prefill

    def _end_segments(self) -> None:
        """Ends streams that were abandoned, and segments whose last frame was delivered."""
        for stream in self.scheduler.leaving:
            if stream.abandoned or stream.delivered:
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

    def _feed_or_finish(self) -> None:
        """Feeds the text that has arrived; finishes streams whose whole text was spoken."""
        for stream in self.scheduler.streams:
            if stream.prompt is not None:
                continue
            if stream.segment is None:
                self._isolate(stream, Stream.deliver_breaks)
            if stream.exhausted:
                self._isolate(stream, partial(self._finish, reason=stream.reason))
            elif stream.slot is not None and not stream.leaving:
                self._isolate(stream, self._feeder.feed)
        self.reader_wakeups.wake()

    def _admit(self) -> bool:
        """Assigns free slots to waiting streams: one that was swapped out, or as many new ones.

        New streams begin together: their prompts share prefills, and their first frames share
        steps. That includes streams opened while the first prompts run. The first prefill, of the
        prompts that were built beside a step or else a small one, keeps the device busy while the
        next prompts are built, and so does each of the prefills of a burst. Streams that speak
        already wait during all of this with little more than one frame (80 ms) of audio unread. So
        every stream gets a frame after one stream was swapped in, or after the prefill budget. A
        prompt that exceeds the budget continues in the next iteration.

        Returns:
            Whether another stream may start in the next iteration.
        """
        scheduler, policy = self.scheduler, self.scheduler.policy
        self.interrupts.note_reading()
        prefilling, waiting = scheduler.prefilling, scheduler.waiting
        budget = 0
        if prefilling or (waiting and scheduler.num_free_slots):
            now_s = scheduler.clock()
            # A stream that lacks text, or is between two segments, may have audio that is played.
            speaks = any(s.segment is not None or s.deadline_s >= now_s for s in scheduler.streams)
            with_deadlines = [*self._plan_chunks(), *scheduler.postponed]
            budget = scheduler.deadlines.prefill_budget(with_deadlines, now_s, is_burst=not speaks)
        num_built = sum(s.num_left_to_prefill for s in waiting if s.prompt is not None)
        max_positions = min(max(policy.first_prefill_positions, num_built), budget)
        swapped_in = False
        while self._work.num_positions < budget and not swapped_in:
            num_left = max_positions - self._work.num_positions
            beginning, swapped_in = self._assign_slots(prefilling, waiting, num_left)
            self._prefill(beginning, budget - self._work.num_positions)
            is_full = self._work.num_positions >= budget or not scheduler.num_free_slots
            if not beginning or is_full or self._device_work.is_awaited:
                break
            self._beside_device_work()
            if not scheduler.waiting:
                self.pending_opens.wait(policy.join_window_s)
                self._pauses.restart()
            self.interrupts.note_reading()
            prefilling, waiting = scheduler.prefilling, scheduler.waiting
            max_positions = min(budget, self._work.num_positions + policy.prefill_budget_positions)
        scheduler.note_waiting()
        return bool(scheduler.prefilling or scheduler.can_begin)

    def _assign_slots(
        self, prefilling: Sequence[Stream], waiting: Sequence[Stream], max_positions: int
    ) -> tuple[list[Stream], bool]:
        """Assigns free slots in the order of the queue, up to a stream that was swapped out.

        A stream that lacks memory keeps those behind it waiting.

        Args:
            prefilling: Streams whose prompts are being run.
            waiting: The queue.
            max_positions: Positions of prompts after which no other stream gets a slot.

        Returns:
            The streams whose prompts are to be run, and whether a stream was swapped in.
        """
        scheduler, beginning = self.scheduler, list(prefilling)
        num_positions = sum(stream.num_left_to_prefill for stream in beginning)
        for stream in waiting:
            if not scheduler.num_free_slots or num_positions >= max_positions:
                break
            if stream.segment is not None:
                if not scheduler.acquire(stream, stream.segment.num_next_positions):
                    break
                self._isolate(stream, self._swap_in)
                return beginning, True
            if stream.prompt is None:  # else it was built beside a step, or lacked memory before
                self._isolate(stream, self._feeder.build_prompt)
            if stream.prompt is not None:
                if not scheduler.acquire(stream, stream.prompt.num_positions):
                    break
                beginning.append(stream)
                num_positions += stream.num_left_to_prefill
        return beginning, False

    def _swap_in(self, stream: Stream) -> None:
        self.scheduler.swap_in(stream)
        self._feeder.feed(stream)

    def _prefill(self, beginning: Sequence[Stream], budget: int) -> None:
        """Runs prompts together; if that fails, each solo, to find the stream at fault."""
        if not beginning:
            return
        if self._backend.blocking:
            self.decoding.deliver()
        self._begin_device_work()
        try:
            self._work.num_positions += self._feeder.prefill(beginning, budget)
        except Exception as error:
            if len(beginning) == 1:
                self._fail(beginning[0], error)
                return
            for stream in beginning:
                self._prefill([stream], budget)
            return
        now_s = self.scheduler.clock()
        for stream in beginning:
            if stream.num_prefilled == stream.active_prompt.num_positions:
                self._isolate(stream, partial(self._feeder.begin_segment, now_s=now_s))

    def _step(self, moving: Sequence[Stream], num_frames: int) -> int:
        """Makes frames for streams; if that fails, one for each solo, to find the one at fault.

        Returns:
            The number of frames of the stream that made the most.
        """
        if not moving:
            return 0
        overlap = partial(self._beside_step, moving)
        on_last_frame = partial(self.decoding.begin_early, moving)
        self._begin_device_work()
        try:
            slots = [stream.active_slot for stream in moving]
            # A long step without a free slot ends early: the next iteration may choose a swap.
            if self.interrupts.step_is_shared or not self.scheduler.lacks_slot:
                self.interrupts.drop_opened()
            made = self._backend.step(slots, num_frames, overlap, on_last_frame)
        except DeviceError as error:
            self.decoding.confirm_early(step_failed=True)
            for stream in (*moving, *self.scheduler.prefilling):  # their prefills may be lost
                self._fail(stream, error)
            return 0
        except Exception as error:
            self.decoding.confirm_early(step_failed=True)
            if len(moving) == num_frames == 1:
                self._fail(moving[0], error)
                return 0
            return sum(self._step([stream] if stream.movable else [], 1) for stream in moving)
        self._pauses.restart()
        self._end_device_work()  # the codec may still run: recognition's kernels precede its next
        now_s = self.scheduler.clock()
        for stream, frames in zip(moving, made, strict=True):
            if stream.active_segment.outcome is None:  # not ended by what was delivered
                stream.add_frames(frames, now_s)
            self._pauses.pause_if_due()
        self.decoding.confirm_early()
        return max(frames.codes.shape[0] for frames in made)

    def _begin_device_work(self) -> None:
        """Waits while another engine has short work for the device, and delivers meanwhile."""
        if self._device_work.must_wait:
            self._beside_device_work()
            self._device_work.begin()
            self._pauses.restart()
        else:
            self._device_work.begin()

    def _end_device_work(self) -> None:
        self._device_work.end()
        if self._device_work.must_wait:
            self._pauses.pause_always()  # for the thread that waits for the device

    def _isolate(self, stream: Stream, action: Callable[[Stream], object]) -> None:
        """Runs an action for one stream; an error ends that stream and no other."""
        self._pauses.pause_if_due()
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
