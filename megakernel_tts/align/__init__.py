"""Alignment of text and speech: which token each frame speaks, and when each word is spoken."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megakernel_tts.align.search import mas as mas
    from megakernel_tts.align.search import maximum_path as maximum_path

__all__ = ["mas", "maximum_path"]


def __getattr__(name: str) -> Any:
    """Imports the search at its first use; the other modules of this package need no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megakernel_tts.align import search

    return getattr(search, name)
