"""Selects the alignment heads of a checkpoint, for word times (`megakernel-tts calibrate`)."""
