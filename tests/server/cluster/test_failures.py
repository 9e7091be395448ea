"""Processes that end by themselves, by `kill -9`, or never start."""

import asyncio
import gc
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import soundfile

from bench.simulated_engine import SIMULATED_ENGINE
from megakernel_tts import (
    TTS,
    AudioChunk,
    CheckpointError,
    ChunkPolicy,
    EngineClosedError,
    Finish,
    ReferenceAudioError,
    Sampling,
    Voice,
)
from megakernel_tts.server.cluster import client
from megakernel_tts.server.cluster.engine_cluster import EngineCluster
from megakernel_tts.server.cluster.placement import Placement
from megakernel_tts.server.engine import SpeechEngine
from megakernel_tts.server.metrics import Metrics
from tests.fakes import TIMEOUT_S
from tests.server.cluster.clusters import (
    LONG_TEXT,
    TEXT,
    TWO_PLACES,
    assert_equal_speech,
    child_processes,
    kill,
    open_session,
    read_all,
    read_chunks,
    simulated_cluster,
    until,
)
from tests.server.cluster.conftest import RunningCluster


@pytest.fixture(autouse=True)
def _no_process_is_left(running: RunningCluster) -> Iterator[None]:
    """An engine that was ended is replaced by one."""
    before = len(child_processes())
    yield
    assert len(child_processes()) <= before


# As many threads as this process, so that float32 sums are equal.
ONE_PLACE = Placement("cpu:0", "cpu", {})


def metric(metrics: Metrics, name: str) -> float:
    lines = [line for line in metrics.text().splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_after_kill_9_other_streams_continue_and_the_engine_comes_back(
    local: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the process ends its streams: no ping is due."""
    monkeypatch.setattr(client, "_PING_INTERVAL_S", 1e6)

    async def main() -> tuple[list[AudioChunk], Finish]:
        async with simulated_cluster() as cluster:
            metrics = Metrics("simulated")
            cluster.add_metrics(metrics)
            processes = child_processes()
            sessions = [await open_session(cluster, LONG_TEXT) for _ in range(8)]
            await read_chunks(sessions[0], 1)
            speeches = [asyncio.create_task(read_all(session)) for session in sessions]
            gc.collect()
            num_files = psutil.Process().num_fds()

            kill(cluster, 0)
            ended = [await speech for speech in speeches[::2]]
            for _, finish in ended:
                assert finish.reason == "error" and "cpu:0 has ended" in str(finish.error)
            assert cluster.slots == 4 and cluster.warm and cluster.running
            assert metric(metrics, "megakernel_tts:engines_ready{") == 1
            assert metric(metrics, "megakernel_tts:engine_restarts_total{") == 0

            continued = [await speech for speech in speeches[1::2]]
            assert all(finish.reason == "eos" for _, finish in continued)
            assert_equal_speech(continued[0], continued[1])
            assert (await read_all(await open_session(cluster, TEXT)))[1].reason == "eos"

            await until(lambda: cluster.slots == 8)
            assert metric(metrics, "megakernel_tts:engines_ready{") == 2
            restarts = 'megakernel_tts:engine_restarts_total{model_name="simulated",engine="cpu:0"}'
            assert metric(metrics, restarts) == 1
            again = [await open_session(cluster, TEXT) for _ in range(2)]  # one on each engine
            ends = [await read_all(session) for session in again]
            assert all(finish.reason == "eos" for _, finish in ends)
            assert len(child_processes()) == len(processes)  # and no zombie
            del sessions, speeches, again  # they refer to the memory of their process
            gc.collect()
            assert psutil.Process().num_fds() == num_files
            return continued[0]

    speech = asyncio.run(main())
    assert_equal_speech(speech, asyncio.run(speak_locally(local)))


async def speak_locally(local: TTS) -> tuple[list[AudioChunk], Finish]:
    return await read_all(await open_session(local, LONG_TEXT))


def test_a_process_that_hangs_is_restarted(
    running: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers again in time is not."""
    cluster = running.cluster
    monkeypatch.setattr(client, "_PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(client, "_MAX_MISSED_PINGS", 1_000_000)

    async def main() -> None:
        sessions = [await open_session(cluster, LONG_TEXT) for _ in range(2)]
        stopped = kill(cluster, 0, signal.SIGSTOP)
        await until(lambda: stopped._num_missed >= 2)
        kill(cluster, 0, signal.SIGCONT)
        await until(lambda: stopped._num_missed == 0)
        await until(lambda: min(each.frame_step_s for each in running.clients) > 0)
        assert cluster.frame_step_s == max(each.frame_step_s for each in running.clients)
        ends = [(await read_all(session))[1] for session in sessions]
        assert [finish.reason for finish in ends] == ["eos", "eos"]
        assert cluster.slots == 8

        sessions = [await open_session(cluster, LONG_TEXT) for _ in range(2)]
        assert kill(cluster, 0, signal.SIGSTOP) is stopped, "it was not restarted"
        await until(lambda: stopped._num_missed >= 2)
        opening = asyncio.create_task(open_session(cluster, TEXT))
        stopped._num_missed = client._MAX_MISSED_PINGS
        ends = [(await read_all(session))[1] for session in sessions]
        assert [finish.reason for finish in ends] == ["error", "eos"]
        assert "cpu:0 has ended" in str(ends[0].error)
        assert (await read_all(await opening))[1].reason == "eos", "on the other engine"
        await until(lambda: cluster.slots == 8)

    running.run(main())


def test_a_cloned_voice_is_the_same_after_a_restart(checkpoint: Callable[..., Path]) -> None:
    """With the only engine, of a real model: a voice that it clones, and then speaks with."""
    folder, recording = checkpoint("base", shallow=True), io.BytesIO()
    noise = 0.1 * np.random.default_rng(0).standard_normal(24_000)
    soundfile.write(recording, noise, 24_000, format="WAV")
    options: dict[str, Any] = {
        "sampling": Sampling(seed=3, max_frames=5, guard=False),
        "chunks": ChunkPolicy(8, 8),  # sizes change samples of plain torch by a step
    }

    async def say(engine: SpeechEngine, voice: Voice) -> tuple[list[AudioChunk], Finish]:
        return await read_all(await open_session(engine, TEXT, voice, **options))

    with TTS.load(folder, device="cpu", slots=1) as tts:
        recording.seek(0)
        voice = tts.clone(recording, "What was said.")
        expected = asyncio.run(say(tts, voice))
        plain = asyncio.run(say(tts, Voice(voice.x_vector)))
    assert expected[0][0].codes.tolist() != plain[0][0].codes.tolist()

    async def main() -> Finish:
        async with EngineCluster.start(str(folder), [ONE_PLACE], 1) as cluster:
            await cluster.awarmup()
            recording.seek(0)
            cloned = await asyncio.to_thread(cluster.clone, recording, "What was said.")
            np.testing.assert_array_equal(cloned.x_vector, voice.x_vector)
            with pytest.raises(ReferenceAudioError, match="not readable as audio"):
                await asyncio.to_thread(cluster.clone, io.BytesIO(), None)
            assert_equal_speech(await say(cluster, cloned), expected)

            kill(cluster, 0)
            await until(lambda: not cluster.warm)
            with pytest.raises(EngineClosedError, match="No engine is ready"):
                await say(cluster, cloned)
            with pytest.raises(EngineClosedError, match="No engine is ready"):
                await asyncio.to_thread(cluster.clone, recording, None)
            await cluster.awarmup()
            assert_equal_speech(await say(cluster, cloned), expected)
            session = await open_session(cluster, TEXT, voice)
        return (await read_all(session))[1]

    finish = asyncio.run(main())
    assert finish.reason == "error"  # the cluster was closed


def test_a_model_that_cannot_be_loaded_raises_as_in_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with EngineCluster.start(str(tmp_path / "none"), TWO_PLACES[:1], 1):
            pass

    with pytest.raises(CheckpointError, match="none"):
        asyncio.run(main())


def test_a_process_that_ends_before_it_has_loaded_raises() -> None:
    async def main() -> None:
        async with EngineCluster.start("demo", TWO_PLACES, 1, command=["/bin/false"]):
            pass

    with pytest.raises(EngineClosedError, match=r"cpu:\d has ended"):
        asyncio.run(main())


def test_closing_ends_an_engine_that_warms_up() -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(None) as limit,
            EngineCluster.start("1e6", TWO_PLACES[:1], 1, command=SIMULATED_ENGINE) as cluster,
        ):
            warming = asyncio.create_task(cluster.awarmup())  # a frame takes 11 days
            await asyncio.sleep(0)
            limit.reschedule(asyncio.get_running_loop().time() + TIMEOUT_S)
            cluster.close()
            with pytest.raises(EngineClosedError):
                await warming
            assert not cluster.running and not cluster.warm

    asyncio.run(main())
