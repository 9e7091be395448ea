"""Exceptions of this package. Every message states what was wrong, where, and what to do."""


class MegakernelTTSError(Exception):
    """Base class of the exceptions of this package."""


class CheckpointError(MegakernelTTSError):
    """A checkpoint cannot be used. The message names file, field or tensor, found and expected."""


class VoiceError(MegakernelTTSError, ValueError):
    """A voice, language or instruction is not supported by the loaded model."""


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


class MissingExtraError(MegakernelTTSError, ImportError):
    """A feature needs a package of an extra that is not installed."""


class EngineBusyError(MegakernelTTSError):
    """All slots are in use and the waiting queue is full."""


class EngineClosedError(MegakernelTTSError):
    """The engine was closed, or stopped after an internal failure (its cause is chained)."""


class ForkedProcessError(MegakernelTTSError, RuntimeError):
    """A forked process cannot use an engine, or torch, that its parent has used."""


class SynthesisError(MegakernelTTSError):
    """One stream failed during synthesis; other streams continue (the cause is chained)."""


class DeviceError(MegakernelTTSError, RuntimeError):
    """The device did not finish a launch; its state is undefined afterwards."""
