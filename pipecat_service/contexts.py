"""State of an audio context, from its first text until its audio was sent."""

import asyncio
from dataclasses import dataclass, field

from pipecat_service.spacing import GroupSpacing
from pipecat_service.speech import Speech


@dataclass(eq=False)
class ContextState:
    """State of an audio context.

    Attributes:
        context_id: Pipecat's name of the context.
        speech: The session that speaks its text; None before its first word.
        reader: The task that sends the audio of the session; None once it has ended.
        wordless_text: The text so far, while it has no words.
        failed: Whether an error has ended its speech; later text of the context is dropped.
        spoken: Whether its whole text was spoken, so that all of it may be committed.
        has_audio: Whether audio was sent since Pipecat opened the context. Pipecat ends a context
            without audio for some time, and opens it again for later audio of the turn.
        num_queued: Samples of its audio that wait behind another context's.
        played_s: Seconds of its audio that left the service.
        spacing: Spaces between words that pauses of the text have divided, by segment id of the
            group of words.
    """

    context_id: str
    speech: Speech | None = None
    reader: asyncio.Task[None] | None = None
    wordless_text: str = ""
    failed: bool = False
    spoken: bool = False
    has_audio: bool = False
    num_queued: int = 0
    played_s: float = 0.0
    spacing: dict[int, GroupSpacing] = field(default_factory=dict[int, GroupSpacing])
