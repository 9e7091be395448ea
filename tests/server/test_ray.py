"""The server as an application of Ray Serve, which `pip install '.[test,ray]'` installs.

The slow tests start a Ray cluster with two replicas on this machine:
`pytest -m slow tests/server/test_ray.py`.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import websockets

pytest.importorskip("ray.serve", reason="the extra ray is not installed")

from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema  # pyright: ignore[reportMissingImports]

from bench.ray_service import ROOT, RayCluster, ray_cluster, read_configuration
from bench.running_server import wait_until
from megakernel_tts.cli.main import _parser
from megakernel_tts.server.ray import ReplicaOptions, StreamsPerSlot
from tests.comparison import assert_same_speech
from tests.fakes import TIMEOUT_S
from tests.server.running import TEXT, Client, pcm_of

ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
CHANGE_TIMEOUT_S = 240.0


def context(*loads: float) -> Any:
    """The argument of the policy for replicas with these loads."""
    metrics = {"streams_per_slot": dict(enumerate(loads))} if loads else {}
    return SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=3)


@pytest.mark.parametrize(
    ("loads", "replicas"), [((), 3), ((0.0,), 0), ((0.75,), 1), ((1.5, 1.5), 4), ((5.0, 0.25), 7)]
)
def test_the_number_of_replicas_follows_the_open_streams(
    loads: tuple[float, ...], replicas: int
) -> None:
    assert StreamsPerSlot(0.75)(context(*loads)) == (pytest.approx(replicas), {})


def test_options_are_those_of_the_command() -> None:
    given = _parser().parse_args(["serve"])
    options = given.configuration.resolve(given, {})
    ours = ReplicaOptions.model_validate({"no-auth": True}).model_dump(by_alias=True)
    assert ours == {name: options[name].value for name in ours} | {"no-auth": True}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "give api-key-file"),
        ({"no-auth": True, "api-key-file": "keys.toml"}, "contradict"),
        ({"no-auth": True, "max_queue": 3}, "max_queue"),
        ({"no-auth": True, "slots": "many"}, "slots"),
    ],
)
def test_invalid_options_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ReplicaOptions.model_validate(args)


def test_the_deployed_configuration_is_valid() -> None:
    (application,) = ServeDeploySchema.model_validate(read_configuration()).applications
    ReplicaOptions.model_validate(application.args)
    assert application.import_path == "megakernel_tts.server.ray:app"
    (deployment,) = application.deployments
    assert deployment.ray_actor_options.num_gpus == 1


@dataclass
class Cluster(RayCluster):
    """A Ray cluster on this machine that serves the demo voice with up to two replicas."""

    def speak(self, **fields: Any) -> httpx.Response:
        """A request for speech."""
        body = {"input": TEXT, "response_format": "pcm"} | fields
        return httpx.post(f"http://{self.authority}/v1/audio/speech", json=body)

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Client]:
        """A client of Cartesia's WebSocket."""
        async with websockets.connect(f"ws://{self.authority}/tts/websocket") as websocket:
            yield Client(websocket)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The file of deploy/ with CPUs for GPUs, the demo voice, and one stream for each replica."""
    configuration = read_configuration()
    (application,) = configuration["applications"]
    application["args"] = {"no-auth": True, "slots": 1, "max-queue": 0}
    (deployment,) = application["deployments"]
    deployment["ray_actor_options"] = {"num_cpus": 0.1}
    deployment["autoscaling_config"] |= {"max_replicas": 2, "upscale_delay_s": 0}
    with ray_cluster(ONE_THREAD, num_gpus=0) as started:
        cluster = Cluster(**vars(started))
        cluster.deploy(configuration)
        cluster.head.wait_until(lambda: cluster.num_ready() == 1, "replica")
        yield cluster


async def hold(client: Client, name: str) -> None:
    """Opens a stream that waits for more text, and so occupies the only slot of a replica."""
    voice = {"mode": "id", "id": "alloy"}
    await client.send(name, "Once upon a time, ", voice=voice, **{"continue": True})
    event = await client.receive()
    assert event["type"] == "chunk", event


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition, CHANGE_TIMEOUT_S)


@pytest.fixture(scope="module")
def two_replicas(cluster: Cluster) -> Cluster:
    """The cluster, once the load of its replica has started another one."""

    async def load() -> None:
        async with cluster.client() as client:
            await hold(client, "one")
            await until(lambda: len(cluster.replicas()) == 2)

    assert len(cluster.replicas()) == 1
    asyncio.run(load())
    return cluster


@pytest.mark.slow
def test_speech_through_rays_proxy_is_that_of_the_engine(two_replicas: Cluster) -> None:
    reply = two_replicas.speak(seed=1)
    assert reply.status_code == 200 and "," not in reply.headers["x-request-id"]
    say = [sys.executable, "-m", "megakernel_tts", "say", TEXT, "--seed", "1"]
    environment = os.environ | ONE_THREAD  # as a replica's; torch adds up in another order with two
    said = subprocess.run(say, env=environment, capture_output=True, check=True)
    assert_same_speech(reply.content, said.stdout)


@pytest.mark.slow
def test_overload_is_answered_at_once(two_replicas: Cluster) -> None:
    async def fill() -> None:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(two_replicas.client()) for _ in range(3)]
            for client in clients[:2]:  # one for each replica, which is the least loaded one
                await hold(client, "held")
            reply = await asyncio.to_thread(two_replicas.speak)
            await clients[2].send("refused", "Hello. ", voice={"mode": "id", "id": "alloy"})
            event = await clients[2].receive()
            # After the queue's timeout it would be 503.
            assert reply.status_code == 429 and int(reply.headers["retry-after"]) > 0
            assert (event["type"], event["status_code"]) == ("error", 429)
        await until(lambda: two_replicas.speak().status_code == 200)  # closed sockets free slots

    asyncio.run(fill())


@pytest.mark.slow
def test_the_other_replica_continues_when_one_is_killed(two_replicas: Cluster) -> None:
    async def kill() -> None:
        async with two_replicas.client() as one, two_replicas.client() as two:
            for client in (one, two):
                await hold(client, "held")
            killed, survivor = two_replicas.replicas()
            os.kill(killed, signal.SIGKILL)
            lost = await asyncio.wait_for(first_closed(one, two), TIMEOUT_S)
            other = two if lost is one else one
            await other.send("held", "there was a river.", voice={"mode": "id", "id": "alloy"})
            events = await other.until_done("held")
            assert events[-1]["type"] == "done" and len(pcm_of(events)) > 24_000
            assert (await asyncio.to_thread(two_replicas.speak)).status_code == 200
            await until(lambda: len({*two_replicas.replicas()} - {killed}) == 2)
            assert survivor in two_replicas.replicas()

    asyncio.run(kill())


async def first_closed(*clients: Client) -> Client:
    """The client whose connection is closed first."""
    closings = {asyncio.create_task(each.websocket.wait_closed()): each for each in clients}
    done, pending = await asyncio.wait(closings, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return closings[done.pop()]
