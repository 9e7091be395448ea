"""Talker, code predictor and sampling: the backend protocol and its two implementations."""
