"""Engines in processes of their own, one per GPU, behind one front process.

`supervisor` is the entry. It starts and restarts processes through `client`, whose other end is
`engine_process`. The two ends exchange `messages` over a `channel`, and audio in an `audio_ring`.
"""
