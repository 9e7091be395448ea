"""Pauses of the text: what is due when no text arrives."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pipecat.frames.frames import DataFrame
from pipecat.processors.frame_processor import FrameProcessor

from pipecat_service.speech import Speech
from pipecat_service.words import WordGroupAggregator

_MIN_LEAD_S = 0.2  # of audio sent, at which speech is flushed
_MIN_TIMEOUT_S = 0.001  # a rounding error must not end the wait early again and again


@dataclass
class TextPauseFrame(DataFrame):
    """Queued by the service for itself, so that a pause is handled in order with the text."""


class PauseWatch:
    """Queues a `TextPauseFrame` when held text is to be released or speech to be flushed."""

    def __init__(
        self,
        service: FrameProcessor,
        words: WordGroupAggregator,
        turn_speech: Callable[[], Speech | None],
        lead_s: Callable[[Speech], float],
    ) -> None:
        """Creates a watch that is not running.

        Args:
            service: Gets the frames.
            words: Holds text.
            turn_speech: Gives the speech of the turn that is being written, if it has begun.
            lead_s: Gives the seconds until a speech's audio will have been played.
        """
        self._service = service
        self._words = words
        self._turn_speech = turn_speech
        self._lead_s = lead_s
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the watch."""
        self._task = self._service.create_task(self._run(), "text pauses")

    async def stop(self) -> None:
        """Stops the watch if it runs."""
        task, self._task = self._task, None
        if task is not None:
            await self._service.cancel_task(task)

    def notify(self) -> None:
        """Reports that text has arrived, or that a `TextPauseFrame` was handled."""
        self._changed.set()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            until_s = min(self._words.until_release_s, self._until_flush_s())
            if until_s <= 0:
                await self._service.queue_frame(TextPauseFrame())
            timeout_s = max(until_s, _MIN_TIMEOUT_S) if 0 < until_s < float("inf") else None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)

    def flush_if_due(self) -> None:
        """Flushes the turn's speech if it would otherwise stop before its text ends."""
        speech = self._turn_speech()
        if speech is not None and self._until_flush_s() <= 0:
            speech.flush()
            self._words.restart_speech()

    def _until_flush_s(self) -> float:
        """Seconds until the turn's speech is to be flushed unless text arrives; infinite for never.

        Speech is flushed shortly before its audio ends if the text pauses, or after a phrase of a
        slowly written text, whose next phrase is not expected in time.
        """
        speech = self._turn_speech()
        if speech is None or not speech.unfinished:
            return float("inf")
        until_s = self._words.until_pause_s
        if self._words.pace.slow and self._words.phrase_starts:
            until_s = min(until_s, speech.until_settled_s)
        return max(until_s, self._lead_s(speech) - _MIN_LEAD_S)
