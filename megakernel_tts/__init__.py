"""Qwen3-TTS on your own machine: text in, speech out, frame by frame.

    from megakernel_tts import TTS

    with TTS.load() as tts:
        tts.say("Hello.").save("hello.wav")

Importing this package does not import torch; the first use of one of its names does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megakernel_tts.align.words import Word, WrittenWord, split_words
    from megakernel_tts.audio import audible
    from megakernel_tts.errors import (
        CheckpointError,
        EngineBusyError,
        EngineClosedError,
        ForkedProcessError,
        MegakernelTTSError,
        MissingExtraError,
        PronunciationError,
        ReferenceAudioError,
        SamplingError,
        SpeedError,
        SynthesisError,
        TextError,
        VoiceError,
    )
    from megakernel_tts.info import LANGUAGE_CODES, ModelInfo
    from megakernel_tts.live import LivePolicy
    from megakernel_tts.sampling import Sampling
    from megakernel_tts.session import AudioChunk, ChunkPolicy, Finish, Session
    from megakernel_tts.speech import Speech
    from megakernel_tts.speed import check_speed
    from megakernel_tts.text.pronunciations import Pronunciations
    from megakernel_tts.tts import TTS
    from megakernel_tts.voice import Voice

__version__ = "0.1.0"

_MODULES = {  # module -> its public names
    "megakernel_tts.align.words": ("Word", "WrittenWord", "split_words"),
    "megakernel_tts.audio": ("audible",),
    "megakernel_tts.errors": (
        "CheckpointError",
        "EngineBusyError",
        "EngineClosedError",
        "ForkedProcessError",
        "MegakernelTTSError",
        "MissingExtraError",
        "PronunciationError",
        "ReferenceAudioError",
        "SamplingError",
        "SpeedError",
        "SynthesisError",
        "TextError",
        "VoiceError",
    ),
    "megakernel_tts.sampling": ("Sampling",),
    "megakernel_tts.session": ("AudioChunk", "ChunkPolicy", "Finish", "Session"),
    "megakernel_tts.info": ("LANGUAGE_CODES", "ModelInfo"),
    "megakernel_tts.live": ("LivePolicy",),
    "megakernel_tts.speech": ("Speech",),
    "megakernel_tts.speed": ("check_speed",),
    "megakernel_tts.text.pronunciations": ("Pronunciations",),
    "megakernel_tts.tts": ("TTS",),
    "megakernel_tts.voice": ("Voice",),
}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]  # the names come from `__getattr__`
    "LANGUAGE_CODES",
    "TTS",
    "AudioChunk",
    "CheckpointError",
    "ChunkPolicy",
    "EngineBusyError",
    "EngineClosedError",
    "Finish",
    "ForkedProcessError",
    "LivePolicy",
    "MegakernelTTSError",
    "MissingExtraError",
    "ModelInfo",
    "PronunciationError",
    "Pronunciations",
    "ReferenceAudioError",
    "Sampling",
    "SamplingError",
    "Session",
    "Speech",
    "SpeedError",
    "SynthesisError",
    "TextError",
    "Voice",
    "VoiceError",
    "Word",
    "WrittenWord",
    "audible",
    "check_speed",
    "split_words",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            import_module("megakernel_tts.process")  # first: it notes whether torch was imported
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
