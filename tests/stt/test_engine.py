"""Slots of an engine, and what ends its sessions: each affects no other one."""

import asyncio
import gc
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megakernel_common import device_arbiter
from megakernel_common.device_arbiter import DeviceArbiter, LongWork
from megakernel_stt import (
    STT,
    AudioError,
    EngineBusyError,
    EngineClosedError,
    Final,
    Partial,
    RecognitionError,
    Session,
)
from megakernel_stt.engine.recogniser import ChunkRecogniser, StreamingRecogniser
from megakernel_stt.session import EventQueue
from tests.background import Waits
from tests.fakes import TIMEOUT_S
from tests.stt.conftest import DEVICES, MakeCheckpoint
from tests.stt.sessions import RATE, ids, last_final, noise
from tests.stt.streams import NOTHING, sound


def test_more_sessions_than_slots_are_refused(recogniser: MakeCheckpoint) -> None:
    with STT.load(recogniser(), "cpu", slots=1) as stt:
        first = stt.open()
        with pytest.raises(EngineBusyError, match="1 sessions are open"):
            stt.open()
        last_final(first)
        assert stt.transcribe((noise(0.2), RATE)).seconds == 0.2  # waits for the slot
        dropped = stt.open()
        del dropped
        gc.collect()
        assert stt.transcribe((noise(0.2), RATE)).seconds == 0.2


def test_closing_the_engine_ends_sessions(recogniser: MakeCheckpoint) -> None:
    stt = STT.load(recogniser(), "cpu")
    session = stt.open()
    stt.close()
    stt.close()
    assert not stt.running
    with pytest.raises(EngineClosedError):
        list(session)
    with pytest.raises(EngineClosedError):
        stt.open()


def test_an_error_ends_one_stream_only(
    recogniser: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with STT.load(recogniser(), "cpu") as stt:
        pcm = noise(0.6, seed=9)
        whole = stt.transcribe((pcm, RATE), lookahead_ms=160)
        step = StreamingRecogniser.step

        def fail_for_silence(self: StreamingRecogniser, recognitions: Sequence) -> None:
            if not all(r.samples.all().any() for r in recognitions):
                raise RuntimeError("no sound")
            step(self, recognitions)

        monkeypatch.setattr(StreamingRecogniser, "step", fail_for_silence)
        good, bad = stt.open(), stt.open()
        bad.push(np.zeros(16_000, np.int16), RATE)
        good.push(pcm, RATE)
        with pytest.raises(RecognitionError, match="no sound"):
            last_final(bad)
        assert ids(last_final(good)) == ids(whole)


def test_too_long_audio_of_an_offline_model_is_an_error(offline: STT) -> None:
    config = offline._model.config
    short = replace(config, encoder=replace(config.encoder, max_frames=5))
    offline_short = STT(replace(offline._model, config=short), slots=1, name="short")
    with offline_short, pytest.raises(RecognitionError, match="longer than 0 s"):
        offline_short.transcribe((noise(1.0), RATE))


def test_a_recording_that_is_too_long_ends_its_stream_only(offline: STT) -> None:
    """Both are computed in one step; audio beyond the limit is refused before its end."""
    model = offline._model
    short = replace(model.config, encoder=replace(model.config.encoder, max_frames=10))
    pcm = noise(0.75, seed=4)  # as long as possible
    with STT(replace(model, config=short), slots=2, name="short") as stt:
        whole = offline.transcribe((pcm, RATE))
        good, bad = stt.open(), stt.open()
        bad.push(noise(0.9, seed=5), RATE)
        with pytest.raises(RecognitionError, match="longer than 1 s"):
            list(bad)
        recogniser = stt._recognisers[None]
        fits, exceeds = recogniser.start(0), recogniser.start(0)
        fits.add(sound(70, 1))
        exceeds.add(sound(90, 2))
        both = [r.fork_ended(NOTHING) for r in (fits, exceeds)]
        with pytest.raises(AudioError):
            recogniser.step(both)
        assert all(recogniser.is_ready(recognition) for recognition in both)
        good.push(pcm, RATE)
        assert ids(last_final(good)) == ids(whole)


def test_a_closed_event_loop_affects_its_session_only(recogniser: MakeCheckpoint) -> None:
    with STT.load(recogniser(), "cpu", slots=2) as stt:
        lost, other = stt.open(), stt.open()
        loop = asyncio.new_event_loop()
        events = aiter(lost)
        waiting = loop.create_task(anext(events))  # type: ignore[arg-type]
        loop.run_until_complete(asyncio.sleep(0))
        waiting._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        lost.push(noise(1.0), RATE)
        lost.finalize()
        other.push(noise(1.0), RATE)
        assert last_final(other).tokens and stt.running
        lost.cancel()
        with stt.open() as first, stt.open() as second:  # both slots are free
            assert first is not second


def test_an_event_loop_is_woken_once_for_the_results_of_a_step(
    recogniser: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wake-up releases the interpreter lock, for which the engine thread may wait."""
    num_wakes = num_events = 0
    pushed, step, put = threading.Event(), StreamingRecogniser.step, EventQueue.put

    def step_when_pushed(self: StreamingRecogniser, recognitions: Sequence) -> None:
        assert pushed.wait(TIMEOUT_S)
        step(self, recognitions)

    def put_counted(self: EventQueue, event: Partial | Final) -> None:
        nonlocal num_events
        num_events += 1
        put(self, event)

    async def read(session: Session) -> Final:
        events = [event async for event in session]
        assert isinstance(events[-1], Final)
        return events[-1]

    async def main(stt: STT) -> list[Final]:
        loop = asyncio.get_running_loop()
        call_soon_threadsafe = loop.call_soon_threadsafe

        def count(*arguments: Any, **keywords: Any) -> asyncio.Handle:
            nonlocal num_wakes
            num_wakes += 1
            return call_soon_threadsafe(*arguments, **keywords)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        sessions = [stt.open(lookahead_ms=80) for _ in range(8)]
        readers = [asyncio.ensure_future(read(session)) for session in sessions]
        await asyncio.sleep(0)
        for session in sessions:
            session.push(noise(0.8, seed=3), RATE)
            session.end()
        pushed.set()
        return await asyncio.gather(*readers)

    monkeypatch.setattr(StreamingRecogniser, "step", step_when_pushed)
    monkeypatch.setattr(EventQueue, "put", put_counted)
    with STT.load(recogniser(), "cpu", slots=8) as stt:
        finals = asyncio.run(asyncio.wait_for(main(stt), TIMEOUT_S))
    assert all(final.is_last and final.transcript.tokens for final in finals)
    assert 0 < num_wakes <= num_events / 3  # the first step may have some of the streams only


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_that_come_while_synthesis_ends_share_a_step(
    recogniser: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Synthesis on the same device waits until no chunk is left."""
    monkeypatch.setattr(device_arbiter, "_MAX_WAIT_S", TIMEOUT_S)
    arbiter, sizes, step = DeviceArbiter(), list[int](), ChunkRecogniser.step
    waits = Waits(arbiter)
    monkeypatch.setattr("megakernel_stt.stt.device_arbiter", lambda device: arbiter)

    def observed_step(self: ChunkRecogniser, recognitions: Sequence) -> None:
        assert arbiter.short and not arbiter.long
        sizes.append(len(recognitions))
        step(self, recognitions)

    monkeypatch.setattr(ChunkRecogniser, "step", observed_step)
    synthesis = LongWork(arbiter, lambda: None)
    with STT.load(recogniser(), device, slots=2) as stt:
        synthesis.begin()
        sessions = [stt.open(lookahead_ms=80) for _ in range(2)]
        pcm = noise(0.2, seed=3)
        sessions[0].push(pcm, RATE)
        waits.next()
        sessions[0].push(pcm, RATE)  # looked at after its first chunk
        sessions[1].push(pcm, RATE)
        assert not sizes
        synthesis.end()
        finals = [last_final(session) for session in sessions]
        assert sizes[0] == 2
        assert [final.seconds for final in finals] == [0.4, 0.2]
        synthesis.begin()
        assert not arbiter.short
        synthesis.end()


def test_a_session_that_is_cancelled_while_its_chunk_waits_affects_no_other(
    recogniser: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunk fails afterwards."""
    monkeypatch.setattr(device_arbiter, "_MAX_WAIT_S", TIMEOUT_S)
    arbiter = DeviceArbiter()
    waits, synthesis = Waits(arbiter), LongWork(arbiter, lambda: None)
    monkeypatch.setattr("megakernel_stt.stt.device_arbiter", lambda device: arbiter)
    step = ChunkRecogniser.step

    def fail_first(self: ChunkRecogniser, recognitions: Sequence) -> None:
        monkeypatch.setattr(ChunkRecogniser, "step", step)
        raise RuntimeError("no step")

    with STT.load(recogniser(), "cpu", slots=1) as stt:
        monkeypatch.setattr(ChunkRecogniser, "step", fail_first)
        synthesis.begin()
        cancelled = stt.open(lookahead_ms=80)
        cancelled.push(noise(0.2, seed=3), RATE)
        waits.next()
        cancelled.cancel()
        synthesis.end()
        assert stt.transcribe((noise(0.2), RATE)).seconds == 0.2 and stt.running


def test_recordings_do_not_keep_synthesis_waiting(
    recogniser: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    arbiter, announced, step = DeviceArbiter(), list[bool](), ChunkRecogniser.step
    monkeypatch.setattr("megakernel_stt.stt.device_arbiter", lambda device: arbiter)

    def observed_step(self: ChunkRecogniser, recognitions: Sequence) -> None:
        announced.append(bool(arbiter.short))
        step(self, recognitions)

    monkeypatch.setattr(ChunkRecogniser, "step", observed_step)
    with STT.load(recogniser(), "cpu", slots=2) as stt:
        stt.transcribe((noise(0.5), RATE), lookahead_ms=80)
        assert announced and not any(announced)
        announced.clear()
        session = stt.open(lookahead_ms=80)
        session.push(noise(0.5), RATE)
        last_final(session)
        assert announced and all(announced)


def test_the_device_is_free_after_a_defect(
    recogniser: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    arbiter = DeviceArbiter()
    monkeypatch.setattr("megakernel_stt.stt.device_arbiter", lambda device: arbiter)
    with STT.load(recogniser(), "cpu", slots=2) as stt:
        monkeypatch.setattr(stt._engine._loop, "_step", lambda *_: 1 / 0)
        session = stt.open(lookahead_ms=80)
        session.push(noise(0.5), RATE)
        with pytest.raises(EngineClosedError):
            list(session)
    assert not arbiter.short


def test_a_forked_process_is_refused(stt: STT) -> None:
    with stt.open() as session:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                session.push(b"", RATE)
            except Exception as error:
                os.write(write, type(error).__name__.encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 100) == b"ForkedProcessError"
        os.close(read)
        os.close(write)
