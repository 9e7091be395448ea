"""Pauses of the text: what is due when no text arrives."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pipecat.frames.frames import DataFrame
from pipecat.processors.frame_processor import FrameProcessor

from megakernel_tts import LivePolicy
from pipecat_service.contexts import ContextState
from pipecat_service.words import WordGroupAggregator

_LIVE = LivePolicy()
_MIN_TIMEOUT_S = 0.001  # a rounding error must not end the wait early again and again


@dataclass
class TextPauseFrame(DataFrame):
    """Queued by the service for itself, so that a pause is handled in order with the text."""


class PauseTimer:
    """Queues a `TextPauseFrame` when held text is to be released or speech to be flushed.

    Text is held by the aggregator until a group of words is complete, and by the engine, which
    speaks a codec frame for each token and then waits for more.
    """

    def __init__(
        self,
        service: FrameProcessor,
        words: WordGroupAggregator,
        turn_context: Callable[[], ContextState | None],
        lead_s: Callable[[ContextState | None], float],
    ) -> None:
        """Creates a timer that is not running.

        Args:
            service: Gets the frames.
            words: Holds text.
            turn_context: Gives the context of the turn that is being written, if it has text.
            lead_s: Gives the seconds until a context's audio, or all audio, will have been played.
        """
        self._service = service
        self._words = words
        self._turn_context = turn_context
        self._lead_s = lead_s
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the timer."""
        self._task = self._service.create_task(self._run(), "text pauses")

    async def stop(self) -> None:
        """Stops the timer if it runs."""
        task, self._task = self._task, None
        if task is not None:
            await self._service.cancel_task(task)

    def notify(self) -> None:
        """Reports that text has arrived, or that a `TextPauseFrame` was handled."""
        self._changed.set()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            until_s = min(self._words.until_release_s, self.until_flush_s)
            if until_s <= 0:
                await self._service.queue_frame(TextPauseFrame())
            timeout_s = max(until_s, _MIN_TIMEOUT_S) if 0 < until_s < float("inf") else None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)

    @property
    def until_flush_s(self) -> float:
        """Seconds until the text so far is to be spoken to its end unless more arrives.

        Infinite if nothing is left to be spoken.
        """
        return min(self.until_pause_flush_s, self._until_phrase_flush_s)

    @property
    def until_pause_flush_s(self) -> float:
        """As `until_flush_s`, because the text pauses: shortly before the audio ends, or after."""
        context, words = self._turn_context(), self._words
        unfinished = bool(context and context.speech and context.speech.unfinished)
        if not (unfinished or words.holds_words):
            return float("inf")
        lead_s = self._lead_s(context)
        until_s = max(words.until_pause_s(), lead_s - _LIVE.min_lead_s)
        if unfinished:
            until_s = min(until_s, max(words.until_pause_s(in_gap=True), lead_s))
        return until_s

    @property
    def _until_phrase_flush_s(self) -> float:
        """As `until_flush_s`, because a phrase of a slowly written text has ended.

        The next phrase is not expected in time.
        """
        context, words = self._turn_context(), self._words
        speech = context.speech if context is not None else None
        if speech is None or not (speech.unfinished and words.pace.slow and words.phrase_starts):
            return float("inf")
        return max(speech.until_settled_s, self._lead_s(context) - _LIVE.min_lead_s)
