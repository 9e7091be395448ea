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
        self._before_ns = 0  # audio of the speech that is played before its next audio

    def begin_speech(self, now_ns: int, played_s: float = 0.0) -> None:
        """Begins speech, or continues it after a pause; its next audio is sent now.

        Args:
            now_ns: The time.
            played_s: Seconds of the speech's audio that were sent before.
        """
        self.end_ns = max(self.end_ns, now_ns)
        self._underrun_ns = 0
        self._before_ns = round(played_s * 1e9) - self._incomplete_ns

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

    def delay_s(self, now_ns: int) -> float:
        """Seconds from an instant of the speech's audio to that instant's time of playback.

        Both are counted from their own start: the audio from its first sample, playback from the
        time at which the speech began or continued. Gaps since then, up to the next block if it is
        complete now, delay the audio; what was played before then is in advance.
        """
        gap_ns = self._underrun_ns + max(0, now_ns - self.end_ns)
        return (gap_ns - self._before_ns) / 1e9

    def remaining_s(self, now_ns: int) -> float:
        """Seconds of audio that were sent and not yet played."""
        return max(0, self.end_ns - now_ns) / 1e9

    def clear(self) -> None:
        """Discards the audio that was sent: it will not be played."""
        self.end_ns = self._incomplete_ns = 0
