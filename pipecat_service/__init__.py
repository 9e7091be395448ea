"""A text-to-speech service for Pipecat that runs `megakernel_tts.TTS` in the same process.

from megakernel_tts import TTS
from pipecat_service import MegakernelTTSService

engine = TTS.load()
await engine.awarmup()
tts = MegakernelTTSService(engine=engine)

With `MegakernelTTSService(model="demo")` the service loads the model itself.
"""

from pipecat_service.errors import ColdEngineError
from pipecat_service.metrics import SlotWaitMetricsData
from pipecat_service.settings import MegakernelTTSSettings
from pipecat_service.tts import MegakernelTTSService

__all__ = [
    "ColdEngineError",
    "MegakernelTTSService",
    "MegakernelTTSSettings",
    "SlotWaitMetricsData",
]
