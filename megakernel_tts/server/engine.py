"""What the server needs of an engine: `TTS` in this process, or a cluster of engine processes."""

from collections.abc import AsyncGenerator, Mapping
from typing import BinaryIO, Literal, Protocol

from megakernel_tts import AudioChunk, ChunkPolicy, Finish, ModelInfo, Sampling, Voice

TextLayout = Literal["auto", "full", "streaming"]  # as in `TTS.open`


class SpeechSession(Protocol):
    """One stream of speech, as `Session`: text goes in, events come out.

    Its owner reads it up to its `Finish`, or cancels it.
    """

    @property
    def finish(self) -> Finish | None:
        """The stream's last event, once it was read."""
        ...

    @property
    def slot_wait_s(self) -> float:
        """Seconds so far for which the stream waited because all slots were in use."""
        ...

    async def apush_text(self, text: str) -> None:
        """Adds text; without effect once the stream has finished.

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
        """Stops the speech; no chunk is read after this returns."""
        ...

    def __aiter__(self) -> AsyncGenerator[AudioChunk | Finish]:
        """Iterates over the events, up to the `Finish`."""
        ...


class SpeechEngine(Protocol):
    """Opens sessions, as `TTS`."""

    @property
    def info(self) -> ModelInfo:
        """Description of the model."""
        ...

    @property
    def sampling(self) -> Sampling:
        """The model's default sampling parameters."""
        ...

    @property
    def slots(self) -> int:
        """Number of streams that can speak at once."""
        ...

    @property
    def running(self) -> bool:
        """Whether it was not closed, and has not failed for good."""
        ...

    @property
    def warm(self) -> bool:
        """Whether a request has full speed."""
        ...

    @property
    def frame_step_s(self) -> float:
        """Predicted seconds of a frame of the streams of the last step; 0 before one."""
        ...

    async def awarmup(self) -> None:
        """Returns once it is warm.

        Raises:
            MegakernelTTSError: It was closed meanwhile, or failed.
        """
        ...

    async def aopen(
        self,
        voice: str | Voice | None,
        language: str,
        instruct: str | None,
        *,
        layout: TextLayout,
        sampling: Sampling,
        chunks: ChunkPolicy,
        speed: float,
        pronunciations: Mapping[str, str],
        text: str | None,
        priority: int,
    ) -> SpeechSession:
        """Opens a session, as `TTS.open`.

        Raises:
            MegakernelTTSError: As `TTS.open`.
        """
        ...

    def clone(self, wav: BinaryIO, text: str | None) -> Voice:
        """Makes a voice from a recording, as `TTS.clone`; not for the thread of an event loop.

        Raises:
            MegakernelTTSError: As `TTS.clone`.
        """
        ...

    def close(self) -> None:
        """Stops every stream; may be called twice."""
        ...
