"""Results of sessions do not depend on packets, phases, other streams or requests."""

import asyncio
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import soxr
import torch

from megakernel_common.events import ReaderWakeups
from megakernel_stt import (
    STT,
    AudioError,
    Final,
    LanguageError,
    LookaheadError,
    Partial,
    Transcript,
)
from megakernel_stt.engine.stream import Stream
from megakernel_stt.model.random_checkpoint import Kind
from megakernel_stt.session import EventQueue, Inbox
from tests.fakes import TIMEOUT_S
from tests.stt.conftest import MakeCheckpoint
from tests.stt.sessions import RATE, ids, last_final, noise, push_in_packets


@pytest.mark.parametrize("lookahead_ms", [80, 160, 320, 560, 1120])
def test_packets_give_the_transcript_of_the_whole(stt: STT, lookahead_ms: int) -> None:
    pcm = noise(1.3)
    whole = stt.transcribe((pcm, RATE), lookahead_ms=lookahead_ms)
    assert whole.tokens and whole.seconds == len(pcm) / RATE
    with stt.open(lookahead_ms=lookahead_ms) as session:
        push_in_packets(session, pcm, lookahead_ms // 80)
        streamed = last_final(session)
    assert ids(streamed) == ids(whole) and streamed.text == whole.text
    assert streamed.seconds == whole.seconds
    assert [(w.text, w.start, w.end) for w in streamed.words] == [
        (w.text, w.start, w.end) for w in whole.words
    ]


def test_sessions_at_different_phases_are_recognised_as_solo(stt: STT) -> None:
    recordings = [noise(0.5 + 0.2 * i, seed=i) for i in range(4)]
    lookaheads = [80, 160, 160, 160]
    solo = [
        stt.transcribe((pcm, RATE), lookahead_ms=ms)
        for pcm, ms in zip(recordings, lookaheads, strict=True)
    ]
    sessions = [stt.open(lookahead_ms=ms) for ms in lookaheads]
    for start in range(0, 24_000, 700):  # packets of all sessions alternate
        for session, pcm in zip(sessions, recordings, strict=True):
            session.push(pcm[start : start + 700], RATE)
    together = [last_final(session) for session in sessions]
    for ours, one in zip(together, solo, strict=True):
        assert [replace(t, confidence=0) for t in ours.tokens] == [
            replace(t, confidence=0) for t in one.tokens
        ]
        confidences = [t.confidence for t in one.tokens]
        assert [t.confidence for t in ours.tokens] == pytest.approx(confidences, abs=1e-5)


def test_finalize_gives_the_transcript_of_the_audio_so_far(stt: STT) -> None:
    """At any point, whatever the lookahead; the stream continues as if it had not been called."""
    pcm = noise(1.4, seed=3)
    cuts = [0, 100, 1_281, 9_000, 9_001, len(pcm)]
    with stt.open(lookahead_ms=1120) as session:
        for start, end in zip([0, *cuts], cuts, strict=False):
            session.push(pcm[start:end], RATE)
            session.finalize()
        session.end()
        finals = [event for event in session if isinstance(event, Final)]
    assert len(finals) == len(cuts) + 1 and finals[-1].is_last
    assert finals[-1].transcript == finals[-2].transcript
    for cut, final in zip(cuts, finals, strict=False):
        assert final.transcript.seconds == cut / RATE
        if cut:
            whole = stt.transcribe((pcm[:cut], RATE), lookahead_ms=1120)
            assert ids(final.transcript) == ids(whole)
    assert not finals[0].transcript.tokens and finals[-1].transcript.tokens


def test_partial_results_are_prefixes_and_come_before_the_end(stt: STT) -> None:
    pcm = noise(1.0, seed=4)
    with stt.open(lookahead_ms=80) as session:
        session.push(pcm, RATE)
        partial = next(iter(session))  # the audio has not ended
        assert isinstance(partial, Partial) and partial.transcript.tokens
        session.end()
        *partials, final = session
    for event in (partial, *partials):
        assert isinstance(event, Partial)
        count = len(event.transcript.tokens)
        assert final.transcript.tokens[:count] == event.transcript.tokens


def test_a_cancelled_session_delivers_a_prefix_and_frees_its_slot(stt: STT) -> None:
    pcm = noise(1.0, seed=5)
    whole = stt.transcribe((pcm, RATE), lookahead_ms=80)
    for _ in range(6):  # more than there are slots
        session = stt.open(lookahead_ms=80)
        session.push(pcm, RATE)
        event = next(iter(session))
        count = len(event.transcript.tokens)
        assert whole.tokens[:count] == event.transcript.tokens
        session.cancel()
        assert list(session) == []
        session.push(pcm, RATE)  # has no effect
        stt.transcribe(
            (pcm[:1600], RATE)
        )  # waits for a slot, so the loop has seen the cancellation


def test_asynchronous_iteration_gives_the_same_events(stt: STT) -> None:
    pcm = noise(0.8, seed=6)
    whole = stt.transcribe((pcm, RATE), lookahead_ms=160)

    async def recognise() -> list[Partial | Final]:
        with stt.open() as session:
            session.push(pcm, RATE)
            events = []
            async for event in session:
                events.append(event)
                if len(events) == 1:
                    session.finalize()
                    session.end()
            return events

    events = asyncio.run(recognise())
    finals = [event for event in events if isinstance(event, Final)]
    assert [final.is_last for final in finals] == [False, True]
    assert {tuple(ids(final.transcript)) for final in finals} == {tuple(ids(whole))}


@pytest.mark.parametrize("rate", [8_000, 22_050, 48_000])
def test_other_sampling_rates_are_resampled_as_the_whole(stt: STT, rate: int) -> None:
    pcm = noise(0.9, seed=7, rate=rate)
    resampled = soxr.resample(pcm.astype(np.float32) / 32768, rate, RATE, quality="HQ")
    whole = stt.transcribe((resampled, RATE), lookahead_ms=160)
    with stt.open() as session:
        push_in_packets(session, pcm, rate, rate)
        session.finalize()
        session.end()
        first, last = [event for event in session if isinstance(event, Final)]
    assert ids(first.transcript) == ids(last.transcript) == ids(whole)
    assert last.transcript.seconds == len(resampled) / RATE


def test_the_sampling_rate_may_change(stt: STT) -> None:
    with stt.open() as session:
        for rate in (8_000, 16_000, 48_000):
            session.push(noise(0.5, rate=rate), rate)
        assert last_final(session).seconds == pytest.approx(1.5, abs=1e-3)


def test_an_offline_model_answers_requests_only(offline: STT) -> None:
    pcm = noise(1.0, seed=8)
    whole = offline.transcribe((pcm, RATE))
    half = offline.transcribe((pcm[:8000], RATE))
    with offline.open() as session:
        push_in_packets(session, pcm[:8000], 1)
        session.finalize()
        push_in_packets(session, pcm[8000:], 2)
        session.end()
        first, last = session
    assert whole.tokens and half.tokens != whole.tokens
    assert ids(first.transcript) == ids(half) and ids(last.transcript) == ids(whole)
    assert offline.lookaheads_ms == ()


@pytest.mark.parametrize("samples", [0, 1, 159, 160, 200])
def test_very_short_audio_is_recognised(stt: STT, offline: STT, samples: int) -> None:
    for model in (stt, offline):
        with model.open() as session:
            session.push(noise(1.0)[:samples], RATE)
            assert last_final(session).seconds == samples / RATE


def test_a_language_selects_the_prompt(recogniser: MakeCheckpoint) -> None:
    with STT.load(recogniser("multilingual", bias=True), "cpu", slots=1) as stt:
        assert stt.languages == ("en-US", "de-DE")
        texts = {stt.transcribe((noise(1.0), RATE), language).text for language in stt.languages}
        assert len(texts) == 2
        with pytest.raises(LanguageError, match="fr-FR"):
            stt.open("fr-FR")


def test_arguments_are_checked(stt: STT) -> None:
    with pytest.raises(LanguageError, match="auto only"):
        stt.open("en")
    with pytest.raises(LookaheadError, match="80, 160, 320, 560, 1120"):
        stt.open(lookahead_ms=100)
    with stt.open() as session:
        for pcm, rate in (
            (b"abc", RATE),
            (np.zeros((2, 2), np.int16), RATE),
            (np.zeros(2, np.int32), RATE),
            (np.full(2, np.nan, np.float32), RATE),
            (np.zeros(2, np.int16), 100),
            (np.zeros(2, np.int16), 16_000.0),
            ([0, 0], RATE),
        ):
            with pytest.raises(AudioError):
                session.push(pcm, rate)  # type: ignore[arg-type]
        session.end()
        session.end()
        with pytest.raises(AudioError, match="ended"):
            session.push(b"", RATE)
        with pytest.raises(AudioError, match="ended"):
            session.finalize()
    for wav in ("missing.wav", __file__, (b"", RATE), (np.zeros(0), RATE), 3):
        with pytest.raises(AudioError):
            stt.transcribe(wav)  # type: ignore[arg-type]


def test_a_session_may_be_iterated_over_again(stt: STT) -> None:
    """An iteration that was left by `break` ends later, and does not disturb the next one."""

    async def converse() -> list[Transcript]:
        finals: list[Transcript] = []
        with stt.open() as session:
            for _ in range(3):
                session.push(noise(0.3), RATE)
                session.finalize()
                async for event in session:
                    if isinstance(event, Final):
                        finals.append(event.transcript)
                        break
            session.end()
            async for event in session:
                if isinstance(event, Final):
                    finals.append(event.transcript)
        return finals

    finals = asyncio.run(asyncio.wait_for(converse(), TIMEOUT_S))
    assert [final.seconds for final in finals] == pytest.approx([0.3, 0.6, 0.9, 0.9])


def test_a_partial_result_has_the_seconds_that_are_decoded(stt: STT) -> None:
    recogniser = stt._recognisers[80]
    inbox, events = Inbox(lambda _: None), EventQueue(lambda: None, ReaderWakeups())
    stream = Stream(recogniser, 0, inbox, events)
    inbox.put_audio((noise(2.0) / 32768).astype(np.float32), RATE)
    num_chunks = 0
    with torch.inference_mode():
        while (chunk := stream.next_chunk()) is not None:
            recogniser.step([chunk])
            stream.report()
            num_chunks += 1
            if events.is_ready:
                event = events.get()
                assert isinstance(event, Partial)
                assert event.transcript.seconds == pytest.approx(0.08 * num_chunks)
    assert num_chunks == 25


def test_warmup_reports_a_slow_machine(
    stt: STT, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = count(0.0, 3.0)
    monkeypatch.setattr("megakernel_stt.stt.time.perf_counter", lambda: next(times))
    stt.warmup()
    assert "slower than real time" in caplog.text
    assert all(stt.final_latency_s(ms) == 3.0 for ms in stt.lookaheads_ms)


def test_warmup_measures_how_long_a_final_takes(recogniser: MakeCheckpoint) -> None:
    with STT.load(recogniser("tdt"), "cpu", slots=1) as offline:
        assert not offline.warm and offline.final_latency_s() is None
        asyncio.run(offline.awarmup())
        latency_s = offline.final_latency_s()
        assert offline.warm and latency_s is not None and latency_s > 0
        assert offline.name == str(recogniser("tdt"))
    with STT.load(recogniser(), "cpu") as cold, pytest.raises(LookaheadError, match="240"):
        cold.final_latency_s(240)


@pytest.mark.parametrize("kind", ["streaming", "tdt"])
def test_bfloat16_is_recognised(kind: Kind, recogniser: MakeCheckpoint) -> None:
    with STT.load(recogniser(kind), "cpu", "bfloat16", slots=1) as stt:
        assert stt.transcribe((noise(1.0), RATE)).tokens
    with pytest.raises(ValueError, match="float16"):
        STT.load(recogniser(), "cpu", "float16")


def test_recognition_does_not_need_gradients(stt: STT) -> None:
    transcript = stt.transcribe((noise(0.3), RATE))
    assert isinstance(transcript, Transcript) and torch.is_grad_enabled()
