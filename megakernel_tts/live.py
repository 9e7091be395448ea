"""The pace of live speech, for a listener who may interrupt it."""

from dataclasses import dataclass, field

from megakernel_tts.session import ChunkPolicy


@dataclass(frozen=True)
class LivePolicy:
    """How far speech is ahead of its playback, and when a text that is being written pauses.

    The defaults are those of the server and of the Pipecat services.

    Attributes:
        chunks: Frames that are made before they are sent: at most 1 s. With `max_lead_s` this is
            the delay of a busy engine that playback tolerates, and what an interruption discards.
        max_lead_s: Seconds of audio that are sent before they are played, at most.
        min_lead_s: Seconds of audio ahead of playback at which text that pauses is spoken to its
            end.
        min_pause_s: Seconds without text that are a pause after a clause.
        max_pause_s: Seconds without text that are a pause anywhere after a word.
    """

    chunks: ChunkPolicy = field(default_factory=lambda: ChunkPolicy(first=1, largest=4, ahead=12))
    max_lead_s: float = 1.5
    min_lead_s: float = 0.2
    min_pause_s: float = 0.15
    max_pause_s: float = 0.5
