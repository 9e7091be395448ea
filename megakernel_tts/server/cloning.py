"""Voices from clients' recordings: decoding and cloning, on a thread of their own."""

import asyncio
import base64
import binascii
import hashlib
import io
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np

from megakernel_tts import (
    MegakernelTTSError,
    ReferenceAudioError,
    TextError,
    Voice,
    VoiceError,
)
from megakernel_tts.server.engine import SpeechEngine
from megakernel_tts.server.errors import RequestError, request_error

MAX_INLINE_BYTES = 4 << 20  # of a recording in base64, whose JSON holds up the event loop for 5 ms
MAX_INLINE_CHARACTERS = MAX_INLINE_BYTES * 4 // 3 + 4

_MAX_PENDING = 8  # recordings that are decoded or wait for it
_MAX_RECENT = 8  # voices that are kept for the next request with the same recording
_MAX_EMBEDDING = 8192  # values of an x-vector; models have 1,024 or 2,048
_DECODED_CHARACTERS = 1 << 20  # of base64, during which other threads of Python wait


class VoiceCloner:
    """Clones voices from the recordings that clients send, one after the other.

    Neither an event loop nor the engine waits for the decoding of a recording.
    """

    def __init__(self, tts: SpeechEngine) -> None:
        """Starts no thread yet.

        Args:
            tts: The engine, whose owner closes it.
        """
        self._tts = tts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="voice-cloning")
        self._num_pending = 0
        self._recent: OrderedDict[bytes, Voice] = OrderedDict()  # used by the thread only
        # The same values give the same object, by which the engine caches a voice's prefix.
        self._voice_of = lru_cache(_MAX_RECENT)(_voice_of)

    @property
    def available(self) -> bool:
        """Whether the model clones voices."""
        return self._tts.info.kind == "base"

    def check(self) -> None:
        """Checks that a recording can be accepted.

        Raises:
            RequestError: The model does not clone voices, or too many recordings wait.
        """
        self._check_available()
        if self._num_pending >= _MAX_PENDING:
            raise RequestError(
                f"The server is overloaded: {self._num_pending} recordings wait. Try again later.",
                429,
                "overloaded",
            )

    def _check_available(self) -> None:
        if not self.available:
            raise RequestError(
                f"This model is {self._tts.info.kind}, and only Base models clone voices; serve "
                "one, such as Qwen/Qwen3-TTS-12Hz-0.6B-Base.",
                400,
                "cloning_unsupported",
            )

    async def clone(self, recording: bytes, text: str | None, *, parameter: str) -> Voice:
        """Makes a voice from the content of an audio file.

        Args:
            recording: The file.
            text: Its transcript, or None.
            parameter: Field of the request that holds it, for errors.

        Raises:
            RequestError: See `check`; or no voice can be cloned from the recording.
        """
        return await self._run(lambda: self._clone(recording, text), parameter)

    async def clone_base64(self, recording: str, text: str | None, *, parameter: str) -> Voice:
        """Makes a voice from an audio file in base64, or in a data URL.

        Args:
            recording: The file; any other URL, or a path, is refused.
            text: Its transcript, or None.
            parameter: Field of the request that holds it, for errors.

        Raises:
            RequestError: See `check`; or no voice can be cloned from the recording.
        """
        return await self._run(lambda: self._clone(_decode(recording, parameter), text), parameter)

    def of_embedding(self, values: Sequence[object], *, parameter: str) -> Voice:
        """Makes a voice of an x-vector that the client has computed.

        Args:
            values: The x-vector.
            parameter: Field of the request that holds it, for errors.

        Raises:
            RequestError: The model does not clone voices, or the values are no x-vector.
        """
        self._check_available()
        if len(values) > _MAX_EMBEDDING or not all(type(value) in (int, float) for value in values):
            raise RequestError(
                f"{parameter} must be an array of at most {_MAX_EMBEDDING:,} numbers.",
                parameter=parameter,
            )
        try:
            return self._voice_of(tuple(values))
        except (OverflowError, VoiceError) as error:
            raise RequestError(str(error), 400, "invalid_voice", parameter) from None

    async def _run(self, job: Callable[[], Voice], parameter: str) -> Voice:
        self.check()
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, job)
        except ReferenceAudioError as error:
            raise RequestError(str(error), 400, "invalid_audio", parameter) from None
        except TextError as error:
            raise RequestError(str(error), 400, "invalid_text", "ref_text") from None
        except MegakernelTTSError as error:
            raise request_error(error) from None
        finally:
            self._num_pending -= 1

    def _clone(self, recording: bytes, text: str | None) -> Voice:
        key = hashlib.sha256(recording).digest() + repr(text).encode()
        if key not in self._recent:
            self._recent[key] = self._tts.clone(io.BytesIO(recording), text)
            if len(self._recent) > _MAX_RECENT:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)
        return self._recent[key]

    def close(self) -> None:
        """Ends the thread after the recording that it decodes."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _voice_of(x_vector: tuple[float, ...]) -> Voice:
    with np.errstate(over="ignore"):  # an infinity is an error of the voice
        return Voice(np.array(x_vector, np.float32))


def _decode(recording: str, parameter: str) -> bytes:
    """Decodes base64, with or without the head of a data URL."""
    head, comma, data = recording.partition(",")
    if not comma:
        data = recording
    elif not (head.startswith("data:") and head.endswith(";base64")):
        data = ""
    if ":" in data[:16] or not data:
        raise RequestError(
            f"{parameter} must be an audio file in base64, or a data URL with one. Other URLs and "
            "paths are not read.",
            parameter=parameter,
        )
    if len(data) > MAX_INLINE_CHARACTERS:
        raise RequestError(
            f"{parameter} is larger than {MAX_INLINE_BYTES >> 20} MiB; cut the recording, or "
            "upload it to /v1/audio/voices.",
            413,
            "audio_too_large",
            parameter,
        )
    starts = range(0, len(data), _DECODED_CHARACTERS)
    try:
        return b"".join(
            base64.b64decode(data[start : start + _DECODED_CHARACTERS], validate=True)
            for start in starts
        )
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"{parameter} is no valid base64 ({error}).", parameter=parameter
        ) from None
