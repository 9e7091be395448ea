"""The teacher: Kokoro-82M in torch."""
