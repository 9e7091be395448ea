"""Exceptions that synthesis and recognition share.

Every message states what was wrong, where, and what to do.
"""


class MegakernelTTSError(Exception):
    """Base class of the exceptions of this distribution, megakernel-tts."""


class CheckpointError(MegakernelTTSError):
    """A checkpoint cannot be used. The message names file, field or tensor, found and expected."""


class MissingExtraError(MegakernelTTSError, ImportError):
    """A feature needs a package of an extra that is not installed."""


class EngineBusyError(MegakernelTTSError):
    """All slots are in use and the waiting queue is full."""


class EngineClosedError(MegakernelTTSError):
    """The engine was closed, or stopped after an internal failure (its cause is chained)."""


class ForkedProcessError(MegakernelTTSError, RuntimeError):
    """A forked process cannot use an engine, or torch, that its parent has used."""
