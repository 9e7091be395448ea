"""Which streams have a slot; `deadlines` decides which of them are stepped.

Streams get slots by priority, and of one priority in the order in which they are queued. A stream
that has ended a segment queues for the next one at the end, so that long texts and short ones
alternate. If its audio is nearly played, it comes before streams that have delivered none. A
stalled stream, whose text or reader is late, keeps its slot until another stream needs it. A stream
of low priority keeps it until one of higher priority does. Then its state is swapped out to host
memory, and later swapped in where it stopped.

Slots may share memory (`Backend.reserve`). A stream gets a slot only if memory is left for every
other stream to grow; those behind it in the queue wait as well. If a stream that speaks lacks
memory for its next frame all the same, another is swapped out: of the lowest priority, a stalled
one or else the one whose audio lasts longest. It returns before streams that have not begun. A
solo stream has enough memory for all of its positions, so that none waits for ever.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megakernel_tts.backends.protocol import LOW_LATENCY_STREAMS, Backend
from megakernel_tts.codec.vocoder import Vocoder
from megakernel_tts.engine.deadlines import DeadlineScheduler
from megakernel_tts.engine.segment import SwappedState
from megakernel_tts.engine.stream import Stream


@dataclass(frozen=True)
class SchedulingPolicy:
    """Limits of the engine loop.

    Attributes:
        first_prefill_positions: Positions after which the first prefill of an iteration is
            launched if no prompts are built yet: the device runs it while the others are built.
        prefill_budget_positions: Positions of an iteration's prefills, without those in the prefix
            cache. Streams that speak already wait for no more, and for fewer if one of them would
            miss its deadline. A longer prompt is run in chunks. On an H200 128 take 6 ms (0.6B) or
            10 ms (1.7B).
        burst_budget_positions: The same while no stream speaks. Streams that are opened together
            then make their first frames together. On an H200 64 short prompts take 21 ms (0.6B).
        join_window_s: How long, after the first prefill, streams that begin wait for sessions that
            are being opened.
        stall_timeout_s: How long a stalled stream keeps a slot that another stream needs.
        delivery_s: How long before its deadline a chunk is delivered at the latest: an event loop,
            a server and its front pass it on with delays that vary by so much.
        urgent_audio_s: Seconds of audio that is not played yet, below which a stream between two
            segments gets a slot before streams that have delivered no audio.

    Raises:
        ValueError: `prefill_budget_positions` is less than 1.
    """

    first_prefill_positions: int = 16
    prefill_budget_positions: int = 128
    burst_budget_positions: int = 1024
    join_window_s: float = 5e-4
    stall_timeout_s: float = 1.0
    delivery_s: float = 5e-3
    urgent_audio_s: float = 1.0

    def __post_init__(self) -> None:
        """Checks the budget, without which no prompt would run."""
        if self.prefill_budget_positions < 1:
            raise ValueError(
                f"{self.prefill_budget_positions} positions of prompts between two frames are too "
                "few: use at least 1."
            )


class Scheduler:
    """Streams and slots. The engine thread calls it; `add` and the counts are for any thread.

    Attributes:
        policy: Limits.
        deadlines: Decides which streams are stepped.
        clock: Returns the time in seconds.
        lock: Held while streams are added or removed.
    """

    def __init__(
        self,
        backend: Backend,
        vocoder: Vocoder,
        policy: SchedulingPolicy,
        clock: Callable[[], float],
    ) -> None:
        """Starts with no stream and all slots free."""
        self.policy = policy
        self.deadlines = DeadlineScheduler(
            backend.max_streams,
            policy.prefill_budget_positions,
            policy.burst_budget_positions,
            policy.delivery_s,
        )
        self.clock = clock
        self.lock = threading.Lock()
        self._backend = backend
        self._vocoder = vocoder
        # In the order in which they get slots; replaced under `lock`, so that reading needs none.
        self._streams: tuple[Stream, ...] = ()
        self._free_slots = [*reversed(range(backend.num_slots))]
        # Whether memory was too small, when it was last requested: for the next frame of a stream
        # that speaks, or for the stream at the front of the queue.
        self._frame_lacks_memory = self._slot_lacks_memory = False
        self._postponed: Sequence[Stream] = ()

    # --- streams ---

    @property
    def streams(self) -> Sequence[Stream]:
        """The open streams at present, in the order in which they get slots."""
        return self._streams

    @property
    def num_live(self) -> int:
        """Number of streams that were not abandoned; `lock` must be held."""
        return sum(not stream.abandoned for stream in self._streams)

    def add(self, stream: Stream) -> None:
        """Appends a new stream; `lock` must be held."""
        self._streams = (*self._streams, stream)

    def remove(self, stream: Stream) -> bool:
        """Removes a stream; returns False if it was removed before."""
        with self.lock:
            if stream not in self._streams:
                return False
            self._streams = self._without(stream)
            return True

    def requeue(self, stream: Stream) -> None:
        """Moves a stream to the end of the queue."""
        with self.lock:
            self._streams = (*self._without(stream), stream)

    def _without(self, stream: Stream) -> tuple[Stream, ...]:
        return tuple(other for other in self._streams if other is not stream)

    # --- decisions ---

    @property
    def few_open(self) -> bool:
        """Whether so few streams are open that the time to a first chunk precedes throughput."""
        return len(self._streams) <= LOW_LATENCY_STREAMS

    @property
    def leaving(self) -> list[Stream]:
        """Streams that are to be ended, or whose segment is."""
        return [stream for stream in self.streams if stream.leaving]

    def reserve_frames(self) -> list[Stream]:
        """Reserves memory for next frames; returns the streams that can make one and have it."""
        ready = [stream for stream in self.streams if stream.movable]
        reserve = self._backend.reserve
        movable = [s for s in ready if reserve(s.active_slot, s.active_segment.num_next_positions)]
        self._frame_lacks_memory = len(movable) < len(ready)
        return movable

    @property
    def frame_lacks_memory(self) -> bool:
        """Whether a stream that could make a frame lacked memory for it."""
        return self._frame_lacks_memory

    @property
    def can_begin(self) -> bool:
        """Whether a stream waits, and nothing has kept it from getting a slot."""
        return bool(self._free_slots and not self._slot_lacks_memory and self.waiting)

    def postpone_chunks(
        self, due: Sequence[Stream], movable: Sequence[Stream], *, first_chunk: bool
    ) -> bool:
        """Lets chunks that are due wait for the first chunk of another stream, if they can.

        So they do for a stream that returns to a slot. While no slot is free, or memory is short, a
        stream may be swapped out, whose chunks must have been decoded.

        Args:
            due: Streams with a chunk that is due.
            movable: Streams of which the last step was planned; without one no iteration follows.
            first_chunk: Whether a first chunk is in the codec.

        Returns:
            Whether they wait.
        """
        self._postponed = ()
        lacks_room = not self._free_slots or self._slot_lacks_memory or self._frame_lacks_memory
        if lacks_room or not due or not movable:
            return False
        if not (first_chunk and self.few_open) and not self.waiting:
            return False
        if not self.deadlines.can_postpone(due, len(movable), self.clock()):
            return False
        self._postponed = due
        return True

    @property
    def postponed(self) -> list[Stream]:
        """Streams whose chunks wait since the last iteration, and were not decoded meanwhile."""
        return [stream for stream in self._postponed if stream.due]

    @property
    def lacks_slot(self) -> bool:
        """Whether a stream waits for a slot that another has, or for its memory."""
        return bool((not self._free_slots or self._slot_lacks_memory) and self.waiting)

    def choose_swap(self) -> Stream | None:
        """Returns the stream to swap out, if another needs its slot or its memory.

        For the next frame of another: of the lowest priority, a stalled one or else the one whose
        audio lasts longest, or the last of several. For a stream without a slot: the one stalled
        longest; if there is none, the last one of the lowest priority, if another of higher
        priority waits.
        """
        if self._frame_lacks_memory:
            self.reserve_frames()  # memory may have been freed since
        if self._frame_lacks_memory:
            return max(
                (stream for stream in reversed(self.streams) if stream.speaking),
                key=lambda s: (s.request.priority, s.stalled, s.deadline_s),
            )
        if (self._free_slots and not self._slot_lacks_memory) or not (waiting := self.waiting):
            return None
        streams = self.streams
        limit_s = self.clock() - self.policy.stall_timeout_s
        stalled = [s for s in streams if s.stalled and s.active_segment.last_step_s <= limit_s]
        if stalled:
            return min(stalled, key=lambda s: s.active_segment.last_step_s)
        highest = waiting[0].request.priority
        lower = [s for s in streams if s.request.priority > highest and s.speaking]
        return max(reversed(lower), key=lambda s: s.request.priority, default=None)

    @property
    def must_free_slot(self) -> bool:
        """Whether a stream must leave its slot before the next step."""
        if self.choose_swap() is not None:
            return True
        if not (leaving := self.leaving):
            return False
        if self.lacks_slot or any(stream.abandoned for stream in leaving):
            return True
        return not any(stream.movable for stream in self.streams)  # no step follows

    @property
    def waiting(self) -> list[Stream]:
        """Streams that could use a slot: by priority, swapped out ones and urgent ones first."""
        waiting = [stream for stream in self.streams if stream.waiting]
        if len(waiting) < 2:
            return waiting
        now_s = self.clock()

        def rank(stream: Stream) -> tuple[int, bool, bool]:
            urgent = 0 <= stream.deadline_s - now_s < self.policy.urgent_audio_s
            return stream.request.priority, stream.segment is None, not urgent

        return sorted(waiting, key=rank)

    @property
    def prefilling(self) -> list[Stream]:
        """Streams whose prompts are being run, in the order in which they got their slots."""
        return [s for s in self.streams if s.slot is not None and s.prompt is not None]

    @property
    def num_free_slots(self) -> int:
        """Number of slots without a stream."""
        return len(self._free_slots)

    # --- slots ---

    def note_waiting(self) -> None:
        """Records the time from which streams wait for a slot, if none is free or has memory."""
        if not self._free_slots or self._slot_lacks_memory:
            for stream in self.waiting:
                stream.events.start_slot_wait()

    def acquire(self, stream: Stream, num_positions: int) -> bool:
        """Assigns a free slot to a stream, unless memory lacks room for so many positions."""
        slot = self._free_slots[-1]  # the one left last has its pages and often the prefix
        self._slot_lacks_memory = not self._backend.reserve(slot, num_positions, beginning=True)
        if self._slot_lacks_memory:
            return False
        self._free_slots.pop()
        stream.enter_slot(slot)
        return True

    def release(self, stream: Stream) -> None:
        """Takes the slot from a stream that has one, and drops its state."""
        if stream.slot is not None:
            self._backend.release(self._vacate(stream))

    def swap_out(self, stream: Stream) -> None:
        """Copies a stream's state to the host and takes its slot."""
        slot = stream.active_slot
        stream.active_segment.swap_out(
            SwappedState(self._backend.swap_out(slot), self._vocoder.save_slot(slot))
        )
        self._vacate(stream)

    def swap_in(self, stream: Stream) -> None:
        """Copies the state of a stream that was swapped out into the slot that it acquired."""
        slot, state = stream.active_slot, stream.active_segment.swap_in()
        self._backend.swap_in(slot, state.backend)
        self._vocoder.load_slot(slot, state.vocoder)

    def _vacate(self, stream: Stream) -> int:
        """Takes the slot from a stream and returns it."""
        slot = stream.leave_slot()
        self._free_slots.append(slot)
        self._slot_lacks_memory = False
        return slot
