"""Exceptions of synthesis. Every message states what was wrong, where, and what to do."""

from megakernel_common.errors import MegakernelTTSError


class VoiceError(MegakernelTTSError, ValueError):
    """A voice, language or instruction is not supported by the loaded model."""


class InstructionError(VoiceError):
    """An instruction that the model does not take, that is no text or too long; or none."""


class ReferenceAudioError(MegakernelTTSError, ValueError):
    """A recording from which no voice can be cloned."""


class TextError(MegakernelTTSError, ValueError):
    """A text that cannot be synthesised."""


class SamplingError(MegakernelTTSError, ValueError):
    """A sampling parameter outside its range."""


class SpeedError(MegakernelTTSError, ValueError):
    """A speed outside the range of the time-scale filter."""


class PronunciationError(MegakernelTTSError, ValueError):
    """A pronunciation table that is unreadable, too large, or has an invalid entry."""


class SynthesisError(MegakernelTTSError):
    """One stream failed during synthesis; other streams continue (the cause is chained)."""


class DeviceError(MegakernelTTSError, RuntimeError):
    """The device did not finish a launch, whose streams end; later launches are not affected."""
