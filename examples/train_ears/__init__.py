"""Trains a small streaming recogniser in the released file layout from synthetic speech."""
