"""The position of playback, estimated from the audio that the service sent."""


class Playhead:
    """Follows audio that was sent to be played in real time, in the order sent.

    Times are nanoseconds of the pipeline's clock.

    Attributes:
        end_ns: Time at which all sent audio will have been played; in the past if none is playing.
    """

    def __init__(self) -> None:
        self.end_ns = 0

    def add(self, now_ns: int, duration_s: float) -> None:
        """Adds audio that is sent now."""
        self.end_ns = max(self.end_ns, now_ns) + round(duration_s * 1e9)

    def remaining_s(self, now_ns: int) -> float:
        """Seconds of audio that were sent and not yet played."""
        return max(0, self.end_ns - now_ns) / 1e9

    def clear(self) -> None:
        """Discards the audio that was sent: it will not be played."""
        self.end_ns = 0
