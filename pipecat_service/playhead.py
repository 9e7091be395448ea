"""Where playback stands, as far as it can be known at the head of a pipeline."""


class Playhead:
    """Follows audio that was sent to be played: it plays in real time, in the order sent.

    Times are nanoseconds of the pipeline's clock.

    Attributes:
        end: When all that was sent will have been played; in the past if nothing is playing.
    """

    def __init__(self) -> None:
        self.end = 0

    def send(self, now: int, seconds: float) -> None:
        """Takes note of audio that is sent now."""
        self.end = max(self.end, now) + round(seconds * 1e9)

    def ahead(self, now: int) -> float:
        """Seconds of audio that were sent and not played."""
        return max(0, self.end - now) / 1e9

    def stop(self) -> None:
        """Forgets what was sent: it will not be played."""
        self.end = 0
