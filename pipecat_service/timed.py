"""Commits words to the conversation when their audio is played."""

from typing import Any

from pipecat.frames.frames import Frame, TTSAudioRawFrame, TTSStoppedFrame, TTSTextFrame
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.tts_service import TTSService

from pipecat_service.contexts import ContextState
from pipecat_service.playhead import Playhead
from pipecat_service.sending import AudioSender


class TimedTTSService(TTSService):
    """A service that times words from the audio that it sends.

    Pipecat times the words of an audio context from its first audio. This class adds the audio that
    was sent before, gaps in it, and contexts that Pipecat ends by timeout and opens again.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Creates a service without audio.

        Args:
            **kwargs: For `TTSService`.
        """
        super().__init__(
            push_start_frame=True,
            push_stop_frames=False,
            push_text_frames=False,  # word timestamps push them
            **kwargs,
        )
        self._contexts: dict[str, ContextState] = {}
        self._playhead = Playhead()
        self._sender = AudioSender(self, self._playhead)

    def _context(self, context_id: str) -> ContextState:
        """State of a context, from its first text on."""
        return self._contexts.setdefault(context_id, ContextState(context_id))

    async def create_audio_context(self, context_id: str) -> None:
        """Opens an audio context, or opens it again after Pipecat ended it by timeout.

        Args:
            context_id: The context.
        """
        self._context(context_id).has_audio = False
        await super().create_audio_context(context_id)

    async def push_frame(
        self, frame: Frame, direction: FrameDirection = FrameDirection.DOWNSTREAM
    ) -> None:
        """Pushes a frame; adds its audio to the playhead."""
        context = self._contexts.get(getattr(frame, "context_id", None) or "")
        if isinstance(frame, TTSAudioRawFrame):
            duration_s = frame.num_frames / frame.sample_rate
            self._playhead.add(self.get_clock().get_time(), duration_s)
            if context is not None:
                context.played_s += duration_s
                context.num_queued -= frame.num_frames
        elif isinstance(frame, TTSStoppedFrame):
            self._playhead.end_speech(self.get_clock().get_time())
        elif isinstance(frame, TTSTextFrame) and context is not None:
            if spacing := context.spacing.get(frame.segment_id or 0):
                spacing.apply(frame)
        await super().push_frame(frame, direction)

    async def start_word_timestamps(self) -> None:
        """Times words from the start of their audio, after the audio that was sent before."""
        context = self._contexts.get(self.get_active_audio_context_id() or "")
        played_s = context.played_s if context is not None else 0.0
        self._playhead.begin_speech(self.get_clock().get_time(), played_s)
        tracker = self._word_timestamp_tracker
        tracker.last_pts = max(tracker.last_pts, self._playhead.end_ns)
        await super().start_word_timestamps()

    async def _add_word_timestamps(
        self,
        word_times: list[tuple[str, float]],
        context_id: str | None = None,
        includes_inter_frame_spaces: bool = False,
    ) -> None:
        """Sends words ahead of their audio; gaps in the audio sent before delay them."""
        started = self._word_timestamp_tracker.started  # otherwise kept until the first audio
        delay_s = self._playhead.delay_s(self.get_clock().get_time()) if started else 0.0
        delayed = [(word, start_s + delay_s) for word, start_s in word_times]
        await super()._add_word_timestamps(delayed, context_id, includes_inter_frame_spaces)

    async def _apply_force_complete(self, context_id: str) -> None:
        """Commits a context's last words, unless it ended before they were spoken."""
        context = self._contexts.get(context_id)
        if context is not None and context.spoken and self.is_usable:
            await super()._apply_force_complete(context_id)
            return
        open_turn = context_id == self._turn_context_id
        if not (open_turn and context is not None and not context.failed):
            self._aggregated_frame_sequencer.clear(keep_contexts={*self._contexts} - {context_id})
        # Otherwise Pipecat ended the context by timeout, and more of its turn may follow.
