"""A server over two engine processes: protocols, and the command itself."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import uvicorn

from megakernel_tts import TTS
from megakernel_tts.server.app import Server
from megakernel_tts.server.cluster.engine_cluster import EngineCluster
from megakernel_tts.server.serving import authority, bind, uvicorn_config
from tests.comparison import assert_same_speech
from tests.fakes import TIMEOUT_S
from tests.server.cluster.clusters import (
    FRAME_S,
    LONG_TEXT,
    TEXT,
    TWO_PLACES,
    kill,
    until,
)
from tests.server.cluster.conftest import RunningCluster
from tests.server.failing import REASON, read_until_failure
from tests.server.running import RunningServer, connected, is_stopping, pcm_of, wait_until, words_of


@asynccontextmanager
async def served(cluster: EngineCluster, local: TTS) -> AsyncGenerator[RunningServer]:
    """A server on the event loop of a cluster."""
    server = Server(cluster)
    cluster.add_metrics(server.streams.metrics)
    with bind("127.0.0.1", 0) as listener:
        runner = uvicorn.Server(uvicorn_config(server))
        serving = asyncio.create_task(runner.serve([listener]))
        await until(lambda: runner.started)
        yield RunningServer(local, server, authority(listener))
        runner.should_exit = True
        await serving


def test_contexts_of_a_socket_are_divided_among_the_engines(
    running: RunningCluster, local: TTS
) -> None:
    async def main() -> None:
        async with served(running.cluster, local) as server, connected(server) as client:
            for name in "abcd":
                await client.send(name, LONG_TEXT)
            await until(lambda: running.loads == [2, 2])
            await client.cancel("a")
            await client.cancel("c")
            await until(lambda: running.loads == [0, 2])
            await client.send("e", TEXT, add_timestamps=True)
            await until(lambda: running.loads[0] == 1)
            events = await client.until_done("e")
            speech = local.say(TEXT)
            assert np.array_equal(pcm_of(events), speech.pcm)
            assert words_of(events) == [(word.text, word.start) for word in speech.words]
        # The socket is closed, and `run` checks that both engines become idle.

    running.run(main())


def test_contexts_of_an_engine_that_is_killed_end_with_an_error(
    running: RunningCluster, local: TTS, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the other engine continue, and new requests are served."""
    cluster = running.cluster

    async def main() -> None:
        async with (
            served(cluster, local) as server,
            connected(server) as client,
            httpx.AsyncClient(base_url=server.url) as http,
        ):
            for name in "abcd":
                await client.send(name, LONG_TEXT)
            await until(lambda: running.loads == [2, 2])
            kill(cluster, 0)
            errors: list[dict[str, Any]] = []
            while len(errors) < 2:
                event = await client.receive()
                errors += [event] if event["type"] == "error" else []
            assert {error["status_code"] for error in errors} == {500}
            assert all("cpu:0 has ended" in error["message"] for error in errors)
            speaking = {*"abcd"} - {error["context_id"] for error in errors}
            while speaking:
                event = await client.receive()
                assert event["type"] == "chunk" and event["context_id"] in "abcd"
                speaking.discard(event["context_id"])

            await client.send("e", TEXT)
            assert np.array_equal(pcm_of(await client.until_done("e")), local.say(TEXT).pcm)
            body = {"input": TEXT, "response_format": "pcm"}
            reply = await http.post("/v1/audio/speech", json=body)
            assert reply.content == local.say(TEXT).pcm.tobytes()
            assert server.metric('requests_success_total{finished_reason="error"}') == 2
            logged = [each for each in caplog.records if each.levelno >= logging.ERROR]
            assert {each.getMessage() for each in logged} == {"an engine process has ended"}

    running.run(main())


FAILING = """
from pathlib import Path
from megakernel_tts.server.cluster.engine_process import serve

def load(request):
    from bench.simulation import simulated_tts
    from tests.server.failing import failing

    tts = simulated_tts(request.slots, float(request.model))
    backend = tts._loaded.engine.backend
    backend.step = failing(backend.step, 2, Path({due!r}).exists)
    return tts

serve(load)
"""


def test_an_engine_logs_why_its_streams_have_failed_once(
    local: TTS,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the front's format; `test_failure_log` has the text of the other one."""
    due, place = tmp_path / "due", TWO_PLACES[1]
    command = [sys.executable, "-c", FAILING.format(due=str(due))]

    async def main() -> None:
        async with (
            EngineCluster.start(FRAME_S, [place], 2, command=command, log_format="json") as cluster,
            served(cluster, local) as server,
        ):
            await until(lambda: cluster.slots == 2)
            await read_until_failure(server, 2, due.touch)
            assert server.metric('requests_success_total{finished_reason="error"}') == 2

    asyncio.run(main())
    (line,) = capfd.readouterr().err.splitlines()
    error, shown = f"Speaking failed: {REASON}", json.loads(line)
    assert (shown["level"], shown["engine"], shown["error"]) == ("error", place.name, error)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_http_reports_the_engines_and_their_errors(running: RunningCluster, local: TTS) -> None:
    async def main() -> None:
        async with (
            served(running.cluster, local) as server,
            httpx.AsyncClient(base_url=server.url) as client,
        ):
            assert (await client.get("/ready")).json() == {"ready": True, "reason": None}
            assert "megakernel_tts:engines_ready{" in (await client.get("/metrics")).text
            assert server.metric("engines_ready") == 2
            body = {"input": TEXT, "response_format": "pcm"}
            reply = await client.post("/v1/audio/speech", json=body)
            assert np.array_equal(np.frombuffer(reply.content, "<i2"), local.say(TEXT).pcm)
            reply = await client.post("/v1/audio/speech", json=body | {"input": " "})
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "invalid_text"

    running.run(main())


def test_an_engine_process_speaks_in_the_layout_of_the_request() -> None:
    """With the demo voice: simulated models speak alike in both layouts."""

    async def speak(local: TTS) -> list[bytes]:
        body: dict[str, Any] = {"input": TEXT, "voice": "clara", "response_format": "pcm"}
        body |= {"seed": 3, "max_new_tokens": 6}
        async with EngineCluster.start("demo", TWO_PLACES[:1], 1) as cluster:
            await cluster.awarmup()
            async with (
                served(cluster, local) as server,
                httpx.AsyncClient(base_url=server.url) as http,
            ):
                bodies = (body | {"non_streaming_mode": mode} for mode in (True, False))
                return [(await http.post("/v1/audio/speech", json=each)).content for each in bodies]

    with TTS.load(device="cpu", slots=1) as tts:
        seeded = replace(tts.sampling, seed=3, max_frames=6)
        for pcm, layout in zip(asyncio.run(speak(tts)), ("full", "streaming"), strict=True):
            speech = tts.say(TEXT, "clara", layout=layout, sampling=seeded)
            assert_same_speech(pcm, speech.pcm.tobytes())


@contextmanager
def command() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`megakernel-tts serve --gpus 0,1` with the demo voice, and its base URL."""
    arguments = [sys.executable, "-m", "megakernel_tts", "serve", "--gpus", "0,1", "--port", "0"]
    arguments += ["--slots", "1"]  # the warm-up uses all of them
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        arguments, stdout=pipe, stderr=pipe, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            match = re.fullmatch(r"Web page: (http://.*)/\n", process.stdout.readline())
            assert match
            ready = f"{match[1]}/ready"
            wait_until(lambda: httpx.get(ready).status_code == 200, interval_s=0.1)
            yield process, match[1]
        finally:
            process.kill()


def uses_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def test_the_command_serves_without_torch_and_lets_streams_finish() -> None:
    with command() as (process, url):
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        body = {"input": TEXT * 2, "response_format": "pcm", "voice": "clara", "seed": 5}
        with httpx.stream("POST", f"{url}/v1/audio/speech", json=body) as reply:
            parts = reply.iter_raw()
            pcm = bytearray(next(parts))
            assert [uses_torch(child.pid) for child in children] == [True, True]
            assert not uses_torch(process.pid)
            for one in (process.pid, *(child.pid for child in children)):
                os.kill(one, signal.SIGTERM)  # as a service manager stops all processes
            wait_until(lambda: is_stopping(url))
            for part in parts:
                pcm += part
        assert process.wait(TIMEOUT_S) == 0
        assert not any(child.is_running() for child in children)
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    with TTS.load(device="cpu", slots=1) as tts:
        speech = tts.say(body["input"], "clara", sampling=replace(tts.sampling, seed=5))
    assert_same_speech(bytes(pcm), speech.pcm.tobytes())


# Engines that print their names, and are loaded for ever.
LOADING = """
import threading
from megakernel_tts.server.cluster.engine_process import serve

def load(request):
    print(request.name, flush=True)
    threading.Event().wait()

serve(load)
"""
FRONT = f"""
import asyncio
import sys
from megakernel_tts.server.cluster.engine_cluster import EngineCluster
from megakernel_tts.server.cluster.placement import Placement

async def main():
    places = [Placement(name, "cpu", {{}}) for name in ("cpu:0", "cpu:1")]
    command = [sys.executable, "-c", {LOADING!r}]
    async with EngineCluster.start("demo", places, 1, command=command):
        pass

asyncio.run(main())
"""


def test_engines_end_when_the_front_is_killed() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FRONT], stdout=pipe, text=True) as front:
        assert front.stdout is not None
        assert {front.stdout.readline() for _ in range(2)} == {"cpu:0\n", "cpu:1\n"}
        engines = psutil.Process(front.pid).children()
        assert len(engines) == 2
        front.kill()
        wait_until(lambda: not any(engine.is_running() for engine in engines))
