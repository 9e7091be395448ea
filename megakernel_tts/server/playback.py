"""The playback clock of a stream: how far its audio is ahead of a listener."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from megakernel_tts.server.errors import SlowClientError

MAX_BEHIND_S = 30.0  # beyond which a client that does not read is disconnected


class PlaybackClock:
    """Simulates the playback of a stream's audio, from its first chunk on.

    Attributes:
        underrun_s: Seconds for which playback had to wait for audio.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts before the first audio.

        Args:
            clock: Returns the time in seconds.
        """
        self.underrun_s = 0.0
        self._clock = clock
        self._end_s: float | None = None  # at which all audio so far was played
        self._accepted_s = 0.0  # when the client accepted the audio so far
        # How far that was ahead of playback, in seconds; negative: how far the client was behind.
        self._ahead_s = 0.0

    @property
    def lead_s(self) -> float:
        """Seconds of audio that were sent and not yet played."""
        return 0.0 if self._end_s is None else max(0.0, self._end_s - self._clock())

    async def wait_until_lead(self, max_lead_s: float) -> None:
        """Waits until at most `max_lead_s` seconds of audio are ahead of playback."""
        # There is no event for the progress of playback.
        while (early_s := self.lead_s - max_lead_s) > 0:  # noqa: ASYNC110
            await asyncio.sleep(early_s)

    async def send(self, sending: Awaitable[None], seconds: float) -> None:
        """Sends audio to the client and plays it.

        A client plays what it has read before, and falls behind from the end of that on. The time
        until there is more audio to send does not put it behind.

        Args:
            sending: Returns when the transport has accepted the audio.
            seconds: Duration of the audio.

        Raises:
            SlowClientError: The client is more than `MAX_BEHIND_S` behind.
        """
        start_s = self._clock()
        if self._end_s is not None:
            self.underrun_s += max(0.0, start_s - self._end_s)
        self._end_s = max(start_s, self._end_s or start_s) + seconds
        if self._ahead_s > 0:
            self._ahead_s = max(0.0, self._ahead_s - (start_s - self._accepted_s))
        try:
            async with asyncio.timeout(MAX_BEHIND_S + self._ahead_s):
                await sending
        except TimeoutError:
            raise _slow_client() from None
        self._accepted_s = self._clock()
        self._ahead_s += seconds - (self._accepted_s - start_s)
        if self._ahead_s < -MAX_BEHIND_S:
            raise _slow_client()


def _slow_client() -> SlowClientError:
    return SlowClientError(
        f"The client is {MAX_BEHIND_S:.0f} s behind: it does not read its audio."
    )
