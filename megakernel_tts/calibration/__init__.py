"""Finds the attention heads that follow the text, for word times (`megakernel-tts calibrate`)."""
