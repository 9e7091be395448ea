"""What a service needs of the source of its speech: an engine in this process, or a server."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megakernel_tts import Finish, Word
from pipecat_service.settings import MegakernelTTSSettings, SettingsCheck

SOURCE_RATE = 24_000  # samples per second of every Qwen3-TTS model


class SpeechChunk(Protocol):
    """Some consecutive audio of a session, as `AudioChunk`."""

    @property
    def pcm(self) -> NDArray[np.int16]:
        """16-bit samples [samples] at `SOURCE_RATE`."""
        ...

    @property
    def words(self) -> Sequence[Word]:
        """Words that begin in the chunk, timed from the start of the session's audio."""
        ...

    @property
    def segment(self) -> int:
        """Index of the segment of the text."""
        ...

    @property
    def is_break(self) -> bool:
        """Whether it is the silence of a break in the text."""
        ...


class SpeechSession(Protocol):
    """A stream of speech, as `Session`. No method blocks."""

    @property
    def slot_wait_s(self) -> float:
        """Seconds so far for which the stream waited because all slots were in use."""
        ...

    def push_text(self, text: str) -> None:
        """Adds text.

        Raises:
            TextError: It is no Unicode text, or the text was ended.
        """
        ...

    def flush(self) -> None:
        """Has the text pushed so far spoken to its end."""
        ...

    def end(self) -> None:
        """Ends the text."""
        ...

    def cancel(self) -> None:
        """Stops the speech within one codec frame (80 ms); no chunk is read after this returns."""
        ...

    def __aiter__(self) -> AsyncGenerator[SpeechChunk | Finish, None]:
        """Iterates over the chunks, up to the `Finish`."""
        ...


class Synthesizer(Protocol):
    """Opens sessions according to settings."""

    @property
    def aligned(self) -> bool:
        """Whether word times come from the model's attention, as far as is known."""
        ...

    async def load(self, settings: MegakernelTTSSettings) -> None:
        """Prepares for the first session; called while the pipeline is set up.

        Args:
            settings: See `SettingsCheck.complete`.

        Raises:
            MegakernelTTSError: It cannot speak, or a setting is invalid.
        """
        ...

    async def settings_check(self) -> SettingsCheck | None:
        """The check of new settings; None if the model is not known."""
        ...

    async def open(self, settings: MegakernelTTSSettings) -> SpeechSession:
        """Opens a session for text that is still being written.

        Args:
            settings: How to speak.

        Raises:
            MegakernelTTSError: It cannot be opened.
        """
        ...

    async def close(self) -> None:
        """Releases what `load` has acquired."""
        ...
