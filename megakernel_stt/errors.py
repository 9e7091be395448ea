"""Exceptions of recognition. Every message states what was wrong, where, and what to do."""

from megakernel_common.errors import MegakernelTTSError


class AudioError(MegakernelTTSError, ValueError):
    """Audio that cannot be recognised: unreadable, of a wrong type, or longer than the model."""


class LanguageError(MegakernelTTSError, ValueError):
    """A language that the loaded model does not take."""


class LookaheadError(MegakernelTTSError, ValueError):
    """A lookahead that the loaded model was not trained with."""


class RecognitionError(MegakernelTTSError):
    """One stream failed; other streams continue (the cause is chained)."""
