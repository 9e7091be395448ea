"""Sends the audio and the words of speeches through audio contexts, in time for playback."""

import asyncio

from pipecat.frames.frames import TTSAudioRawFrame
from pipecat.services.tts_service import TTSService

from megakernel_tts import LivePolicy
from pipecat_service.audio import silence
from pipecat_service.contexts import ContextState
from pipecat_service.playhead import Playhead
from pipecat_service.speech import OutputChunk
from pipecat_service.words import unspaced

_LIVE = LivePolicy()
_POLL_INTERVAL_S = 0.1  # between two looks at the playhead
_MIN_SLEEP_S = 0.001  # a rounding error is too short for a clock
_PLACEHOLDER_S = 0.02  # silence in place of speech for text without words


class AudioSender:
    """Sends audio as it is made, up to `LivePolicy.max_lead_s` before it is played."""

    def __init__(self, service: TTSService, playhead: Playhead) -> None:
        """Sends through the audio contexts of a service.

        Args:
            service: The service.
            playhead: Follows the audio that leaves the service.
        """
        self._service = service
        self._playhead = playhead

    def lead_s(self, context: ContextState | None) -> float:
        """Seconds until the last output audio will have been played.

        Args:
            context: Its audio may wait behind other audio; None for audio that left the service.
        """
        remaining_s = self._playhead.remaining_s(self._service.get_clock().get_time())
        num_queued = context.num_queued if context is not None else 0
        return remaining_s + num_queued / self._service.sample_rate

    async def send(self, context: ContextState, chunk: OutputChunk) -> None:
        """Sends audio, with the words that begin in it before it."""
        context_id = context.context_id
        if not self._service.audio_context_available(context_id):
            # Pipecat has ended it by timeout. It drops words of such a context, but not audio.
            if context_id != self._service._turn_context_id:
                return
            await self._service.create_audio_context(context_id)
        for word in chunk.words:
            await self._service.add_word_timestamps(
                [(word.text, word.start)],
                context_id,
                includes_inter_frame_spaces=unspaced(word.text),
            )
        if len(chunk.pcm):
            await self._send_audio(context, chunk.pcm.tobytes())

    async def send_placeholder(self, context: ContextState) -> None:
        """Sends a short silence unless the audio context has audio.

        Pipecat disables a service after three audio contexts without audio.
        """
        if not context.has_audio:
            await self._send_audio(context, silence(_PLACEHOLDER_S, self._service.sample_rate))

    async def _send_audio(self, context: ContextState, pcm: bytes) -> None:
        frame = TTSAudioRawFrame(pcm, self._service.sample_rate, 1, context_id=context.context_id)
        context.has_audio = True
        context.num_queued += frame.num_frames
        await self._service.append_to_audio_context(context.context_id, frame)

    async def wait_for_playback(self, context: ContextState) -> None:
        """Waits while as much audio as is allowed was sent and not yet played."""
        # There is no event for the progress or the interruption of playback.
        while (early_s := self.lead_s(context) - _LIVE.max_lead_s) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(max(early_s, _MIN_SLEEP_S), _POLL_INTERVAL_S))
