"""The services' common part: translates between Pipecat's frames and sessions of speech."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pipecat.frames.frames import (
    AggregatedTextFrame,
    CancelFrame,
    Frame,
    InterruptionFrame,
    TextFrame,
    TTSStoppedFrame,
)
from pipecat.processors.frame_processor import FrameDirection, FrameProcessorSetup
from pipecat.services.settings import TTSSettings
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory
from pipecat.utils.text.base_text_aggregator import Aggregation
from pipecat.utils.tracing.service_decorators import traced_tts
from pipecat.utils.types import NOT_GIVEN, assert_given, is_given

from megakernel_tts import EngineClosedError, Finish, MegakernelTTSError
from pipecat_service.contexts import ContextState
from pipecat_service.errors import error_category, report_error
from pipecat_service.metrics import report_slot_wait
from pipecat_service.pace import WritingPace
from pipecat_service.pauses import PauseTimer, TextPauseFrame
from pipecat_service.protocol import Synthesizer
from pipecat_service.rewriting import TextRewriting
from pipecat_service.settings import MegakernelTTSSettings, language_name
from pipecat_service.spacing import GroupSpacing
from pipecat_service.speech import Speech
from pipecat_service.timed import TimedTTSService
from pipecat_service.words import WordGroup, WordGroupAggregator, has_words

_CONTEXT_TIMEOUT_S = 20.0  # without audio, after which Pipecat ends a context


class SynthesizerTTSService(TimedTTSService):
    """A service whose speech comes from a `Synthesizer`.

    Text is passed on in groups of words while the language model writes it. Each turn is one
    session, so that prosody carries over sentences. Audio is sent as it is made, at most 1.5 s
    before it is played. An interruption stops the session within a codec frame (80 ms).

    Words carry times, so that after an interruption the conversation holds the words spoken so far.

    Attributes:
        word_times_estimated: Whether word times are estimates: the model's attention was not
            calibrated (`megakernel-tts calibrate`), or the model is not known yet.
    """

    Settings = MegakernelTTSSettings
    _settings: MegakernelTTSSettings  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, synthesizer: Synthesizer, settings: MegakernelTTSSettings, **kwargs: Any
    ) -> None:
        """Creates a service.

        Args:
            synthesizer: Opens the sessions.
            settings: Initial settings, each of which is given.
            **kwargs: For `TTSService`; see `check_keywords`.
        """
        super().__init__(stop_frame_timeout_s=_CONTEXT_TIMEOUT_S, settings=settings, **kwargs)
        pace = WritingPace(speed=lambda: assert_given(self._settings.speed) or 1.0)
        self._words = WordGroupAggregator(
            language=self.text_aggregation_language, pace=pace, rewriting=TextRewriting(self)
        )
        self._text_aggregator = self._words
        self._pause_timer = PauseTimer(self, self._words, self._turn_context, self._sender.lead_s)
        self._synthesizer = synthesizer

    async def setup(self, setup: FrameProcessorSetup) -> None:
        """Prepares the synthesizer. Called by Pipecat.

        Args:
            setup: Setup of the pipeline.

        Raises:
            MegakernelTTSError: See `Synthesizer.load`.
        """
        await super().setup(setup)
        await self._synthesizer.load(self._settings)
        self._sync_model_name_to_metrics()  # a server has named it
        self._pause_timer.start()

    @property
    def word_times_estimated(self) -> bool:
        """See the class."""
        return not self._synthesizer.aligned

    def can_generate_metrics(self) -> bool:
        """Whether the service reports metrics: it does."""
        return True

    @property
    def supports_processing_metrics(self) -> bool:
        """Whether `run_tts` lasts as long as the synthesis: no, it returns at once."""
        return False

    def _classify_error(self, exception: Exception) -> ErrorCategory | None:
        """Pipecat's category of an error that `setup` raised."""
        return error_category(exception) if isinstance(exception, MegakernelTTSError) else None

    def language_to_service_language(self, language: Language) -> str | None:
        """The model's name of a language; None if it has none."""
        return language_name(language)

    # Text

    def _prepare_text_for_tts(self, text: str) -> str:
        """Removes the spaces at the ends: traces join the groups of a turn by spaces."""
        return text.strip(" ")

    @traced_tts
    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Passes text to the context's session; the audio is sent through the context.

        Args:
            text: A group of words, or the whole text of a `TTSSpeakFrame`.
            context_id: Context of the turn.

        Yields:
            None.
        """
        await self.start_tts_usage_metrics(text)
        context = self._context(context_id)
        try:
            await self._push_text(text, context)
        except MegakernelTTSError as error:
            await self._fail(context, error)
        else:
            if context_id != self._turn_context_id:
                await self.flush_audio(context_id)  # text outside a turn has no end frame
        yield None

    async def _push_text(self, text: str, context: ContextState) -> None:
        if context.failed:
            return
        if context.speech is None:
            text = context.wordless_text + text
            context.wordless_text = ""
            if not has_words(text):
                context.wordless_text = text
                await self._sender.send_placeholder(context)
                return
            context.speech = await self._open(context)
        context.speech.push_text(text)

    async def _open(self, context: ContextState) -> Speech:
        """Opens a context's session."""
        session = await self._synthesizer.open(self._settings)
        self._sync_model_name_to_metrics()
        speech = Speech(session, self.sample_rate)
        context.reader = self.create_task(
            self._read(context, speech), f"speech {context.context_id}"
        )
        return speech

    async def flush_audio(self, context_id: str | None = None) -> None:
        """Ends a context's text; its speech continues to the end.

        Args:
            context_id: The context; None for the one that is playing.
        """
        context = self._contexts.get(context_id or self.get_active_audio_context_id() or "")
        if context is None:
            return
        if context.speech is not None:
            context.speech.end_text()
        elif self.audio_context_available(context.context_id):
            if context.wordless_text:
                await self._sender.send_placeholder(context)
                context.spoken = True
            await self._close(context)

    async def on_turn_context_completed(self) -> None:
        """Ends the text of the turn."""
        await self._reopen_turn_context()
        await super().on_turn_context_completed()

    async def _reopen_turn_context(self) -> None:
        """Opens the turn's audio context for its end, if Pipecat has ended it by timeout."""
        context = self._turn_context()
        if context is None or self.audio_context_available(context.context_id):
            return
        if context.speech is not None or context.wordless_text:
            await self.create_audio_context(context.context_id)
        else:
            await self._drop(context)

    # Audio

    async def _read(self, context: ContextState, speech: Speech) -> None:
        """Sends the audio of a session as it is made."""
        async with aclosing(aiter(speech.session)) as events:
            async for event in events:
                if not isinstance(event, Finish):
                    await report_slot_wait(self, speech.take_slot_wait_s())
                    await self._sender.send(context, speech.process(event))
                    await self._sender.wait_for_playback(context)
                elif context.speech is speech:
                    await self._finish(context, speech, event)

    async def _finish(self, context: ContextState, speech: Speech, finish: Finish) -> None:
        if finish.reason == "cancelled":  # by the engine: `_drop` ends the reader first
            await self._fail(context, EngineClosedError("The engine was closed while it spoke."))
        elif finish.error is not None:
            await self._fail(context, finish.error)
        else:
            await self._sender.send(context, speech.end())
            # Words of speech that was cut off, or had no sound, were not played.
            context.spoken = finish.reason == "eos" and speech.has_output
            await self._sender.send_placeholder(context)
            await self._close(context)

    async def _close(self, context: ContextState) -> None:
        """Ends an audio context after the audio that was sent."""
        context.reader = None
        context_id = context.context_id
        if not self.audio_context_available(context_id):  # Pipecat has ended it by timeout
            await self._drop(context)
            return
        await self.append_to_audio_context(context_id, TTSStoppedFrame(context_id=context_id))
        await self.remove_audio_context(context_id)

    async def _fail(self, context: ContextState, error: MegakernelTTSError) -> None:
        """Reports an error. The audio sent before is kept; the rest of the turn gets a new context.

        If no audio was sent, another attempt is likely to fail as well: the turn is dropped.
        """
        await report_error(self, error)
        speech, context.speech = context.speech, None
        if speech is not None:
            speech.session.cancel()
            await report_slot_wait(self, speech.take_slot_wait_s())
        context.failed = True
        if speech is not None and speech.has_output:
            self._renew_turn_context(context.context_id)
        if context.context_id != self._turn_context_id:  # otherwise the end of the text closes it
            await self._close(context)

    def _renew_turn_context(self, context_id: str) -> None:
        """Gives the rest of the turn's text a context of its own."""
        if self._turn_context_id == context_id:
            self._turn_context_id = None
            self._turn_context_id = self.create_context_id()

    # Settings

    async def _update_settings(self, delta: TTSSettings) -> dict[str, Any]:
        """Applies valid settings and reports others; the turn continues in a new context."""
        if is_given(delta.model) and delta.model != self._settings.model:
            self._warn_unhandled_updated_settings({"model"})
        delta = replace(delta, model=NOT_GIVEN)
        language = self._settings.language
        if check := await self._synthesizer.settings_check():
            delta, errors = check.accepted(self._settings, delta)
            for error in errors:  # of the application: the service still speaks as before
                await self.push_error(str(error), error, category=ErrorCategory.APPLICATION)
        changed = await super()._update_settings(delta)
        if check:
            check.resolve_language(self._settings)
        if self._settings.language == language:
            changed.pop("language", None)
        else:
            changed["language"] = language
        context_id = self._turn_context_id
        if changed and context_id is not None:
            await self._reopen_turn_context()
            if self.audio_context_available(context_id):
                await self.flush_audio(context_id)
            self._renew_turn_context(context_id)
        return changed

    # Interruption and end

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Handles a frame."""
        if isinstance(frame, TextPauseFrame):
            await self._handle_text_pause()
        else:
            await super().process_frame(frame, direction)
        if isinstance(frame, TextPauseFrame | TextFrame):
            self._pause_timer.notify()
        if isinstance(frame, InterruptionFrame):
            for context in [*self._contexts.values()]:  # that Pipecat has ended by timeout
                if not self.audio_context_available(context.context_id):
                    await self._drop(context)
            # The output discards its audio, except speech that may not be interrupted.
            if not self.has_active_audio_context():
                self._playhead.clear()

    async def _handle_text_pause(self) -> None:
        """Speaks held text if it is due: first complete words, then the last one as well."""
        if self._words.until_release_s <= 0:
            await self._speak_group(await self._words.release(last_word=False))
        due = self._pause_timer.until_flush_s <= 0
        if self._pause_timer.until_pause_flush_s <= 0:
            await self._speak_group(await self._words.release(last_word=True))
        context = self._turn_context()
        if due and context and context.speech:
            context.speech.flush(within_phrase=self._words.within_phrase)
            self._words.restart_speech()

    async def _speak_group(self, group: Aggregation | None) -> None:
        if group is not None:
            await self.stop_text_aggregation_metrics()
            await self._handle_aggregated_text(self._aggregated_text_frame(group))

    def _aggregated_text_frame(self, aggregation: Aggregation) -> AggregatedTextFrame:
        """The frame of a group of words."""
        frame = super()._aggregated_text_frame(aggregation)
        if isinstance(aggregation, WordGroup) and self._turn_context_id is not None:
            if aggregation.continues_word or aggregation.may_continue:
                spacing = self._context(self._turn_context_id).spacing
                spacing[frame.id] = GroupSpacing(aggregation)
        return frame

    def _turn_context(self) -> ContextState | None:
        """The context of the turn that is being written, if it has text."""
        return self._contexts.get(self._turn_context_id or "")

    async def on_audio_context_interrupted(self, context_id: str) -> None:
        """Stops the session of a context within a codec frame.

        Args:
            context_id: A context that may be interrupted.
        """
        await self.stop_all_metrics()
        if context := self._contexts.get(context_id):
            await self._drop(context)

    async def on_audio_context_completed(self, context_id: str) -> None:
        """Drops a context that has been sent to its end.

        Args:
            context_id: The context. If Pipecat ended it by timeout, its turn may continue.
        """
        context = self._contexts.get(context_id)
        if context is not None and context_id != self._turn_context_id:
            await self._drop(context)

    async def _drop(self, context: ContextState) -> None:
        """Drops a context and stops its session."""
        self._contexts.pop(context.context_id, None)
        if context.speech is not None:
            context.speech.session.cancel()
            await report_slot_wait(self, context.speech.take_slot_wait_s())
        if context.reader is not None:
            await self.cancel_task(context.reader)

    async def cancel(self, frame: CancelFrame) -> None:
        """Stops all speech at once.

        Args:
            frame: The frame that cancels the pipeline.
        """
        await super().cancel(frame)
        await self._teardown()

    async def cleanup(self) -> None:
        """Stops all speech and releases the synthesizer."""
        try:
            await super().cleanup()
            await self._teardown()
        finally:
            await self._synthesizer.close()

    async def _teardown(self) -> None:
        await self._pause_timer.stop()
        for context in [*self._contexts.values()]:
            await self._drop(context)
