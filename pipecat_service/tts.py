"""The service: Pipecat's frames on one side, sessions of the engine on the other."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from pipecat.frames.frames import (
    CancelFrame,
    Frame,
    InterruptionFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.processors.frame_processor import FrameDirection, FrameProcessorSetup
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TTSService
from pipecat.transcriptions.language import Language
from pipecat.utils.tracing.service_decorators import traced_tts

from megakernel_tts import (
    TTS,
    AudioChunk,
    ChunkPolicy,
    EngineClosedError,
    Finish,
    MegakernelTTSError,
    Voice,
)
from pipecat_service.audio import silence
from pipecat_service.errors import category, permanent
from pipecat_service.playhead import Playhead
from pipecat_service.settings import MegakernelTTSSettings, default_settings, language_name
from pipecat_service.speech import Portion, Speech
from pipecat_service.synthesizer import Synthesizer
from pipecat_service.words import WordGroupAggregator, has_words, unspaced

# Together 2.5 s: what a barge-in can waste, and what a busy engine may be late by.
_AHEAD = 1.5  # seconds sent before they are played
_CHUNKS = ChunkPolicy(first=1, largest=4, ahead=12)  # and 12 frames (1 s) made before they are sent

_NAP = 0.1  # seconds after which to look again

_PATIENCE = 20.0  # seconds without audio after which Pipecat gives a context up
_BLANK = 0.02  # seconds of silence in place of speech, where the text has no words


class MegakernelTTSService(TTSService):
    """Speaks in a Pipecat pipeline with an engine in the same process.

    Text goes to the engine in groups of words while the language model writes it; each turn is one
    session, so that prosody carries over its sentences. Audio leaves as it is made, at most a few
    seconds before it is played. An interruption stops the engine within a frame (80 ms).

    Words carry times, so that after an interruption the conversation holds those that were heard.

    Any number of services share one engine; give it as many slots as may speak at once. A server
    loads it before its first caller and gives it to each service (`engine`). A program that has one
    conversation may name a `model` instead: it is loaded while the pipeline is set up, before the
    pipeline starts.

    Attributes:
        word_times_estimated: Whether the words' times are estimates: the model's attention was not
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
        """Makes a service; it costs nothing, so make one for each pipeline.

        Args:
            engine: Loaded and warmed up; it stays the caller's to close.
            model: In place of an engine: `demo`, a checkpoint's folder or a hub id. Services of one
                event loop that name the same model share its engine; the last that is cleaned up
                closes it. Pipecat waits 20 s for it: `PipelineWorker(setup_timeout_secs=...)`. If
                it cannot be loaded, or has no such voice, the error is permanent.
            voices: Cloned voices by the names that `Settings.voice` may take, for a Base model.
            settings: What to begin with; what it leaves out is the model's default.
            **kwargs: For `TTSService`, such as `sample_rate` and `text_transforms`.

        Raises:
            ValueError: Both an engine and a model were given, or neither.
            ColdEngineError: The engine was not warmed up.
            VoiceError: The engine's model has no such voice, or its voice was not described.
        """
        if (engine is None) == (model is None):
            found = "neither" if engine is None else "both"
            raise ValueError(
                f"A service takes an engine or a model, found {found}: give it engine=..., loaded "
                "and warmed up, or model='demo', a folder or a hub id."
            )
        label = f"qwen3-tts-{engine.info.kind}" if engine is not None else str(model)
        chosen = default_settings(label)
        if settings is not None:
            chosen.apply_update(settings)
        super().__init__(
            push_start_frame=True,
            push_stop_frames=False,
            push_text_frames=False,  # words do, each at its time
            stop_frame_timeout_s=_PATIENCE,
            settings=chosen,
            **kwargs,
        )
        self._text_aggregator = WordGroupAggregator(language=self.text_aggregation_language)
        self._synthesizer = Synthesizer(model, voices or {})
        if engine is not None:
            self._synthesizer.adopt(engine, self._settings)
        self._speeches: dict[str, Speech] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._wordless: dict[str, str] = {}  # text of a context that has no words yet
        self._failed: set[str] = set()
        self._playhead = Playhead()

    async def setup(self, setup: FrameProcessorSetup) -> None:
        """Loads and warms up the model, if one was named, on a thread. Pipecat awaits it.

        Args:
            setup: The pipeline's.

        Raises:
            CheckpointError: The model is missing or broken.
            VoiceError: The model has no such voice, or its voice was not described.
        """
        await super().setup(setup)
        await self._synthesizer.load(self._settings)

    @property
    def word_times_estimated(self) -> bool:
        """See the class."""
        return not self._synthesizer.aligned

    def can_generate_metrics(self) -> bool:
        """Whether the service reports metrics: it does."""
        return True

    @property
    def supports_processing_metrics(self) -> bool:
        """Whether `run_tts` takes as long as the synthesis: it returns at once."""
        return False

    def language_to_service_language(self, language: Language) -> str | None:
        """The model's name of a language; None if it has none."""
        return language_name(language)

    # Text

    @traced_tts
    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Hands text to the context's session; its audio arrives through the context.

        Args:
            text: A group of words, or all that a `TTSSpeakFrame` says.
            context_id: The turn's.

        Yields:
            None.
        """
        await self.start_tts_usage_metrics(text)
        try:
            await self._say(text, context_id)
        except MegakernelTTSError as error:
            await self._fail(context_id, error)
        else:
            if context_id != self._turn_context_id:
                await self.flush_audio(context_id)  # text outside of a turn: nobody will end it
        yield None

    async def _say(self, text: str, context_id: str) -> None:
        if context_id in self._failed:
            return
        speech = self._speeches.get(context_id)
        if speech is None:
            text = self._wordless.pop(context_id, "") + text
            if not has_words(text):
                self._wordless[context_id] = text
                return
            speech = await self._open(context_id)
        speech.say(text)

    async def _open(self, context_id: str) -> Speech:
        """Opens the context's session."""
        session = await self._synthesizer.open(self._settings, _CHUNKS)
        speech = self._speeches[context_id] = Speech(session, self.sample_rate)
        reader = self.create_task(self._read(context_id, speech), f"speech {context_id}")
        self._readers[context_id] = reader
        return speech

    async def flush_audio(self, context_id: str | None = None) -> None:
        """Ends a context's text; its speech goes on to the end.

        Args:
            context_id: The context; None takes the one that is playing.
        """
        context_id = context_id or self.get_active_audio_context_id()
        if context_id is None:
            return
        if speech := self._speeches.get(context_id):
            speech.session.end()
        elif self.audio_context_available(context_id):
            if self._wordless.pop(context_id, None) is not None:
                await self._blank(context_id)
            await self._close(context_id)

    # Audio

    async def _read(self, context_id: str, speech: Speech) -> None:
        """Passes on what the engine makes, as it is made, but not too far ahead of playback."""
        async with aclosing(aiter(speech.session)) as events:
            async for event in events:
                if isinstance(event, AudioChunk):
                    await self._send(context_id, speech.hear(event))
                    # Nothing tells when playback has come so far, or was cut short.
                    while (early := self._ahead(speech) - _AHEAD) > 0:  # noqa: ASYNC110
                        await asyncio.sleep(min(early, _NAP))
                elif self._speeches.get(context_id) is speech:
                    await self._finish(context_id, speech, event)

    def _ahead(self, speech: Speech) -> float:
        """Seconds until the last audio that left will be played."""
        return self._playhead.ahead(self.get_clock().get_time()) + speech.waiting

    async def _send(self, context_id: str, portion: Portion) -> None:
        for word in portion.words:
            await self.add_word_timestamps(
                [(word.text, word.start)],
                context_id,
                includes_inter_frame_spaces=unspaced(word.text),
            )
        if len(portion.pcm):
            await self._send_audio(context_id, portion.pcm.tobytes())

    async def _send_audio(self, context_id: str, pcm: bytes) -> None:
        frame = TTSAudioRawFrame(pcm, self.sample_rate, 1, context_id=context_id)
        await self.append_to_audio_context(context_id, frame)

    async def _blank(self, context_id: str) -> None:
        """Sends a little silence: Pipecat gives a service up whose turns have no audio."""
        await self._send_audio(context_id, silence(_BLANK, self.sample_rate))

    async def _finish(self, context_id: str, speech: Speech, finish: Finish) -> None:
        if finish.reason == "cancelled":  # not by this service, which forgets a speech first
            await self._fail(context_id, EngineClosedError("The engine was closed while it spoke."))
        elif finish.error is not None:
            await self._fail(context_id, finish.error)
        else:
            await self._send(context_id, speech.end())
            if not speech.seconds:
                await self._blank(context_id)
            await self._close(context_id)

    async def _close(self, context_id: str) -> None:
        """Ends an audio context after what was sent."""
        self._speeches.pop(context_id, None)
        self._readers.pop(context_id, None)
        self._wordless.pop(context_id, None)
        await self.append_to_audio_context(context_id, TTSStoppedFrame(context_id=context_id))
        await self.remove_audio_context(context_id)

    async def _fail(self, context_id: str, error: MegakernelTTSError) -> None:
        """Reports an error; what was heard stays, and the rest of the turn gets a new context.

        If nothing was heard, another attempt would fail, too: the rest of the turn is not spoken.
        """
        await self.push_error(
            str(error), error, category=category(error), force_treat_as_permanent=permanent(error)
        )
        speech = self._speeches.pop(context_id, None)
        if speech is not None:
            speech.session.cancel()
        self._failed.add(context_id)
        if speech is not None and speech.seconds:
            self._move_turn(context_id)
        if context_id != self._turn_context_id:  # otherwise the end of the turn's text closes it
            await self._close(context_id)

    def _move_turn(self, context_id: str) -> None:
        """Lets the text that is still to come of the turn open a context of its own."""
        if self._turn_context_id == context_id:
            self._turn_context_id = None
            self._turn_context_id = self.create_context_id()

    # What was heard

    async def push_frame(
        self, frame: Frame, direction: FrameDirection = FrameDirection.DOWNSTREAM
    ) -> None:
        """Pushes a frame; follows how far playback has to go.

        Args:
            frame: The frame.
            direction: Where to.
        """
        if isinstance(frame, TTSAudioRawFrame):
            seconds = frame.num_frames / frame.sample_rate
            self._playhead.send(self.get_clock().get_time(), seconds)
            if speech := self._speeches.get(frame.context_id or ""):
                speech.waiting -= seconds
        await super().push_frame(frame, direction)

    async def start_word_timestamps(self) -> None:
        """Counts words' times from where their audio begins: after all that was sent before."""
        tracker = self._word_timestamp_tracker
        tracker.last_pts = max(tracker.last_pts, self._playhead.end)
        await super().start_word_timestamps()

    async def _apply_force_complete(self, context_id: str) -> None:
        """Commits a context's last words, but not those of a session that failed before them."""
        if context_id in self._failed:
            others = {other for other in self.get_audio_contexts() if other != context_id}
            self._aggregated_frame_sequencer.clear(keep_contexts=others)
        else:
            await super()._apply_force_complete(context_id)

    # Changes

    async def _update_settings(self, delta: TTSSettings) -> dict[str, Any]:
        """Applies new settings; the rest of a turn that has begun is spoken in a new context."""
        changed = await super()._update_settings(delta)
        self._warn_unhandled_updated_settings(changed.keys() & {"model"})
        context_id = self._turn_context_id
        if changed.keys() - {"model"} and context_id is not None:
            if self.audio_context_available(context_id):
                await self.flush_audio(context_id)
            self._move_turn(context_id)
        return changed

    # Ends

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Handles a frame.

        Args:
            frame: The frame.
            direction: Where it goes.
        """
        await super().process_frame(frame, direction)
        # The output drops what it was sent, except speech that may not be interrupted.
        if isinstance(frame, InterruptionFrame) and not self.has_active_audio_context():
            self._playhead.stop()

    async def on_audio_context_interrupted(self, context_id: str) -> None:
        """Stops the context's session within a frame of the engine.

        Args:
            context_id: The context; those that may not be interrupted go on.
        """
        await self.stop_all_metrics()
        await self._drop(context_id)

    async def on_audio_context_completed(self, context_id: str) -> None:
        """Forgets a context that has been sent to its end.

        Args:
            context_id: The context. If Pipecat gave it up, its turn may still be going on.
        """
        self._failed.discard(context_id)
        if context_id != self._turn_context_id:
            await self._drop(context_id)

    async def _drop(self, context_id: str) -> None:
        """Forgets a context, and stops its session if it still speaks."""
        self._wordless.pop(context_id, None)
        self._failed.discard(context_id)
        speech = self._speeches.pop(context_id, None)
        if speech is not None:
            speech.session.cancel()
        reader = self._readers.pop(context_id, None)
        if reader is not None:
            await self.cancel_task(reader)

    async def cancel(self, frame: CancelFrame) -> None:
        """Stops at once.

        Args:
            frame: What asked for it.
        """
        await super().cancel(frame)
        await self._teardown()

    async def cleanup(self) -> None:
        """Lets go of the engine, which is closed if this service loaded it and is its last user."""
        await super().cleanup()
        await self._teardown()
        await self._synthesizer.close()

    async def _teardown(self) -> None:
        for context_id in [*self._readers]:
            await self._drop(context_id)
