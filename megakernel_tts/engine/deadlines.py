"""The streams of a step by their deadlines, its length, and the prefills beside it.

The deadline of a stream is the time at which the audio that it has delivered has been played. A
stream that has delivered none, or whose deadline has passed, is late: it needs audio at once, and
no schedule can prevent its gap any more.
"""

from collections.abc import Sequence

from megakernel_tts.engine.stream import Stream
from megakernel_tts.engine.work_times import WorkTimes

_MARGIN = 2  # iterations before a chunk must be delivered at which its stream is urgent
_MAX_MOVABLE = 24  # streams that can make a frame, while first frames get steps of their own
_MAX_UNSHARED = 36  # streams that can make a frame, while new sessions end a step after a frame
_MAX_POSTPONED = 8  # times in succession that prefills are postponed
_FORCED_BUDGET = 16  # positions of a prefill that was postponed so often
_NO_DEADLINE = 1 << 30  # frames
_MIN_POSITION_S = 1e-9  # avoids a division by zero where a clock stands still


class DeadlineScheduler:
    """Decides what an iteration of the loop does, so that no stream misses its deadline by it.

    Attributes:
        times: Predicted times of the iteration's work.
    """

    def __init__(
        self, max_streams: int, prefill_budget: int, burst_budget: int, delivery_s: float
    ) -> None:
        """Starts without measured times.

        Args:
            max_streams: Streams of a step.
            prefill_budget: Positions of an iteration's prefills at most.
            burst_budget: The same while no stream speaks.
            delivery_s: Seconds before its deadline at which a chunk must be delivered.
        """
        self.times = WorkTimes()
        self._max_streams = max_streams
        self._prefill_budget = prefill_budget
        self._burst_budget = burst_budget
        self._delivery_s = delivery_s
        self._num_postponed = 0  # times in succession

    def choose(
        self, movable: Sequence[Stream], now_s: float, *, others_wait: bool
    ) -> tuple[Sequence[Stream], Sequence[Stream]]:
        """Returns the streams of the next step, and those that it leaves out.

        While at most `_MAX_MOVABLE` streams can make a frame, those that begin to speak are stepped
        before the others, if these can wait: a first frame has no pass of the talker, so that a
        step of such frames only is shorter. Within a burst of prompts they are not, as each
        iteration would have such a step. If there are more streams than a step takes, urgent
        streams come first. They are followed by late ones, of which the one whose last step was
        longest ago comes first, and then by the others by their deadlines.

        Args:
            movable: Streams that can make a frame.
            now_s: Clock time in seconds.
            others_wait: Whether prompts are left for the next iteration.
        """
        may_divide = len(movable) <= _MAX_MOVABLE and not others_wait
        if may_divide and (divided := self._choose_beginning(movable, now_s)):
            return divided
        if len(movable) <= self._max_streams:
            return movable, ()

        margin_s = self._margin_s(self._max_streams)

        def rank(stream: Stream) -> tuple[int, float]:
            deadline_s = stream.deadline_s
            if deadline_s < now_s:
                return 1, stream.active_segment.last_step_s
            return 0 if deadline_s - now_s < margin_s else 2, deadline_s

        ranked = sorted(movable, key=rank)
        return ranked[: self._max_streams], ranked[self._max_streams :]

    def _choose_beginning(
        self, movable: Sequence[Stream], now_s: float
    ) -> tuple[Sequence[Stream], Sequence[Stream]] | None:
        """Returns the streams that begin to speak and the others, if these can wait."""
        beginning = [stream for stream in movable if stream.begins_speech]
        others = [stream for stream in movable if stream not in beginning]
        can_wait = self._can_wait(others, now_s, len(movable), len(beginning))
        divides = can_wait and 0 < len(beginning) <= self._max_streams
        return (beginning, others) if divides else None

    def can_postpone(self, due: Sequence[Stream], num_movable: int, now_s: float) -> bool:
        """Returns whether chunks may be decoded behind the next first frame of another stream.

        Args:
            due: Streams with a chunk that is due.
            num_movable: Streams that can make a frame.
            now_s: Clock time in seconds.
        """
        return num_movable < _MAX_MOVABLE and self._can_wait(due, now_s, num_movable + 1, 1)

    def _can_wait(
        self, streams: Sequence[Stream], now_s: float, num_movable: int, num_beginning: int
    ) -> bool:
        """Returns whether no deadline is missed if a step of those that begin comes first.

        Args:
            streams: Whose next chunks come after it.
            now_s: Clock time in seconds.
            num_movable: Streams that can make a frame, with those that begin.
            num_beginning: Streams that begin to speak.
        """
        wait_s = self._margin_s(num_movable) + self.times.iteration_s(num_beginning)
        return all(stream.deadline_s - now_s >= wait_s for stream in streams)

    def shared_frames(self, num_movable: int) -> int:
        """Returns the frames of a shared step: one that no new or cancelled session ends early.

        Prompts, codec and host take time in every iteration, however many frames it has. If new
        sessions limited each step to one frame, many streams would make fewer frames than are
        played, and their number would grow.

        Args:
            num_movable: Streams that can make a frame.
        """
        return 1 if num_movable <= _MAX_UNSHARED else 2

    def plan_step(
        self,
        chosen: Sequence[Stream],
        left_out: Sequence[Stream],
        now_s: float,
        *,
        others_wait: bool,
    ) -> int:
        """Returns the frames of a step: until the last chunk is due, or a deadline is near.

        Chunks that are due earlier wait for it, so that streams with chunks of one size are decoded
        together whenever they began. A late stream does not wait, and none until a second chunk. If
        many streams can make a frame, first chunks are rounded up to whole shared steps before.

        Args:
            chosen: Streams of the step, whose chunks are planned.
            left_out: Streams that can make a frame and are not among them.
            now_s: Clock time in seconds.
            others_wait: Whether prompts are left for the next iteration.
        """
        shared_frames = self.shared_frames(len(chosen) + len(left_out))
        most_frames = self._frames_to_deadline(chosen, left_out, now_s)
        if (multiple := min(shared_frames, most_frames)) > 1:
            for stream in chosen:
                stream.round_up_first_chunk(multiple)
        ranges = [stream.step_range() for stream in chosen]
        limits = [
            least if stream.deadline_s < now_s else most
            for stream, (least, most) in zip(chosen, ranges, strict=True)
        ]
        num_frames = min([max((least for least, _ in ranges), default=0), *limits])
        if others_wait or any(stream.deadline_s < now_s for stream in left_out):
            num_frames = min(num_frames, shared_frames)
        return min(num_frames, most_frames)

    def _frames_to_deadline(
        self, chosen: Sequence[Stream], left_out: Sequence[Stream], now_s: float
    ) -> int:
        """Returns the frames that the streams of a step can make before a deadline is near."""
        frame_s = self.times.frame_s(len(chosen))
        slacks_s = [stream.deadline_s - now_s for stream in (*chosen, *left_out)]
        slack_s = min((slack_s for slack_s in slacks_s if slack_s >= 0), default=None)
        if not frame_s or slack_s is None:
            return _NO_DEADLINE
        return max(1, int((slack_s - self._margin_s(len(chosen))) / frame_s))

    def shorten_chunks(self, chosen: Sequence[Stream], num_frames: int, now_s: float) -> None:
        """Makes the chunks of a step due after it that would be late after another one.

        Chunks are not shortened if the device is slower than playback with chunks of one frame.

        Args:
            chosen: Streams of the step, whose chunks are planned.
            num_frames: Frames of the step.
            now_s: Clock time in seconds.
        """
        iteration_s, margin_s = self.times.iteration_s(len(chosen)), self._margin_s(len(chosen))
        end_s = now_s + num_frames * self.times.frame_s(len(chosen))
        for stream in chosen:
            if stream.deadline_s < now_s or iteration_s > stream.frame_playback_s:
                continue
            if stream.deadline_s - end_s < margin_s:
                stream.shorten_chunk(num_frames)

    def prefill_budget(
        self, movable: Sequence[Stream], now_s: float, *, is_burst: bool = False
    ) -> int:
        """Returns the positions that prefills may run before the next step; 0 for none.

        The prefills end in time for the stream with the earliest deadline. If they have been
        postponed again and again, the device is too slow for its streams, and a small one is run.

        Args:
            movable: Streams that can make a frame, or whose chunks wait for those that begin.
            now_s: Clock time in seconds.
            is_burst: Whether no stream speaks.
        """
        deadlines_s = [s.deadline_s for s in movable if s.deadline_s >= now_s]
        budget = self._burst_budget if is_burst else self._prefill_budget
        if deadlines_s:
            margin_s = self._margin_s(min(len(movable), self._max_streams))
            usable_s = max(0.0, min(deadlines_s) - now_s - margin_s)
            budget = int(min(budget, usable_s / max(self.times.position_s, _MIN_POSITION_S)))
        if not budget and self._num_postponed >= _MAX_POSTPONED:
            budget = min(_FORCED_BUDGET, self._prefill_budget)
        self._num_postponed = 0 if budget else self._num_postponed + 1
        return budget

    def _margin_s(self, num_streams: int) -> float:
        """Returns the seconds before its deadline at which a stream is urgent.

        Args:
            num_streams: Streams of a step.
        """
        return _MARGIN * self.times.iteration_s(num_streams) + self._delivery_s
