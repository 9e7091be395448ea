"""What can go wrong, each with a name of its own: a user's mistakes and a machine's limits.

Every message says what was wrong, where, and what to do.
"""


class MegakernelTTSError(Exception):
    """The base of every error that this package raises on purpose."""


class CheckpointError(MegakernelTTSError):
    """A checkpoint that cannot be used: names the file, the field or tensor, found and expected."""


class VoiceError(MegakernelTTSError, ValueError):
    """A voice, language or instruction that the loaded model cannot speak with."""


class ReferenceAudioError(MegakernelTTSError, ValueError):
    """A recording that no voice can be made from."""


class TextError(MegakernelTTSError, ValueError):
    """A text that cannot be spoken."""


class SamplingError(MegakernelTTSError, ValueError):
    """A sampling parameter outside its range."""


class EngineBusyError(MegakernelTTSError):
    """Every slot speaks and the waiting queue is full."""


class EngineClosedError(MegakernelTTSError):
    """The engine was closed, or stopped after an internal failure (its cause is chained)."""


class SynthesisError(MegakernelTTSError):
    """One stream failed while it was speaking; the others go on (its cause is chained)."""


class DeviceError(MegakernelTTSError, RuntimeError):
    """The device did not finish what it was given; whether it will next time, nobody knows."""
