"""The service: translates between Pipecat's frames and sessions of the engine."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pipecat.frames.frames import (
    CancelFrame,
    Frame,
    InterruptionFrame,
    TextFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.processors.frame_processor import FrameDirection, FrameProcessorSetup
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TTSService
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory
from pipecat.utils.tracing.service_decorators import traced_tts
from pipecat.utils.types import NOT_GIVEN, assert_given, is_given

from megakernel_tts import (
    TTS,
    AudioChunk,
    ChunkPolicy,
    EngineClosedError,
    Finish,
    MegakernelTTSError,
    Voice,
)
from pipecat_service.arguments import check_keywords, choose_model
from pipecat_service.audio import silence
from pipecat_service.errors import report_error
from pipecat_service.metrics import report_slot_wait
from pipecat_service.pace import WritingPace
from pipecat_service.pauses import PauseWatch, TextPauseFrame
from pipecat_service.playhead import Playhead
from pipecat_service.rewriting import TextRewriting
from pipecat_service.settings import MegakernelTTSSettings, default_settings, language_name
from pipecat_service.speech import OutputChunk, Speech
from pipecat_service.synthesizer import Synthesizer
from pipecat_service.words import WordGroupAggregator, has_words, unspaced

# Together 2.5 s: audio that a barge-in discards at most, and the delay of a busy engine that
# playback tolerates.
_MAX_LEAD_S = 1.5  # audio sent before it is played
_CHUNKS = ChunkPolicy(first=1, largest=4, ahead=12)  # and 12 frames (1 s) made before they are sent

_POLL_INTERVAL_S = 0.1  # between two looks at the playhead
_MIN_SLEEP_S = 0.001  # a rounding error is too short for a clock
_CONTEXT_TIMEOUT_S = 20.0  # without audio, after which Pipecat ends a context
_PLACEHOLDER_S = 0.02  # silence in place of speech for text without words


class MegakernelTTSService(TTSService):
    """Text-to-speech in a Pipecat pipeline with an engine in the same process.

    Text is passed to the engine in groups of words while the language model writes it. Each turn is
    one session, so that prosody carries over sentences. Audio is sent as it is made, at most 1.5 s
    before it is played. An interruption stops the engine within a frame (80 ms).

    Words carry times, so that after an interruption the conversation holds the words spoken so far.

    Services may share one engine, which needs a slot for each that speaks at the same time. A
    server loads it before its first caller and passes it to each service (`engine`). A program with
    one conversation may name a `model` instead, which is loaded while the pipeline is set up.

    Attributes:
        word_times_estimated: Whether word times are estimates: the model's attention was not
            calibrated (`megakernel-tts calibrate`), or no model is loaded yet.
    """

    Settings = MegakernelTTSSettings
    _settings: MegakernelTTSSettings  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        *,
        engine: TTS | None = None,
        model: str | os.PathLike[str] | None = None,
        voices: Mapping[str, Voice] | None = None,
        settings: MegakernelTTSSettings | None = None,
        **kwargs: Any,
    ) -> None:
        """Creates a service. This is cheap; create one for each pipeline.

        Args:
            engine: An engine that is loaded and warmed up; the caller closes it.
            model: Instead of an engine: `demo`, a checkpoint's folder or a hub id, also given as
                `Settings(model=...)`. Services of one event loop that name the same model share its
                engine; the last that is cleaned up closes it. Pipecat waits 20 s for loading:
                `PipelineWorker(setup_timeout_secs=...)`. If the model cannot be loaded or lacks the
                voice, the error is permanent.
            voices: Cloned voices by name, for `Settings.voice` with a Base model.
            settings: Initial settings; the default of each is the model's.
            **kwargs: For `TTSService`, such as `sample_rate` and `text_transforms`.

        Raises:
            TypeError: An argument is unknown or of another type, or the service sets it itself.
            ValueError: Both an engine and a model were given, or neither; or
                `text_aggregation_mode` is `TOKEN`.
            ColdEngineError: The engine was not warmed up.
            MegakernelTTSError: A setting is invalid; see `SettingsCheck.complete`.
        """
        check_keywords(kwargs)
        model = choose_model(engine, model, settings)
        chosen = default_settings(engine.info.name if engine is not None else str(model))
        if settings is not None:
            chosen.apply_update(settings)
        super().__init__(
            push_start_frame=True,
            push_stop_frames=False,
            push_text_frames=False,  # word timestamps push them
            stop_frame_timeout_s=_CONTEXT_TIMEOUT_S,
            settings=chosen,
            **kwargs,
        )
        pace = WritingPace(speed=lambda: assert_given(self._settings.speed) or 1.0)
        self._words = WordGroupAggregator(
            language=self.text_aggregation_language, pace=pace, rewriting=TextRewriting(self)
        )
        self._text_aggregator = self._words
        self._pause_watch = PauseWatch(
            self, self._words, lambda: self._speeches.get(self._turn_context_id or ""), self._lead_s
        )
        self._synthesizer = Synthesizer(model, voices or {})
        if engine is not None:
            self._synthesizer.set_engine(engine, self._settings)
        self._speeches: dict[str, Speech] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._wordless_text: dict[str, str] = {}  # of contexts whose text has no words so far
        self._failed: set[str] = set()  # contexts
        self._spoken: set[str] = set()  # contexts whose text was spoken to its end
        self._playhead = Playhead()

    async def setup(self, setup: FrameProcessorSetup) -> None:
        """Loads and warms up the model on a thread, if one was named. Called by Pipecat.

        Args:
            setup: Setup of the pipeline.

        Raises:
            CheckpointError: The model is missing or broken.
            MegakernelTTSError: A setting is invalid; see `SettingsCheck.complete`.
        """
        await super().setup(setup)
        await self._synthesizer.load(self._settings)
        self._pause_watch.start()

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
        try:
            await self._push_text(text, context_id)
        except MegakernelTTSError as error:
            await self._fail(context_id, error)
        else:
            if context_id != self._turn_context_id:
                await self.flush_audio(context_id)  # text outside a turn has no end frame
        yield None

    async def _push_text(self, text: str, context_id: str) -> None:
        if context_id in self._failed:
            return
        speech = self._speeches.get(context_id)
        if speech is None:
            text = self._wordless_text.pop(context_id, "") + text
            if not has_words(text):
                self._wordless_text[context_id] = text
                return
            speech = await self._open(context_id)
        speech.push_text(text)

    async def _open(self, context_id: str) -> Speech:
        """Opens the context's session."""
        session = await self._synthesizer.open(self._settings, _CHUNKS)
        speech = self._speeches[context_id] = Speech(session, self.sample_rate)
        reader = self.create_task(self._read(context_id, speech), f"speech {context_id}")
        self._readers[context_id] = reader
        return speech

    async def flush_audio(self, context_id: str | None = None) -> None:
        """Ends a context's text; its speech continues to the end.

        Args:
            context_id: The context; None for the one that is playing.
        """
        context_id = context_id or self.get_active_audio_context_id()
        if context_id is None:
            return
        if speech := self._speeches.get(context_id):
            speech.end_text()
        elif self.audio_context_available(context_id):
            if self._wordless_text.pop(context_id, None) is not None:
                await self._send_placeholder(context_id)
                self._spoken.add(context_id)
            await self._close(context_id)

    # Audio

    async def _read(self, context_id: str, speech: Speech) -> None:
        """Sends the audio of a session as it is made, up to `_MAX_LEAD_S` before playback."""
        async with aclosing(aiter(speech.session)) as events:
            async for event in events:
                if isinstance(event, AudioChunk):
                    if (waited_s := speech.take_slot_wait_s()) > 0:
                        await report_slot_wait(self, waited_s)
                    await self._send(context_id, speech.process(event))
                    # There is no event for the progress or the interruption of playback.
                    while (early_s := self._lead_s(speech) - _MAX_LEAD_S) > 0:  # noqa: ASYNC110
                        await asyncio.sleep(min(max(early_s, _MIN_SLEEP_S), _POLL_INTERVAL_S))
                elif self._speeches.get(context_id) is speech:
                    await self._finish(context_id, speech, event)

    def _lead_s(self, speech: Speech) -> float:
        """Seconds until the last output audio will have been played."""
        return self._playhead.remaining_s(self.get_clock().get_time()) + speech.queued_s

    async def _send(self, context_id: str, chunk: OutputChunk) -> None:
        for word in chunk.words:
            await self.add_word_timestamps(
                [(word.text, word.start)],
                context_id,
                includes_inter_frame_spaces=unspaced(word.text),
            )
        if len(chunk.pcm):
            await self._send_audio(context_id, chunk.pcm.tobytes())

    async def _send_audio(self, context_id: str, pcm: bytes) -> None:
        frame = TTSAudioRawFrame(pcm, self.sample_rate, 1, context_id=context_id)
        await self.append_to_audio_context(context_id, frame)

    async def _send_placeholder(self, context_id: str) -> None:
        """Sends a short silence: Pipecat disables a service whose turns have no audio."""
        await self._send_audio(context_id, silence(_PLACEHOLDER_S, self.sample_rate))

    async def _finish(self, context_id: str, speech: Speech, finish: Finish) -> None:
        if finish.reason == "cancelled":  # by the engine: `_drop` ends the reader first
            await self._fail(context_id, EngineClosedError("The engine was closed while it spoke."))
        elif finish.error is not None:
            await self._fail(context_id, finish.error)
        else:
            await self._send(context_id, speech.end())
            if not speech.has_output:
                await self._send_placeholder(context_id)
            self._spoken.add(context_id)
            await self._close(context_id)

    async def _close(self, context_id: str) -> None:
        """Ends an audio context after the audio that was sent."""
        self._speeches.pop(context_id, None)
        self._readers.pop(context_id, None)
        self._wordless_text.pop(context_id, None)
        await self.append_to_audio_context(context_id, TTSStoppedFrame(context_id=context_id))
        await self.remove_audio_context(context_id)

    async def _fail(self, context_id: str, error: MegakernelTTSError) -> None:
        """Reports an error. The audio sent before is kept; the rest of the turn gets a new context.

        If no audio was sent, another attempt would fail as well: the rest of the turn is dropped.
        """
        await report_error(self, error)
        speech = self._speeches.pop(context_id, None)
        if speech is not None:
            speech.session.cancel()
        self._failed.add(context_id)
        if speech is not None and speech.has_output:
            self._renew_turn_context(context_id)
        if context_id != self._turn_context_id:  # otherwise the end of the turn's text closes it
            await self._close(context_id)

    def _renew_turn_context(self, context_id: str) -> None:
        """Gives the rest of the turn's text a context of its own."""
        if self._turn_context_id == context_id:
            self._turn_context_id = None
            self._turn_context_id = self.create_context_id()

    # Playback

    async def push_frame(
        self, frame: Frame, direction: FrameDirection = FrameDirection.DOWNSTREAM
    ) -> None:
        """Pushes a frame; adds its audio to the playhead."""
        if isinstance(frame, TTSAudioRawFrame):
            duration_s = frame.num_frames / frame.sample_rate
            self._playhead.add(self.get_clock().get_time(), duration_s)
            if speech := self._speeches.get(frame.context_id or ""):
                speech.queued_s -= duration_s
        elif isinstance(frame, TTSStoppedFrame):
            self._playhead.end_speech(self.get_clock().get_time())
        await super().push_frame(frame, direction)

    async def start_word_timestamps(self) -> None:
        """Times words from the start of their audio, after the audio that was sent before."""
        self._playhead.begin_speech(self.get_clock().get_time())
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
        underrun_s = self._playhead.underrun_s(self.get_clock().get_time()) if started else 0.0
        delayed = [(word, start_s + underrun_s) for word, start_s in word_times]
        await super()._add_word_timestamps(delayed, context_id, includes_inter_frame_spaces)

    async def _apply_force_complete(self, context_id: str) -> None:
        """Commits a context's last words, unless it ended before they were spoken."""
        paused = context_id == self._turn_context_id and context_id in self._speeches
        if context_id in self._spoken and self.is_usable:
            await super()._apply_force_complete(context_id)
        elif not paused:  # otherwise Pipecat ended it by timeout, and its next audio opens it again
            others = {other for other in self.get_audio_contexts() if other != context_id}
            self._aggregated_frame_sequencer.clear(keep_contexts=others)

    # Settings

    async def _update_settings(self, delta: TTSSettings) -> dict[str, Any]:
        """Applies valid settings and reports others; the turn continues in a new context."""
        if is_given(delta.model) and delta.model != self._settings.model:
            self._warn_unhandled_updated_settings({"model"})
        delta = replace(delta, model=NOT_GIVEN)
        language = self._settings.language
        if check := self._synthesizer.check:
            delta, errors = check.accepted(delta)
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
            if self.audio_context_available(context_id):
                await self.flush_audio(context_id)
            self._renew_turn_context(context_id)
        return changed

    # Interruption and end

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Handles a frame."""
        if isinstance(frame, TextPauseFrame):
            if self._words.until_release_s <= 0 and (group := await self._words.release()):
                await self._handle_aggregated_text(self._aggregated_text_frame(group))
            self._pause_watch.flush_if_due()
        else:
            await super().process_frame(frame, direction)
        if isinstance(frame, TextPauseFrame | TextFrame):
            self._pause_watch.notify()
        # The output discards its audio, except speech that may not be interrupted.
        if isinstance(frame, InterruptionFrame) and not self.has_active_audio_context():
            self._playhead.clear()

    async def on_audio_context_interrupted(self, context_id: str) -> None:
        """Stops the session of a context within a frame of the engine.

        Args:
            context_id: A context that may be interrupted.
        """
        await self.stop_all_metrics()
        await self._drop(context_id)

    async def on_audio_context_completed(self, context_id: str) -> None:
        """Drops a context that has been sent to its end.

        Args:
            context_id: The context. If Pipecat ended it by timeout, its turn may continue.
        """
        self._failed.discard(context_id)
        self._spoken.discard(context_id)
        if context_id != self._turn_context_id:
            await self._drop(context_id)

    async def _drop(self, context_id: str) -> None:
        """Drops a context and stops its session."""
        self._wordless_text.pop(context_id, None)
        self._failed.discard(context_id)
        self._spoken.discard(context_id)
        speech = self._speeches.pop(context_id, None)
        if speech is not None:
            speech.session.cancel()
        reader = self._readers.pop(context_id, None)
        if reader is not None:
            await self.cancel_task(reader)

    async def cancel(self, frame: CancelFrame) -> None:
        """Stops all speech at once.

        Args:
            frame: The frame that cancels the pipeline.
        """
        await super().cancel(frame)
        await self._teardown()

    async def cleanup(self) -> None:
        """Releases the engine, which is closed if it was loaded by name and has no other user."""
        await super().cleanup()
        await self._teardown()
        await self._synthesizer.close()

    async def _teardown(self) -> None:
        await self._pause_watch.stop()
        for context_id in [*self._readers]:
            await self._drop(context_id)
