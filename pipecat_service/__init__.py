"""Speech services for Pipecat.

`MegakernelTTSService` runs `megakernel_tts.TTS` in the same process:

    from megakernel_tts import TTS
    from pipecat_service import MegakernelTTSService

    engine = TTS.load()
    await engine.awarmup()
    tts = MegakernelTTSService(engine=engine)

With `MegakernelTTSService(model="demo")` the service loads the model itself.
`pipecat_service.remote.MegakernelRemoteTTSService` uses a server, and neither imports torch nor
needs it.

`MegakernelSTTService` recognises speech with `megakernel_stt.STT`, which is loaded and warmed up in
the same way.
"""

from typing import TYPE_CHECKING, Any

from pipecat_service.errors import ColdEngineError, ServerError
from pipecat_service.metrics import SlotWaitMetricsData
from pipecat_service.settings import MegakernelTTSSettings
from pipecat_service.stt_settings import MegakernelSTTSettings

if TYPE_CHECKING:
    from pipecat_service.local import MegakernelTTSService
    from pipecat_service.stt import MegakernelSTTService

__all__ = [
    "ColdEngineError",
    "MegakernelSTTService",
    "MegakernelSTTSettings",
    "MegakernelTTSService",
    "MegakernelTTSSettings",
    "ServerError",
    "SlotWaitMetricsData",
]


def __getattr__(name: str) -> Any:
    if name == "MegakernelTTSService":  # imports torch, which the remote service does without
        from pipecat_service.local import MegakernelTTSService

        return MegakernelTTSService
    if name == "MegakernelSTTService":
        from pipecat_service.stt import MegakernelSTTService

        return MegakernelSTTService
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
