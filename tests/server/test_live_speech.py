"""Idle times and joined text; the sockets' tests cover audio, flushes and cancellation."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from megakernel_tts import TTS, Finish, Sampling
from megakernel_tts.server.accounts import Account
from megakernel_tts.server.encoding import AudioFormat
from megakernel_tts.server.errors import RequestError
from megakernel_tts.server.live_speech import LiveSpeech
from megakernel_tts.server.reports import Caller
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.speech_stream import SpeechChunk, SpeechRequest
from megakernel_tts.server.streams import SpeechStreams
from tests.fakes import TIMEOUT_S

REQUEST = SpeechRequest(
    text=None,
    voice="ryan",
    language="auto",
    instruct=None,
    sampling=Sampling(),
    audio_format=AudioFormat(),
    paced=False,
)


class ManualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers a test may let expire."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


class Recorder:
    """A listener that records what it receives."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.num_flushes = 0
        self.errors: list[RequestError] = []
        self.ended = asyncio.Event()

    async def send_chunk(self, chunk: SpeechChunk) -> None:
        self.words += [word.text for word in chunk.words]

    async def report_flush(self, number: int) -> None:
        self.num_flushes += 1
        assert number == self.num_flushes

    async def report_end(self, finish: Finish | None) -> None:
        assert not self.ended.is_set()
        self.ended.set()

    async def report_error(self, error: RequestError) -> None:
        self.errors.append(error)


async def finish(speech: LiveSpeech[Recorder]) -> None:
    """Ends the text and waits until it was spoken."""
    await speech.end()
    await asyncio.wait_for(speech.listener.ended.wait(), TIMEOUT_S)


def converse(
    engine: TTS,
    act: Callable[[LiveSpeech[Recorder]], Awaitable[None]],
    *,
    max_idle_s: float | None = None,
) -> Recorder:
    """Runs a speech until it was closed."""

    async def run() -> Recorder:
        streams, recorder, closed = SpeechStreams(engine, ServerSettings()), Recorder(), list[int]()
        speech = LiveSpeech(
            streams,
            REQUEST,
            Caller("test", "req_1", Account()),
            recorder,
            on_close=lambda: closed.append(1),
            on_slow_client=lambda: None,
            max_idle_s=max_idle_s,
        )
        await act(speech)
        assert closed == [1]
        await streams.drain()
        assert streams.num_open == 0
        return recorder

    with asyncio.Runner(loop_factory=ManualTimeLoop) as runner:
        return runner.run(run())


async def skip(seconds: float) -> None:
    """Lets time pass at once."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ManualTimeLoop)
    loop.skipped_s += seconds
    for _ in range(3):  # the timer, its task, and what that reports
        await asyncio.sleep(0)


def test_text_ends_after_the_idle_time_and_every_call_restarts_it(engine: TTS) -> None:
    async def act(speech: LiveSpeech[Recorder]) -> None:
        await skip(19)
        await speech.add("One ")
        await skip(19)
        speech.keep_alive()
        await skip(19)
        assert not speech.text_ended
        await skip(2)
        assert speech.text_ended
        await asyncio.wait_for(speech.listener.ended.wait(), TIMEOUT_S)

    assert converse(engine, act, max_idle_s=20).words == ["One"]


def test_text_does_not_end_by_itself_without_an_idle_time(engine: TTS) -> None:
    async def act(speech: LiveSpeech[Recorder]) -> None:
        await speech.add("One ")
        await skip(1e6)
        assert not speech.text_ended
        speech.cancel()

    assert not converse(engine, act).ended.is_set()


@pytest.mark.parametrize(
    ("portions", "whole_sentences", "words"),
    [
        (("Hello there.", "You."), True, ["Hello", "there.", "You."]),
        (("Hello there.", "You."), False, ["Hello", "there.You."]),
        (('"Hello."', "You."), True, ['"Hello."', "You."]),
        (("It costs 3", "50."), True, ["It", "costs", "350."]),
        (("Hello there. ", "You."), True, ["Hello", "there.", "You."]),
    ],
)
def test_a_space_is_inserted_between_whole_sentences_alone(
    engine: TTS, portions: tuple[str, ...], whole_sentences: bool, words: list[str]
) -> None:
    async def act(speech: LiveSpeech[Recorder]) -> None:
        for text in portions:
            await speech.add(text, whole_sentences=whole_sentences)
        await finish(speech)

    assert converse(engine, act).words == words


def test_every_flush_is_reported_once_and_before_the_end(engine: TTS) -> None:
    async def act(speech: LiveSpeech[Recorder]) -> None:
        for text in ("", "One.", " Two."):
            await speech.add(text)
            speech.flush()
        await finish(speech)
        assert speech.listener.num_flushes == 3

    assert converse(engine, act).words == ["One.", "Two."]


def test_nothing_is_reported_after_a_cancellation(engine: TTS) -> None:
    async def act(speech: LiveSpeech[Recorder]) -> None:
        await speech.add("One two three four five. " * 30)  # a longer text takes a thread
        speech.flush()
        speech.cancel()
        speech.cancel()

    recorder = converse(engine, act)
    assert not (recorder.words or recorder.errors or recorder.num_flushes)
    assert not recorder.ended.is_set()


def test_text_after_a_cancellation_is_refused_and_opens_no_stream(engine: TTS) -> None:
    async def act(speech: LiveSpeech[Recorder]) -> None:
        speech.cancel()
        with pytest.raises(RequestError) as caught:
            await speech.add("One two.")
        assert caught.value.code == "context_closed"

    converse(engine, act)


def test_text_after_the_end_and_endless_text_are_refused(engine: TTS) -> None:
    async def act(speech: LiveSpeech[Recorder]) -> None:
        await speech.add("One " * 10_000)
        with pytest.raises(RequestError, match="65,536"):
            await speech.add("Two " * 10_000)
        speech.cancel()

    converse(engine, act)

    async def act_after_end(speech: LiveSpeech[Recorder]) -> None:
        await finish(speech)
        with pytest.raises(RequestError, match="ended"):
            await speech.add("More.")

    converse(engine, act_after_end)
