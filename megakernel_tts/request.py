"""How a session's text is to be spoken: the arguments that `TTS.say`, `stream` and `open` share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megakernel_common.checks import check_type
from megakernel_tts.sampling import Sampling
from megakernel_tts.session import ChunkPolicy
from megakernel_tts.speed import check_speed
from megakernel_tts.text.markup import Markup
from megakernel_tts.text.pronunciations import Pronunciations
from megakernel_tts.text.splitter import SplitLimits, Splitter
from megakernel_tts.text.text_queue import TextQueue
from megakernel_tts.text.tokenizer import TextTokenizer
from megakernel_tts.voice import Voice

TextLayout = Literal["auto", "full", "streaming"]


@dataclass(frozen=True)
class Request:
    """How a text is to be spoken; see the arguments of `TTS.say` and `TTS.open`."""

    voice: str | Voice | None
    language: str
    instruct: str | None
    layout: TextLayout
    sampling: Sampling | None
    chunks: ChunkPolicy | None
    speed: float = 1.0
    pronunciations: Mapping[str, str] | None = None
    retries: int = 0
    priority: int = 0

    def check(self) -> None:
        """Checks the arguments that do not depend on the model.

        Raises:
            MegakernelTTSError: One is invalid; see `TTS.say`.
            ValueError: There is no such layout.
            TypeError: One is of another type.
        """
        if self.layout not in ("auto", "full", "streaming"):
            raise ValueError(f"layout is {self.layout!r}; choose auto, full or streaming.")
        check_type("sampling", self.sampling, (Sampling, type(None)), "a Sampling or None")
        check_type("chunks", self.chunks, (ChunkPolicy, type(None)), "a ChunkPolicy or None")
        check_type("retries", self.retries, int, "a whole number")
        check_type("priority", self.priority, int, "a whole number")
        check_speed(self.speed)

    def text_queue(self, tokenizer: TextTokenizer, limits: SplitLimits | None) -> TextQueue:
        """Makes the queue of the text.

        Raises:
            PronunciationError: An entry of the table is invalid.
        """
        table = self.pronunciations
        if table is not None and not isinstance(table, Pronunciations):
            table = Pronunciations(table)
        # The prompt builder refuses a language that is no name.
        language = self.language.strip().lower() if isinstance(self.language, str) else "auto"
        return TextQueue(tokenizer, Splitter(language, limits), Markup(table))
