"""Speaks a sentence into hello.wav; the first argument may name another model."""

import sys

from megakernel_tts import TTS

with TTS.load(sys.argv[1] if len(sys.argv) > 1 else "demo") as tts:
    speech = tts.say("Hello, it is good to hear you.")
    speech.save("hello.wav")
    print(f"{speech.seconds:.1f} s in hello.wav ({speech.finish})")
