"""Qwen3-TTS on your own machine: text in, speech out, frame by frame.

    from megakernel_tts import TTS

    with TTS.load() as tts:
        tts.say("Hello.").save("hello.wav")

Importing this package does not import torch; the first use of one of its names does.
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
        MissingExtraError,
    )
    from megakernel_tts.align.words import Word, WrittenWord, has_spoken_words, split_words
    from megakernel_tts.audio import audible
    from megakernel_tts.errors import (
        InstructionError,
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
    "megakernel_common.errors": (
        "CheckpointError",
        "EngineBusyError",
        "EngineClosedError",
        "ForkedProcessError",
        "MegakernelTTSError",
        "MissingExtraError",
    ),
    "megakernel_tts.align.words": ("Word", "WrittenWord", "has_spoken_words", "split_words"),
    "megakernel_tts.audio": ("audible",),
    "megakernel_tts.errors": (
        "InstructionError",
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
    "InstructionError",
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
    "has_spoken_words",
    "split_words",
]


__getattr__ = lazy_exports(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
