"""The recognition service in pipelines: interim and final results, turns, muting, many callers."""

import asyncio
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pipecat.frames.frames import (
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    InterruptionFrame,
    MetricsFrame,
    STTMetadataFrame,
    STTMuteFrame,
    STTUpdateSettingsFrame,
    TranscriptionFrame,
    UserStoppedSpeakingFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.metrics.metrics import STTUsageMetricsData, TTFBMetricsData
from pipecat.tests.utils import SleepFrame, run_test
from pipecat.transcriptions.language import Language
from safetensors.torch import load_file, save_file

from megakernel_stt import STT, EngineBusyError, EngineClosedError, RecognitionError, Transcript
from megakernel_stt.engine.stream import Stream
from megakernel_stt.model.random_checkpoint import Kind, write_checkpoint
from pipecat_service import MegakernelSTTService
from tests.pipecat_service.caller import PACKET_S, Caller, run_calls
from tests.pipecat_service.hearing import silence, speech, write_hearing_checkpoint

Settings = MegakernelSTTService.Settings
RATE = 16_000


def warm(folder: Path, slots: int = 8) -> STT:
    engine = STT.load(folder, "cpu", slots=slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megakernel_stt.stt._NUM_FINALS", 5)  # of 100: the test is no measurement
        engine.warmup()
    return engine


def load(folder: Path, kind: Kind = "streaming", *, blank_bias: float = 2.0) -> STT:
    write_checkpoint(folder, kind, blank_bias=blank_bias)
    return warm(folder)


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hearing")
    write_hearing_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def stt(hearing: Path) -> Iterator[STT]:
    """It transcribes loud audio, and nothing in silence."""
    with warm(hearing) as engine:
        yield engine


@pytest.fixture(scope="module")
def babbling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[STT]:
    """It transcribes everything, silence included."""
    with load(tmp_path_factory.mktemp("babbling")) as engine:
        yield engine


def ids(transcript: Transcript) -> list[int]:
    return [token.id for token in transcript.tokens]


def result(frame: TranscriptionFrame | InterimTranscriptionFrame) -> Transcript:
    """The words of a frame."""
    assert isinstance(frame.result, Transcript)
    return frame.result


def whole(engine: STT, pcm: NDArray[np.int16], rate: int = RATE) -> Transcript:
    """What the engine recognises in a recording with the service's lookahead."""
    return engine.transcribe((pcm, rate), lookahead_ms=160)


async def say(caller: Caller) -> None:
    await caller.play(silence(0.5), speech(1.5), silence(0.5))


@pytest.mark.contract
def test_the_final_comes_at_the_end_of_speech_and_ends_the_turn(stt: STT) -> None:
    """Without any wait, and with the words of all audio so far; interims come before."""
    call = Caller(stt)
    run_calls([call], say)
    (stopped_s,) = call.times_of(VADUserStoppedSpeakingFrame)
    (final,) = call.finals
    assert call.times_of(TranscriptionFrame) == [stopped_s]
    assert call.times_of(UserStoppedSpeakingFrame) == [stopped_s]
    assert final.finalized and call.said == [final.text]
    ours = result(final)
    pcm = np.concatenate([silence(0.5), speech(1.5), silence(0.5)])
    assert ours.seconds == pytest.approx(stopped_s, abs=PACKET_S)
    expected = whole(stt, pcm[: round(ours.seconds * RATE)])
    assert ours.tokens and ids(ours) == ids(expected) and final.text == expected.text
    assert all(0 <= w.confidence <= 1 and w.start < w.end <= ours.seconds for w in ours.words)


@pytest.mark.contract
def test_interim_results_come_while_the_user_speaks(stt: STT) -> None:
    call = Caller(stt)
    run_calls([call], say)
    (started_s,) = call.times_of(VADUserStartedSpeakingFrame)
    (stopped_s,) = call.times_of(VADUserStoppedSpeakingFrame)
    times_s = [at for at, frame in call.results if not isinstance(frame, TranscriptionFrame)]
    assert len(times_s) > 3 and started_s <= times_s[0] and times_s[-1] <= stopped_s
    chunks = np.diff(times_s) > 0
    assert chunks[1:].all(), "more than one interim result of a chunk"
    final = ids(result(call.finals[0]))
    for one, next_one in pairwise(call.interims):
        assert next_one.text.startswith(one.text) and len(next_one.text) > len(one.text)
        assert ids(result(one)) == final[: len(result(one).tokens)]
    silent = Caller(stt, settings=Settings(interim=False))
    run_calls([silent], say)
    assert not silent.interims and silent.finals[0].text == call.finals[0].text


def test_each_result_has_new_words_only(babbling: STT) -> None:
    """The model has tokens everywhere, and the stream decodes the end of each final again."""
    call, parts = Caller(babbling), [silence(0.5)]
    for i in range(4):
        parts += [speech(0.7 + 0.11 * i, seed=i), silence(0.7)]
    run_calls([call], lambda c: c.play(*parts))
    results = [result(final) for final in call.finals]
    assert len(results) == 4
    for before, after in pairwise(results):
        assert after.tokens and after.tokens[0].start > before.seconds
    for at, frame in call.results:
        later = [s for s in call.times_of(VADUserStartedSpeakingFrame) if s <= at]
        ends = [s for s in call.times_of(VADUserStoppedSpeakingFrame) if s < at]
        assert later and (not ends or later[-1] > ends[-1] or isinstance(frame, TranscriptionFrame))


def test_the_end_of_a_final_is_not_repeated(stt: STT) -> None:
    """Speech after a pause that was no end continues the stream; its words come once."""
    pcm = [silence(0.3), speech(0.9), silence(0.3), speech(0.8, seed=1), silence(0.5)]
    call = Caller(stt, turns=[False, True])
    run_calls([call], lambda c: c.play(*pcm))
    first, second = call.finals
    assert call.said == [f"{first.text} {second.text}"]
    assert call.times_of(UserStoppedSpeakingFrame) == call.times_of(VADUserStoppedSpeakingFrame)[1:]
    stream = whole(stt, np.concatenate(pcm))
    late = [t.id for t in stream.tokens if t.start > result(first).seconds]
    assert ids(result(second)) == late


def test_neither_silence_nor_noise_has_text(babbling: STT) -> None:
    quiet = (speech(3.0).astype(float) / 200).astype(np.int16)  # below the detector's level
    call = Caller(babbling)
    run_calls([call], lambda c: c.play(silence(3.0), quiet))
    assert not call.results and not call.said
    assert whole(babbling, np.concatenate([silence(3.0), quiet])).text, "the model has found none"


def test_speech_without_words_has_no_result(tmp_path: Path) -> None:
    with load(tmp_path, blank_bias=1000.0) as mute:
        call = Caller(mute)
        run_calls([call], say)
    assert call.times_of(VADUserStoppedSpeakingFrame) and not call.results


@pytest.mark.contract
def test_without_a_detector_a_pause_ends_speech(stt: STT) -> None:
    call = Caller(stt, vad=False)
    run_calls(
        [call], lambda c: c.play(speech(1.0), silence(1.5), speech(1.0, seed=1), silence(1.5))
    )
    first, second = call.finals
    assert first.finalized and call.interims and result(first).tokens and result(second).tokens
    assert result(second).tokens[0].start > result(first).tokens[-1].start + 0.5


@pytest.mark.parametrize("rate", [8_000, 24_000])
def test_other_sample_rates_are_resampled(babbling: STT, rate: int) -> None:
    parts = [silence(0.4, rate), speech(1.2, rate=rate), silence(0.5, rate)]
    call = Caller(babbling, rate=rate)
    run_calls([call], lambda c: c.play(*parts))
    (final,) = call.finals
    pcm = np.concatenate(parts)[: round(result(final).seconds * rate)]
    assert final.text and ids(result(final)) == ids(whole(babbling, pcm, rate))


@pytest.mark.contract
def test_muted_audio_is_silence(stt: STT) -> None:
    loud = speech(1.5)

    async def drive(caller: Caller) -> None:
        await caller.play(silence(0.4), loud[:8_000])
        await caller.worker.queue_frame(STTMuteFrame(mute=True))
        await caller.play(loud[8_000:16_000])
        await caller.worker.queue_frame(STTMuteFrame(mute=False))
        await caller.play(loud[16_000:], silence(0.5))

    call = Caller(stt)
    run_calls([call], drive)
    (final,) = call.finals
    received = np.concatenate(
        [silence(0.4), loud[:8_000], silence(0.5), loud[16_000:], silence(0.5)]
    )
    assert final.text
    assert ids(result(final)) == ids(whole(stt, received[: round(result(final).seconds * RATE)]))


@pytest.mark.contract
def test_an_interruption_loses_no_words(stt: STT) -> None:
    async def drive(caller: Caller) -> None:
        await caller.play(silence(0.5), speech(1.5)[:12_000])
        await caller.worker.queue_frame(InterruptionFrame())
        await caller.play(speech(1.5)[12_000:], silence(0.5))

    undisturbed, interrupted = Caller(stt), Caller(stt)
    run_calls([undisturbed], say)
    run_calls([interrupted], drive)
    assert [f.text for f in interrupted.finals] == [f.text for f in undisturbed.finals]


def test_callers_share_an_engine_without_effect_on_each_other(stt: STT) -> None:
    def audio(i: int) -> NDArray[np.int16]:
        return np.concatenate([silence(0.3 + 0.05 * i), speech(1.0, seed=i), silence(0.5)])

    async def drive(caller: Caller) -> None:
        await caller.play(audio(callers.index(caller)))

    callers = [Caller(stt) for _ in range(8)]
    run_calls(callers, drive)
    for i, caller in enumerate(callers):
        (final,) = caller.finals
        pcm = audio(i)[: round(result(final).seconds * RATE)]
        assert ids(result(final)) == ids(whole(stt, pcm))


def test_a_caller_without_a_slot_gets_the_next_free_one(hearing: Path) -> None:
    async def wait_and_say(caller: Caller) -> None:
        await caller.play(silence(4.0))
        await say(caller)

    with warm(hearing, slots=1) as engine:
        callers = [Caller(engine), Caller(engine)]
        run_calls(callers, say, wait_and_say)
        assert not callers[0].errors
        (error,) = callers[1].errors
        assert isinstance(error.exception, EngineBusyError) and callers[1].stt.is_usable
        (final,) = callers[1].finals
        assert final.text
        engine.open().cancel()  # the slot is free again


@pytest.mark.contract
def test_a_failed_stream_is_reported_and_replaced(
    stt: STT, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stream: Stream) -> None:
        raise ValueError("out of memory")

    async def drive(caller: Caller) -> None:
        await say(caller)
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "next_chunk", fail)
            await caller.play(silence(0.4))  # more than a chunk
            await caller.wait_until(lambda: bool(caller.errors))
        await caller.play(silence(1.5))
        await say(caller)

    call = Caller(stt)
    run_calls([call], drive)
    (error,) = call.errors
    assert isinstance(error.exception, RecognitionError) and call.stt.is_usable
    first, second = call.finals
    assert first.text and result(second).tokens[0].start > result(first).seconds


@pytest.mark.contract
def test_a_closed_engine_is_a_permanent_error(hearing: Path) -> None:
    engine = warm(hearing)

    async def drive(caller: Caller) -> None:
        await caller.play(silence(0.2))
        engine.close()
        await caller.wait_until(lambda: bool(caller.errors))
        await caller.play(silence(3.0))

    call = Caller(engine)
    run_calls([call], drive)
    (error,) = call.errors
    assert isinstance(error.exception, EngineClosedError) and not call.stt.is_usable


def test_a_final_of_speech_that_goes_on_is_dropped(
    babbling: STT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine answers after speech has begun again: the result would end the new turn."""
    resumed, answer = threading.Event(), Stream._answer

    def wait_and_answer(stream: Stream, *args: object) -> None:
        assert resumed.wait(60)
        answer(stream, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Stream, "_answer", wait_and_answer)
    monkeypatch.setattr("pipecat_service.stt._END_TIMEOUT_S", 60.0)  # frames come without pauses
    service = MegakernelSTTService(engine=babbling)

    @service.event_handler("on_after_process_frame")
    async def on_frame(_: object, frame: object) -> None:
        if isinstance(frame, VADUserStartedSpeakingFrame) and service._num_requests:
            resumed.set()

    audio = [InputAudioRawFrame(speech(1.0).tobytes(), RATE, 1)]
    started, stopped = VADUserStartedSpeakingFrame, VADUserStoppedSpeakingFrame
    frames = [
        *(*audio, started(start_secs=0.2), *audio, stopped(stop_secs=0.2), started(start_secs=0.2)),
        *(*audio, stopped(stop_secs=0.2)),
    ]
    down, _ = asyncio.run(run_test(service, frames_to_send=[*frames, SleepFrame(0.01)]))
    (final,) = [frame for frame in down if isinstance(frame, TranscriptionFrame)]
    assert final.finalized and result(final).seconds == pytest.approx(3.0)
    assert result(final).tokens[0].start < 1.0 < 2.0 < result(final).tokens[-1].start


@pytest.mark.contract
def test_metrics_are_reported(stt: STT) -> None:
    call = Caller(stt)
    run_calls([call], say)
    data = [data for frame in call.frames_of(MetricsFrame) for data in frame.data]
    (usage, rest) = [d.value for d in data if isinstance(d, STTUsageMetricsData)]
    assert usage.audio_seconds == pytest.approx(result(call.finals[0]).seconds)
    assert usage.audio_seconds + rest.audio_seconds == pytest.approx(2.5)
    assert sum(isinstance(d, TTFBMetricsData) and d.value > 0 for d in data) == 1
    (metadata,) = call.frames_of(STTMetadataFrame)
    latency_s = stt.final_latency_s(160)
    assert latency_s is not None
    assert metadata.ttfs_p99_latency == max(0.21, 0.2 + latency_s)


@pytest.mark.contract
def test_the_time_to_the_final_can_be_given(stt: STT) -> None:
    service = MegakernelSTTService(engine=stt, ttfs_p99_latency=0.5)
    assert service.service_metadata_frame().ttfs_p99_latency == 0.5


@pytest.mark.contract
def test_new_settings_hold_after_the_turn(stt: STT) -> None:
    async def drive(caller: Caller) -> None:
        await caller.play(silence(0.5), speech(1.5)[:12_000])
        delta = Settings(lookahead_ms=1120)
        await caller.worker.queue_frame(STTUpdateSettingsFrame(delta=delta))
        await caller.play(speech(1.5)[12_000:], silence(0.5))
        await caller.play(speech(1.0), silence(0.5))

    call, unchanged = Caller(stt), Caller(stt)
    run_calls([call], drive)
    run_calls([unchanged], say)
    first, second = call.finals
    assert first.text == unchanged.finals[0].text and not call.errors
    interims = [result(f).tokens[0].start for f in call.interims if result(f).seconds > 2.5]
    assert len(interims) <= 1 and second.text
    assert result(second).tokens[0].start > result(first).seconds, "times begin anew"


@pytest.mark.contract
def test_invalid_settings_are_refused(stt: STT) -> None:
    async def drive(caller: Caller) -> None:
        delta = Settings(lookahead_ms=100)
        await caller.worker.queue_frame(STTUpdateSettingsFrame(delta=delta))
        await caller.wait_until(lambda: bool(caller.errors))
        await say(caller)

    call = Caller(stt)
    run_calls([call], drive)
    assert "100" in call.errors[0].error and call.stt.is_usable and call.finals
    assert call.stt.settings.given_fields()["lookahead_ms"] == 160


def test_a_multilingual_model_names_the_language(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "multilingual")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["joint.head.bias"][7] += 1.0  # <en-US>
    save_file(tensors, tmp_path / "model.safetensors")
    with warm(tmp_path) as engine:
        detected, german = Caller(engine), Caller(engine, settings=Settings(language=Language.DE))
        run_calls([detected], say)
        run_calls([german], say)
    (final,) = detected.finals
    assert result(final).language == "en-US" and final.language is Language.EN_US
    assert german.finals[0].text != final.text


def test_a_model_is_loaded_by_name(hearing: Path) -> None:
    """Once for the services that name it, and closed after the last."""
    calls = [Caller(None, model=hearing), Caller(None, settings=Settings(model=str(hearing)))]
    loaded, load_model = [], STT.load

    def record(model: str) -> STT:
        loaded.append(load_model(model, "cpu"))
        return loaded[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STT, "load", record)
        patch.setattr("megakernel_stt.stt._NUM_FINALS", 5)
        run_calls(calls, say)
    (engine,) = loaded
    assert calls[0].finals[0].text == calls[1].finals[0].text != ""
    wait_until_closed(engine)


def wait_until_closed(engine: STT) -> None:
    """Another thread closes it, and ends the engine's."""
    engine._engine._thread.join(60)
    assert not engine.running
