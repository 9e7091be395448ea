"""Breaks and speed: what a stream delivers of segments, over a simulated model."""

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.simulation import simulated_tts, words_in_audio
from megakernel_tts import TTS, AudioChunk, ChunkPolicy, Finish, Session
from megakernel_tts.text.splitter import SplitLimits
from tests.rig import Rig, codes, drain, scripted

RATE = 24_000
ONE, TWO = "One two three.", "Four, five six seven."
SPEEDS = (0.5, 1.0, 1.3, 2.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[TTS]:
    """A model whose audio does not depend on batches and chunks."""
    with simulated_tts(num_slots=4, frame_seconds=0.0) as tts:
        yield tts


def pcm_of(chunks: Iterable[AudioChunk]) -> NDArray[np.int16]:
    return np.concatenate([np.zeros(0, np.int16), *(chunk.pcm for chunk in chunks)])


def words_of(chunks: Iterable[AudioChunk]) -> list[tuple[str, float]]:
    return [(word.text, word.start) for chunk in chunks for word in chunk.words]


def silence(seconds: float) -> NDArray[np.int16]:
    return np.zeros(round(seconds * RATE), np.int16)


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_break_is_exactly_as_long_as_it_says(engine: TTS, speed: float) -> None:
    """Between segments that are as without it; the speed does not change it."""
    one, two = (engine.say(text, speed=speed) for text in (ONE, TWO))
    text = f'<break time="250ms"/>{ONE} <break time="0.8s"/><break time="1.3s"/>{TWO}<break/>'
    speech = engine.say(text, speed=speed)
    expected = [silence(0.25), one.pcm, silence(0.8 + 1.3), two.pcm, silence(0.5)]
    np.testing.assert_array_equal(speech.pcm, np.concatenate(expected))
    np.testing.assert_array_equal(speech.codes, np.concatenate([one.codes, two.codes]))
    second_s = 0.25 + one.seconds + 2.1
    starts = [w.start + 0.25 for w in one.words] + [w.start + second_s for w in two.words]
    assert [w.start for w in speech.words] == pytest.approx(starts, abs=0.0011)
    assert [w.text for w in speech.words] == [*ONE.split(), *TWO.split()]


@pytest.mark.parametrize("speed", SPEEDS)
def test_the_speed_divides_durations_and_word_times_and_keeps_codes(
    engine: TTS, speed: float
) -> None:
    ordinary, speech = engine.say(TWO), engine.say(TWO, speed=speed)
    np.testing.assert_array_equal(speech.codes, ordinary.codes)
    assert len(speech.pcm) == round(len(ordinary.pcm) / speed)
    assert [w.start for w in speech.words] == pytest.approx(
        [w.start / speed for w in ordinary.words], abs=0.0011
    )
    assert speech.finish == ordinary.finish == "eos"


@pytest.mark.parametrize("speed", SPEEDS)
def test_streams_deliver_what_say_does(engine: TTS, speed: float) -> None:
    text = f'{ONE}<break time="1s"/>{TWO}'
    whole = engine.say(text, speed=speed)
    for policy in (ChunkPolicy(1, 1), ChunkPolicy(1, 8), ChunkPolicy(3, 5)):
        chunks = [*engine.stream(text, chunks=policy, speed=speed)]
        np.testing.assert_array_equal(pcm_of(chunks), whole.pcm)
        np.testing.assert_array_equal(codes(chunks[:1]), whole.codes[: len(chunks[0].codes)])
        assert words_of(chunks) == [(w.text, w.start) for w in whole.words]
        frames = [chunk.frame for chunk in chunks]
        assert frames == [*np.cumsum([0, *(len(c.codes) for c in chunks[:-1])])]
    session = engine.open(layout="full", speed=speed)
    for char in text:
        session.push_text(char)
    session.end()
    chunks, _ = drain(session)
    np.testing.assert_array_equal(pcm_of(chunks), whole.pcm)


@pytest.mark.parametrize("speed", SPEEDS)
def test_words_come_with_the_audio_in_which_they_begin(engine: TTS, speed: float) -> None:
    num_samples = 0
    for chunk in engine.stream(f"{ONE} <break/> {TWO}", chunks=ChunkPolicy(1, 4), speed=speed):
        first_s = num_samples / RATE
        num_samples += len(chunk.pcm)
        for word in chunk.words:
            assert first_s - 0.001 <= word.start < num_samples / RATE


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_the_first_audio_needs_one_frame(engine: TTS, speed: float) -> None:
    first = next(engine.stream(ONE, chunks=ChunkPolicy(1, 4), speed=speed))
    assert len(first.codes) == 1 and len(first.pcm) >= 0.01 * RATE


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_cancelled_stream_is_a_prefix(engine: TTS, speed: float) -> None:
    text = f'{ONE}<break time="0.3s"/>{TWO}'
    whole = engine.say(text, speed=speed).pcm
    session = engine.open(text=text, speed=speed, chunks=ChunkPolicy(1, 2))
    events = iter(session)
    received = [event for _, event in zip(range(9), events, strict=False)]
    session.cancel()
    assert all(isinstance(event, Finish) for event in events)
    pcm = pcm_of(event for event in received if isinstance(event, AudioChunk))
    assert 0 < len(pcm) < len(whole)
    np.testing.assert_array_equal(pcm, whole[: len(pcm)])


def test_a_stream_does_not_depend_on_the_speed_of_others(engine: TTS) -> None:
    text = f'{ONE}<break time="0.2s"/>{TWO}'
    solo = {speed: engine.say(text, speed=speed).pcm for speed in SPEEDS}
    sessions = {speed: engine.open(text=text, speed=speed) for speed in SPEEDS}
    received: dict[float, NDArray[np.int16]] = {}

    def listen(speed: float, session: Session) -> None:
        received[speed] = pcm_of(drain(session)[0])

    readers = [threading.Thread(target=listen, args=item) for item in sessions.items()]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    for speed, pcm in solo.items():
        np.testing.assert_array_equal(received[speed], pcm)


def test_live_text_is_spoken_up_to_a_break_and_then_silent(engine: TTS) -> None:
    """A break ends a segment as a flush does, and its silence does not wait for more text."""
    session = engine.open(chunks=ChunkPolicy(1, 4))
    session.push_text('One two <break time="0.5s"/>')
    chunks: list[AudioChunk] = []
    while not chunks or len(chunks[-1].codes):
        event = next(iter(session))
        assert isinstance(event, AudioChunk)
        chunks.append(event)
    assert words_in_audio(pcm_of(chunks)) == [0, 1]
    while sum(len(chunk.pcm) for chunk in chunks if not len(chunk.codes)) < 0.5 * RATE:
        event = next(iter(session))
        assert isinstance(event, AudioChunk) and not event.pcm.any()
        chunks.append(event)
    assert max(len(chunk.pcm) for chunk in chunks) <= 4 * 0.08 * RATE
    session.push_text("three")
    session.end()
    later, finish = drain(session)
    assert [word for word, _ in words_of(later)] == ["three"] and finish.reason == "eos"


def test_words_are_those_that_were_written(engine: TTS) -> None:
    """However the text arrives; the times are estimates from what is spoken."""
    text = 'So (GPU), <spell>ab 1</spell>-x, <volume ratio="2"/>in 重庆 nginx.'
    table = {"GPU": "gee pee you", "nginx": "engine ex", "重庆": "崇庆"}
    spoken = engine.say("So (gee pee you), A B 1-x, in 崇庆 engine ex.")
    speech = engine.say(text, pronunciations=table)
    assert [w.text for w in speech.words] == ["So", "(GPU),", "ab", "1-x,", "in", "重庆", "nginx."]
    starts = [word.start for word in spoken.words]
    assert [w.start for w in speech.words] == [starts[i] for i in (0, 1, 4, 6, 7, 8, 10)]
    session = engine.open(pronunciations=table)
    for char in text:
        session.push_text(char)
    session.end()
    chunks, _ = drain(session)
    assert [word for word, _ in words_of(chunks)] == [w.text for w in speech.words]


def test_breaks_wait_for_a_reader(rig: Rig) -> None:
    """Silence counts as unread frames, so that a text full of breaks takes no memory."""
    session = rig.open('<break time="1s"/>' * 1000, ahead=30)
    rig.settle()
    (stream,) = rig.streams
    assert 30 <= stream.delivery.num_unread <= 30 + 13
    events = iter(session)
    for _ in range(100):
        next(events)
    rig.settle()
    assert 30 <= stream.delivery.num_unread <= 30 + 13
    chunks, finish = drain(session)
    num_read = 100 * 8 * 1920
    assert 1000 * RATE - num_read <= len(pcm_of(chunks)) < 1000 * RATE
    assert finish == Finish("eos", 0) and rig.idle()


def test_a_break_alone_needs_no_slot(rig: Rig) -> None:
    rig.backend.gate.clear()
    holders = [rig.open() for _ in range(rig.backend.num_slots)]
    chunks, finish = drain(rig.open('<break time="0.1s"/>'))
    assert len(pcm_of(chunks)) == 2400 and finish == Finish("eos", 0)
    rig.backend.gate.set()
    for session in holders:
        session.cancel()


def test_a_segment_that_is_spoken_again_is_scaled_from_its_start(rig: Rig) -> None:
    text, sentences = 'hello.<break time="0.1s"/> And this one.', SplitLimits(sentence=1)
    rig.backend.runaway = {5}
    again, _ = drain(
        rig.open(text, seed=5, layout="full", limits=sentences, max_retries=1, speed=2)
    )
    rig.backend.runaway = set()
    ordinary, _ = drain(rig.open(text, seed=6, layout="full", limits=sentences, speed=2))
    np.testing.assert_array_equal(codes(again[:1]), scripted(6, len(again[0].codes)))
    num_frames = 2 * rig.backend.tail
    assert len(pcm_of(again)) == len(pcm_of(ordinary)) == num_frames * 960 + 2400


def test_the_audio_before_a_failure_is_delivered_at_its_speed(rig: Rig) -> None:
    rig.backend.failing_steps = {13: 5}
    chunks, finish = drain(rig.open(seed=13, speed=0.5))
    assert finish.reason == "error" and finish.frames == 5
    assert len(pcm_of(chunks)) == 2 * 5 * 1920
