"""Text-to-speech services for Pipecat.

`MegakernelTTSService` runs `megakernel_tts.TTS` in the same process:

    from megakernel_tts import TTS
    from pipecat_service import MegakernelTTSService

    engine = TTS.load()
    await engine.awarmup()
    tts = MegakernelTTSService(engine=engine)

With `MegakernelTTSService(model="demo")` the service loads the model itself.
`pipecat_service.remote.MegakernelRemoteTTSService` uses a server, and neither imports torch nor
needs it.
"""

from typing import TYPE_CHECKING, Any

from pipecat_service.errors import ColdEngineError, ServerError
from pipecat_service.metrics import SlotWaitMetricsData
from pipecat_service.settings import MegakernelTTSSettings

if TYPE_CHECKING:
    from pipecat_service.local import MegakernelTTSService

__all__ = [
    "ColdEngineError",
    "MegakernelTTSService",
    "MegakernelTTSSettings",
    "ServerError",
    "SlotWaitMetricsData",
]


def __getattr__(name: str) -> Any:
    if name == "MegakernelTTSService":  # imports torch, which the remote service does without
        from pipecat_service.local import MegakernelTTSService

        return MegakernelTTSService
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
