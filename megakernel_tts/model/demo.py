"""Name and description of the included model."""

DEMO = "demo"
DEMO_NOTE = (
    "The demo model is a small demonstration voice, trained from synthetic speech. For natural "
    "speech name a released model, such as Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice, or a folder that "
    "holds one."
)
