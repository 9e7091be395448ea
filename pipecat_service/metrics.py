"""A metric of the service that Pipecat does not have."""

from loguru import logger
from pipecat.frames.frames import MetricsFrame
from pipecat.metrics.metrics import MetricsData
from pipecat.services.tts_service import TTSService


class SlotWaitMetricsData(MetricsData):
    """Waiting time of a turn because all slots of the engine were in use.

    Parameters:
        value: Seconds, until the audio that follows, or until the turn was interrupted or failed.
    """

    value: float


async def report_slot_wait(service: TTSService, seconds: float) -> None:
    """Logs the waiting time of a turn for a slot, and sends it as a metric if they are enabled.

    Args:
        service: The service that speaks the turn.
        seconds: Waiting time; 0 if there was none, which is not reported.
    """
    if not seconds:
        return
    logger.warning(
        f"{service} waited {seconds:.3f} s because all slots were in use; give the engine one slot "
        "per simultaneous call: TTS.load(slots=...), or `megakernel-tts serve --slots`."
    )
    if service.metrics_enabled:
        model = service.settings.given_fields().get("model")
        data = SlotWaitMetricsData(processor=service.name, model=model, value=seconds)
        await service.push_frame(MetricsFrame(data=[data]))
