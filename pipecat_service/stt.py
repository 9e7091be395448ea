"""The recognition service: translates between Pipecat's frames and a session of an `STT`."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

from loguru import logger
from pipecat.frames.frames import (
    CancelFrame,
    EndFrame,
    Frame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    SpeechControlParamsFrame,
    StartFrame,
    TranscriptionFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.processors.frame_processor import FrameDirection, FrameProcessorSetup
from pipecat.services.settings import STTSettings
from pipecat.services.stt_service import STTService
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory
from pipecat.utils.time import time_now_iso8601
from pipecat.utils.tracing.service_decorators import traced_stt
from pipecat.utils.types import NOT_GIVEN, assert_given, is_given

from megakernel_stt import STT, Final, MegakernelTTSError, Partial, Session, Transcript
from pipecat_service.arguments import check_engine, check_keywords, check_settings, choose_model
from pipecat_service.errors import check_warm, error_category, report_error
from pipecat_service.loading import shared_engine
from pipecat_service.stt_results import UnreportedTokens
from pipecat_service.stt_settings import (
    AUTOMATIC,
    MegakernelSTTSettings,
    default_stt_settings,
    model_language,
    pipecat_language,
)

_VAD_STOP_S = 0.2  # silence after which Pipecat's detector finds that speech has ended, by default
_MIN_TTFS_S = 0.21  # Pipecat warns unless it is longer than the detector's silence
_PAUSE_S = 0.6  # without a new token, which ends speech in a pipeline without a detector
_RETRY_S = 1.0  # of audio, until a session is opened again
_END_TIMEOUT_S = 2.0  # for the last result at the end of a pipeline


class MegakernelSTTService(STTService):
    """Speech recognition in a Pipecat pipeline with an engine in the same process.

    Interim results are sent once per chunk while the user speaks. When the voice activity detector
    finds that speech has ended, the engine flushes a copy of the stream's state: the final result
    has the whole of the audio so far, `finalized` is set, and the turn ends without waiting. Each
    result has new words only, with their times and confidence in `frame.result`, a `Transcript`.

    Words count while the detector reports speech; noise and speech of a muted user have no result.

    Services may share one engine, each with a slot of its own while its pipeline runs.
    """

    Settings = MegakernelSTTSettings
    _settings: MegakernelSTTSettings  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        *,
        engine: STT | None = None,
        model: str | os.PathLike[str] | None = None,
        settings: MegakernelSTTSettings | None = None,
        **kwargs: Any,
    ) -> None:
        """Creates a service, in little time; create one for each pipeline.

        Args:
            engine: An engine with a streaming model that is loaded and warmed up; the caller closes
                it.
            model: Instead of an engine: a checkpoint or a hub id, also given as
                `Settings(model=...)`. It is loaded while the pipeline is set up, which Pipecat
                limits to 20 s, and is shared as by `MegakernelTTSService`.
            settings: Initial settings.
            **kwargs: For `STTService`, such as `sample_rate` and `ttfs_p99_latency`, which is the
                warm-up's measurement by default.

        Raises:
            TypeError: An argument is unknown or of another type, or the service sets it itself.
            ValueError: Both an engine and a model were given, or neither; or the model is an
                offline one.
            ColdEngineError: The engine was not warmed up.
            LookaheadError: The model has no such lookahead.
        """
        check_keywords(kwargs, type(self), self.Settings)
        check_settings(settings, type(self), STTSettings)
        check_engine(engine, STT)
        name = engine.name if engine is not None else None
        self._model = choose_model(name, model, settings)
        chosen = default_stt_settings(name or self._model)
        if settings is not None:
            chosen.apply_update(settings)
        super().__init__(settings=chosen, **kwargs)
        self._shared = AsyncExitStack()  # holds the engine of `model`
        self._engine: STT | None = None
        self._session: Session | None = None
        self._reader: asyncio.Task[None] | None = None  # of the session's events
        self._unreported = UnreportedTokens(0.0, gated=False)
        self._gated = False  # whether the pipeline has a voice activity detector
        self._audio_s = 0.0  # received so far
        self._session_start_s = 0.0  # of this audio
        self._failing = False  # whether an error that was reported has ended the last session
        self._retry_at_s = 0.0  # of this audio
        self._latest: Transcript | None = None  # of the session
        self._interim_text = ""
        self._num_requests = 0  # of final results, without an answer
        self._num_outdated = 0  # of these, from before speech began again
        if engine is not None:
            self._set_engine(engine)

    def _set_engine(self, engine: STT) -> None:
        """Sets the engine, whose model must suit the settings."""
        check_warm(engine.warm)
        if not engine.lookaheads_ms:
            raise ValueError(
                f"{engine.name} is an offline model, which recognises nothing before the end of "
                "the audio; use a streaming one such as nvidia/nemotron-speech-streaming-en-0.6b."
            )
        latency_s = engine.final_latency_s(assert_given(self._settings.lookahead_ms)) or 0.0
        if self._ttfs_p99_latency is None:
            self._ttfs_p99_latency = max(_VAD_STOP_S + latency_s, _MIN_TTFS_S)
        self._engine = engine

    def can_generate_metrics(self) -> bool:
        """Whether the service reports metrics: it does."""
        return True

    def _classify_error(self, exception: Exception) -> ErrorCategory | None:
        """Pipecat's category of an error that `setup` raised."""
        return error_category(exception) if isinstance(exception, MegakernelTTSError) else None

    # Start and end

    async def setup(self, setup: FrameProcessorSetup) -> None:
        """Loads the model, if one was named. Called by Pipecat.

        Args:
            setup: Setup of the pipeline.

        Raises:
            CheckpointError: The model is missing or broken.
            ValueError: It is an offline model.
            LookaheadError: It has no such lookahead.
        """
        await super().setup(setup)
        if self._model is not None:
            shared = shared_engine(STT.load, self._model)
            self._set_engine(await self._shared.enter_async_context(shared))

    async def start(self, frame: StartFrame) -> None:
        """Opens the session."""
        await super().start(frame)
        await self._open()

    async def stop(self, frame: EndFrame) -> None:
        """Sends the results of the audio so far, and ends the session."""
        await self._finish()
        await super().stop(frame)

    async def cancel(self, frame: CancelFrame) -> None:
        """Ends the session at once."""
        await self._drop()
        await super().cancel(frame)

    async def cleanup(self) -> None:
        """Ends the session, and releases an engine that was loaded by name."""
        try:
            await self._drop()
            await super().cleanup()
        finally:
            await self._shared.aclose()

    # Session

    async def _open(self) -> None:
        """Opens a session; reports an error if there is no free slot, and tries again later."""
        assert self._engine is not None, "start follows setup"
        languages = self._engine.languages
        language = model_language(assert_given(self._settings.language), languages)
        if language is None:
            logger.warning(
                f"{self._engine.name} has no language {self._settings.language}; it detects the "
                "language of the speech instead."
            )
        try:
            session = self._engine.open(
                language or AUTOMATIC, assert_given(self._settings.lookahead_ms)
            )
        except MegakernelTTSError as error:
            await self._fail(error)
            return
        self._session, self._session_start_s = session, self._audio_s
        self._failing = False
        self._unreported = UnreportedTokens(self._audio_s, gated=self._gated)
        self._latest, self._interim_text = None, ""
        self._num_requests = self._num_outdated = 0
        if self._user_speaking:
            self._unreported.begin_speech(0.0)
        self._reader = self.create_task(self._read(session), "results")

    async def _read(self, session: Session) -> None:
        """Sends the results of a session as they arrive."""
        try:
            async with aclosing(aiter(session)) as events:
                async for event in events:
                    if isinstance(event, Partial):
                        await self._handle_partial(event.transcript)
                    else:
                        await self._handle_final(event)
        except MegakernelTTSError as error:
            self._session = None
            await self._fail(error)

    async def _fail(self, error: MegakernelTTSError) -> None:
        """Reports why there is no session, once, and has another one opened in a second."""
        self._retry_at_s = self._audio_s + _RETRY_S
        if not self._failing:
            self._failing = True
            await report_error(self, error)

    async def _finish(self) -> None:
        """Ends the session's audio, and waits for its results."""
        session, reader = self._session, self._reader
        if session is not None and reader is not None:
            session.end()
            await asyncio.wait([reader], timeout=_END_TIMEOUT_S)
        await self._drop()

    async def _drop(self) -> None:
        """Cancels the session; its slot is free at once."""
        session, self._session = self._session, None
        reader, self._reader = self._reader, None
        if session is not None:
            session.cancel()
        if reader is not None and not reader.done():
            await self.cancel_task(reader)

    async def _do_reconnect(self) -> None:
        """Opens a session with new settings. Called by Pipecat between turns of the user."""
        await self._finish()
        await self._open()

    # Audio

    async def process_audio_frame(
        self, frame: InputAudioRawFrame, direction: FrameDirection
    ) -> None:
        """Recognises audio; while the service is muted, it recognises silence instead.

        The words before and after therefore remain apart, and times continue.

        Args:
            frame: The audio.
            direction: Of the frame.
        """
        if self._muted:
            await self._push(bytes(len(frame.audio)))
        else:
            await super().process_audio_frame(frame, direction)

    async def run_stt(self, audio: bytes) -> AsyncGenerator[Frame | None, None]:
        """Passes audio to the session, whose results are sent as they arrive.

        Args:
            audio: 16-bit samples of one channel at the pipeline's rate.

        Yields:
            None.
        """
        await self._push(audio)
        yield None

    async def _push(self, audio: bytes) -> None:
        if self._session is None and self._audio_s >= self._retry_at_s:
            await self._open()
        self._audio_s += len(audio) / 2 / self.sample_rate
        if self._session is None:
            return
        self._session.push(audio, self.sample_rate)
        if not self._gated and not self._num_requests and self._has_paused():
            self._request_final()

    @property
    def _session_s(self) -> float:
        """Seconds of audio of the session."""
        return self._audio_s - self._session_start_s

    def _has_paused(self) -> bool:
        """Whether words without a final result are followed by a pause."""
        tokens = self._unreported.new(self._latest).tokens if self._latest is not None else ()
        return bool(tokens) and self._audio_s - tokens[-1].end > _PAUSE_S

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Handles a frame."""
        await super().process_frame(frame, direction)
        if isinstance(frame, SpeechControlParamsFrame):
            if frame.vad_params is not None:
                self._expect_detector()
        elif isinstance(frame, VADUserStartedSpeakingFrame):
            self._expect_detector()
            await self._begin_speech(frame.start_secs)
        elif isinstance(frame, VADUserStoppedSpeakingFrame):
            self._unreported.end_speech(self._session_s)
            self._request_final()

    def _expect_detector(self) -> None:
        """Notes that the pipeline has a voice activity detector: words outside speech are noise."""
        if not self._gated:
            self._gated = True
            self._unreported.gate()

    async def _begin_speech(self, start_secs: float) -> None:
        """Begins speech, with the words since its beginning.

        Args:
            start_secs: Seconds of speech that the detector needed.
        """
        self._num_outdated = self._num_requests  # they would end the turn that begins
        self._unreported.begin_speech(self._session_s - start_secs)
        self._interim_text = ""
        if self._latest is not None:
            await self._send_interim(self._unreported.new(self._latest))

    # Results

    def _request_final(self) -> None:
        """Requests the result of the audio so far."""
        if self._session is not None:
            self.request_finalize()
            self._num_requests += 1
            self._session.finalize()

    async def _handle_partial(self, transcript: Transcript) -> None:
        self._latest = transcript
        self._unreported.settle(transcript)
        new = self._unreported.new(transcript)
        if not self._gated or self._user_speaking:
            await self._send_interim(new)
        elif new.text and not self._num_requests:
            self._request_final()  # the end of speech had no words yet: these are late

    async def _send_interim(self, new: Transcript) -> None:
        """Sends an interim result, if it has changed."""
        if not self._settings.interim or not new.text or new.text == self._interim_text:
            return
        self._interim_text = new.text
        language = self._language(new)
        frame = InterimTranscriptionFrame(
            new.text, self._user_id, time_now_iso8601(), language, result=new
        )
        await self.push_frame(frame)

    async def _handle_final(self, final: Final) -> None:
        """Sends a final result, unless it has no words or speech has begun again meanwhile."""
        if self._unreported.new(final.transcript).text:
            await self.emit_stt_usage_metrics()  # before the frame, which ends the span of a trace
        self._num_requests = max(self._num_requests - 1, 0)  # the end of the audio is no request
        if self._num_outdated:
            self._num_outdated -= 1
            return
        new = self._unreported.new(final.transcript)
        if not new.text:
            return
        self._unreported.report(final.transcript)
        self._interim_text = ""
        self.confirm_finalize()
        language = self._language(new)
        frame = TranscriptionFrame(
            new.text, self._user_id, time_now_iso8601(), language, result=new, finalized=True
        )
        await self.push_frame(frame)
        await self._handle_transcription(new.text, True, language)

    @traced_stt
    async def _handle_transcription(
        self, transcript: str, is_final: bool, language: Language | None = None
    ) -> None:
        """Marks a result for Pipecat's traces."""

    def _language(self, new: Transcript) -> Language | None:
        """The language that the model has found, else that of the settings."""
        found = new.language or (self._latest.language if self._latest is not None else None)
        return pipecat_language(found or assert_given(self._settings.language))

    # Settings

    async def _update_settings(self, delta: STTSettings) -> dict[str, Any]:
        """Applies valid settings and reports others; new ones hold after the user's turn."""
        if is_given(delta.model) and delta.model != self._settings.model:
            self._warn_unhandled_updated_settings({"model"})
        delta = replace(delta, model=NOT_GIVEN)
        lookahead_ms = getattr(delta, "lookahead_ms", NOT_GIVEN)
        if self._engine is not None and is_given(lookahead_ms):
            try:
                self._engine.final_latency_s(lookahead_ms)
            except MegakernelTTSError as error:  # of the application: the service works as before
                await self.push_error(str(error), error, category=ErrorCategory.APPLICATION)
                delta = replace(delta, lookahead_ms=NOT_GIVEN)
        changed = await super()._update_settings(delta)
        if changed.keys() & {"language", "lookahead_ms"}:
            await self._request_reconnect()
        return changed
