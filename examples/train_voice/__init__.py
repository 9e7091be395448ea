"""Trains a small voice in the released architecture and file layout from synthetic speech."""
