"""Streaming speech recognition on your own machine: audio in, words out, chunk by chunk.

    from megakernel_stt import STT

    with STT.load() as stt:  # demo, a small model for English; or a folder, .nemo file or hub id
        print(stt.transcribe("hello.wav").text)

Importing this package does not import torch; the first use of `STT` does.
"""

from typing import TYPE_CHECKING

from megakernel_common.exports import lazy_exports

if TYPE_CHECKING:
    from megakernel_common.errors import (
        CheckpointError,
        EngineBusyError,
        EngineClosedError,
        ForkedProcessError,
        MegakernelTTSError,
    )
    from megakernel_stt.errors import (
        AudioError,
        LanguageError,
        LookaheadError,
        RecognitionError,
    )
    from megakernel_stt.session import Final, Partial, Session
    from megakernel_stt.stt import STT
    from megakernel_stt.text.words import Token, Word
    from megakernel_stt.transcript import Transcript

_MODULES = {  # module -> its public names
    "megakernel_stt.errors": (
        "AudioError",
        "LanguageError",
        "LookaheadError",
        "RecognitionError",
    ),
    "megakernel_stt.session": ("Final", "Partial", "Session"),
    "megakernel_stt.stt": ("STT",),
    "megakernel_stt.text.words": ("Token", "Word"),
    "megakernel_stt.transcript": ("Transcript",),
    "megakernel_common.errors": (
        "CheckpointError",
        "EngineBusyError",
        "EngineClosedError",
        "ForkedProcessError",
        "MegakernelTTSError",
    ),
}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]  # the names come from `__getattr__`
    "STT",
    "AudioError",
    "CheckpointError",
    "EngineBusyError",
    "EngineClosedError",
    "Final",
    "ForkedProcessError",
    "LanguageError",
    "LookaheadError",
    "MegakernelTTSError",
    "Partial",
    "RecognitionError",
    "Session",
    "Token",
    "Transcript",
    "Word",
]


__getattr__ = lazy_exports(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
