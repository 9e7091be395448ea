"""Times of words as OpenAI's protocol has them with vLLM-Omni's field `word_timestamps`."""

import json
from collections.abc import Mapping, Sequence

from starlette.types import Send

from megakernel_tts import Word
from megakernel_tts.server.http import AudioBody, SpeechResponse
from megakernel_tts.server.speech_stream import SECONDS_PER_CHARACTER, SpeechChunk, SpeechStream

_MAX_HEADER_BYTES = 4096
_MAX_HELD_BYTES = 16 << 20  # of audio: a text may consist of breaks, which are no words


def word_ends(words: Sequence[Word]) -> list[float]:
    """The end of each word: the start of the next one, or an estimate while that is unknown.

    Args:
        words: Consecutive words, at least one.

    Returns:
        Seconds from the start of the stream.
    """
    last = words[-1]
    estimate = round(last.start + SECONDS_PER_CHARACTER * len(last.text), 3)
    return [*(word.start for word in words[1:]), estimate]


def describe_words(words: Sequence[Word]) -> list[dict[str, object]]:
    """The JSON objects of consecutive words, at least one."""
    return [
        {"word": word.text, "start_ms": round(1000 * word.start), "end_ms": round(1000 * end)}
        for word, end in zip(words, word_ends(words), strict=True)
    ]


class TimedSpeechResponse(SpeechResponse):
    """A reply with the words in the header `X-Word-Timestamps`, and therefore sent at the end.

    If the words do not fit the header, `X-Word-Timestamps-Omitted` replaces it, and the audio is
    sent while it is made.
    """

    def __init__(self, stream: SpeechStream, body: AudioBody, headers: Mapping[str, str]) -> None:
        """See `SpeechResponse`."""
        super().__init__(stream, body, headers)
        self._words: list[Word] = []
        self._held: bytearray | None = bytearray()  # audio; None once it is sent

    async def send_audio(self, send: Send, chunk: SpeechChunk) -> None:
        """See `SpeechResponse`."""
        if self._held is None:
            await super().send_audio(send, chunk)
            return
        self._words += chunk.words
        self._held += self.body.encode(chunk)
        if len(self._held) > _MAX_HELD_BYTES or len(self._header()) > _MAX_HEADER_BYTES:
            await self._release(send, "X-Word-Timestamps-Omitted", "true")

    async def send_end(self, send: Send, part: bytes) -> None:
        """See `SpeechResponse`."""
        if self._held is not None:
            await self._release(send, "X-Word-Timestamps", self._header())
        await super().send_end(send, part)

    def _header(self) -> str:
        """The words in ASCII, as a header needs it."""
        return json.dumps(describe_words(self._words) if self._words else [])

    async def _release(self, send: Send, name: str, value: str) -> None:
        self.headers[name] = value
        held, self._held = bytes(self._held or b""), None
        await self.send_part(send, held)
