"""Pipecat's text-to-speech service over a `megakernel_tts.TTS`.

from megakernel_tts import TTS
from pipecat_service import MegakernelTTSService

engine = TTS.load()
await engine.awarmup()
tts = MegakernelTTSService(engine=engine)

One conversation may leave the loading to the service: `MegakernelTTSService(model="demo")`.
"""

from pipecat_service.errors import ColdEngineError
from pipecat_service.settings import MegakernelTTSSettings
from pipecat_service.tts import MegakernelTTSService

__all__ = ["ColdEngineError", "MegakernelTTSService", "MegakernelTTSSettings"]
