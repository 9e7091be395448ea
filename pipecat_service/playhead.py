"""The position of playback, estimated from the audio that the service sent."""

OUTPUT_BLOCK_S = 0.04  # an output plays whole blocks: Pipecat's default `audio_out_10ms_chunks`


class Playhead:
    """Follows audio that was sent to be played in real time, in the order sent.

    Audio is played in blocks; the last samples wait until their block is complete. Times are
    nanoseconds of the pipeline's clock.

    Attributes:
        end_ns: Time at which all sent blocks will have been played; in the past if none is playing.
    """

    def __init__(self) -> None:
        self.end_ns = 0
        self._incomplete_ns = 0  # audio of an incomplete block
        self._underrun_ns = 0

    def begin_speech(self, now_ns: int) -> None:
        """Begins speech whose first audio is sent now."""
        self.end_ns = max(self.end_ns, now_ns)
        self._underrun_ns = 0

    def add(self, now_ns: int, duration_s: float) -> None:
        """Adds audio that is sent now."""
        block_ns = round(OUTPUT_BLOCK_S * 1e9)
        num_blocks, self._incomplete_ns = divmod(
            self._incomplete_ns + round(duration_s * 1e9), block_ns
        )
        if num_blocks:
            self._underrun_ns += max(0, now_ns - self.end_ns)
            self.end_ns = max(self.end_ns, now_ns) + num_blocks * block_ns

    def end_speech(self, now_ns: int) -> None:
        """Ends the speech: the output completes its last block with silence."""
        if self._incomplete_ns:
            self.add(now_ns, OUTPUT_BLOCK_S - self._incomplete_ns / 1e9)

    def underrun_s(self, now_ns: int) -> float:
        """Seconds without audio since the speech began, if its next block is complete now."""
        return (self._underrun_ns + max(0, now_ns - self.end_ns)) / 1e9

    def remaining_s(self, now_ns: int) -> float:
        """Seconds of audio that were sent and not yet played."""
        return max(0, self.end_ns - now_ns) / 1e9

    def clear(self) -> None:
        """Discards the audio that was sent: it will not be played."""
        self.end_ns = self._incomplete_ns = 0
