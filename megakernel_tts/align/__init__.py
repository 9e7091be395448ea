"""Alignment of text and speech: which token each frame speaks."""

from megakernel_tts.align.search import mas as mas
from megakernel_tts.align.search import maximum_path as maximum_path
