"""Times of the loop's work, measured on its clock, from which the scheduler predicts deadlines."""

from dataclasses import dataclass

_INITIAL_POSITION_S = 1e-4  # before measurements: above that of the 1.7B on an H200


@dataclass
class IterationWork:
    """What an iteration did, and its times.

    Attributes:
        num_positions: Positions that its prefills ran.
        num_streams: Streams that it stepped.
        num_frames: Frames that the step made, of the stream with the most.
        step_s: Seconds of the step. A prefill that the device still runs is part of it, and so is
            the wait for recognition on the same device.
        total_s: Seconds of the whole iteration.
        only_first_frames: Whether the step left out all streams but those that begin to speak,
            whose first frames take less time than others.
    """

    num_positions: int = 0
    num_streams: int = 0
    num_frames: int = 0
    step_s: float = 0.0
    total_s: float = 0.0
    only_first_frames: bool = False


class WorkTimes:
    """Predicted times of a frame, of a prompt's position, and of the rest of an iteration.

    A prediction is the larger one of the last measurement and of its mean with the prediction
    before, so that it rises at once and falls by half.

    Attributes:
        position_s: Seconds of a position of a prompt.
    """

    def __init__(self) -> None:
        """Starts without measurements of frames."""
        self.position_s = _INITIAL_POSITION_S
        self._frame_s = 0.0
        self._rest_s = 0.0
        self._num_streams = 1  # of the last measurement

    @property
    def last_frame_s(self) -> float:
        """Seconds of a frame of the streams of the last step, first frames aside; 0 before one."""
        return self._frame_s

    def frame_s(self, num_streams: int) -> float:
        """Returns the seconds of a frame of so many streams.

        For more streams than in the last step the time is assumed to grow with their number.
        """
        return self._frame_s * max(1.0, num_streams / self._num_streams)

    def iteration_s(self, num_streams: int) -> float:
        """Returns the seconds of an iteration that makes one frame of so many streams.

        It includes the codec, delivery and text.
        """
        return (self._frame_s + self._rest_s) * max(1.0, num_streams / self._num_streams)

    def add(self, work: IterationWork) -> None:
        """Adds the times of an iteration; one without frames changes nothing.

        First frames take less time than others, by which the time of a position beside them would
        seem too short: there it does not fall below that before measurements.
        """
        if not work.num_frames:
            return
        if work.only_first_frames:
            if work.num_positions:
                measured_s = self._ratio(work) * self.position_s
                least_s = min(self.position_s, _INITIAL_POSITION_S)
                self.position_s = max(least_s, _updated(self.position_s, measured_s))
            return
        if work.num_positions and not self._frame_s:
            # An upper bound of each, since the shares are not known; without one, no deadline would
            # seem near.
            self._frame_s = work.step_s / work.num_frames
            self.position_s = _updated(self.position_s, work.total_s / work.num_positions)
        elif work.num_positions:
            # The device runs prefill and frames in a row, so that their shares are not known.
            ratio = self._ratio(work)
            self._frame_s = _updated(self._frame_s, ratio * self.frame_s(work.num_streams))
            self.position_s = _updated(self.position_s, ratio * self.position_s)
        else:
            self._frame_s = _updated(self._frame_s, work.step_s / work.num_frames)
            self._rest_s = _updated(self._rest_s, max(0.0, work.total_s - work.step_s))
        self._num_streams = work.num_streams

    def _ratio(self, work: IterationWork) -> float:
        """Returns the time of an iteration divided by its prediction."""
        frames_s = work.num_frames * self.frame_s(work.num_streams)
        return work.total_s / (frames_s + self._rest_s + work.num_positions * self.position_s)


def _updated(predicted_s: float, measured_s: float) -> float:
    return max(measured_s, (predicted_s + measured_s) / 2)
