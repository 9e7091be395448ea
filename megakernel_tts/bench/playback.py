"""Late chunks of a stream; without torch, for clients of a server."""


class PlaybackGaps:
    """Plays a stream from its first chunk on, and records what is missing.

    Attributes:
        gaps_s: Seconds without audio before each chunk that came late.
    """

    def __init__(self) -> None:
        """Starts before the first chunk."""
        self.gaps_s: list[float] = []
        self._played_until_s: float | None = None

    def add(self, now_s: float, audio_s: float) -> float:
        """Adds a chunk of `audio_s` seconds that came at `now_s` seconds.

        Returns:
            The time at which it has been played, in seconds.
        """
        played_until_s = now_s if self._played_until_s is None else self._played_until_s
        if now_s > played_until_s:
            self.gaps_s.append(now_s - played_until_s)
        self._played_until_s = max(now_s, played_until_s) + audio_s
        return self._played_until_s
