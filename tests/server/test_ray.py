"""The server as an application of Ray Serve, which `pip install '.[test,ray]'` installs.

The slow tests start a Ray cluster with two replicas on this machine:
`pytest -m slow tests/server/test_ray.py`.
"""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import websockets
import yaml

pytest.importorskip("ray.serve", reason="the extra ray is not installed")

from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema  # pyright: ignore[reportMissingImports]

from bench.running_server import wait_until
from megakernel_tts.cli.main import _parser
from megakernel_tts.server.ray import ReplicaOptions, StreamsPerSlot
from tests.comparison import assert_same_speech
from tests.fakes import TIMEOUT_S
from tests.server.running import TEXT, Client, pcm_of

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "deploy" / "ray.yaml"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
START_TIMEOUT_S = 240.0
IMMEDIATELY_S = 2.0  # less than the queue's timeout, after which a request is refused as well


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


def read_configuration() -> dict[str, Any]:
    return yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))


@dataclass
class Cluster:
    """A Ray cluster on this machine that serves the demo voice with up to two replicas.

    Attributes:
        authority: Host and port of Ray's proxy.
        dashboard: Base URL of Ray's interface for `serve deploy`.
        token: Its key.
    """

    authority: str
    dashboard: str
    token: str

    def applications(self) -> dict[str, Any]:
        """The state of the applications; empty until Ray answers."""
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            url = f"{self.dashboard}/api/serve/applications/"
            reply = httpx.get(url, headers=headers, timeout=60)
        except httpx.TransportError:
            return {}
        return reply.json() if reply.status_code == 200 else {}

    def replicas(self) -> list[int]:
        """Process identifiers of the replicas that are ready."""
        application = self.applications().get("applications", {}).get("megakernel-tts", {})
        replicas = application.get("deployments", {}).get("SpeechReplica", {}).get("replicas", [])
        return [each["pid"] for each in replicas if each["state"] == "RUNNING"]

    def speak(self, **fields: Any) -> httpx.Response:
        """A request for speech."""
        body = {"input": TEXT, "response_format": "pcm"} | fields
        return httpx.post(f"http://{self.authority}/v1/audio/speech", json=body, timeout=60)

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Client]:
        """A client of Cartesia's WebSocket."""
        async with websockets.connect(f"ws://{self.authority}/tts/websocket") as websocket:
            yield Client(websocket)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def ray_program(module: str, *arguments: str) -> list[str]:
    """A command of Ray, run by this Python."""
    program = f"import sys; from {module} import cli; sys.exit(cli())"
    return [sys.executable, "-c", program, *arguments]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The file of deploy/ with CPUs for GPUs, the demo voice, and one stream for each replica."""
    token = secrets.token_hex(32)
    port, dashboard_port = free_port(), free_port()
    configuration = read_configuration()
    configuration["http_options"] = {"host": "127.0.0.1", "port": port}
    (application,) = configuration["applications"]
    application["args"] = {"no-auth": True, "slots": 1, "max-queue": 0}
    (deployment,) = application["deployments"]
    deployment["ray_actor_options"] = {"num_cpus": 0.1}
    deployment["autoscaling_config"] |= {"max_replicas": 2, "upscale_delay_s": 0}
    file = tmp_path_factory.mktemp("ray") / "ray.yaml"
    file.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    with TemporaryDirectory(prefix="ray-") as folder:  # short, for the paths of its sockets
        environment = (
            os.environ
            | ONE_THREAD
            | {
                "HOME": folder,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": token,
                "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
                "RAY_SERVE_ENABLE_HA_PROXY": "1",
                "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
                "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
                "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/haproxy-state",
                "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/haproxy.sock",
                "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
            }
        )
        start = ["start", "--head", "--block", "--temp-dir", folder, "--port", "0"]
        start += ["--num-cpus", "2", "--num-gpus", "0", "--object-store-memory", "100000000"]
        start += ["--dashboard-port", str(dashboard_port)]
        cluster = Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}", token)
        with (
            (Path(folder) / "log").open("w") as log,
            subprocess.Popen(
                ray_program("ray.scripts.scripts", *start),
                env=environment,
                stdout=log,
                stderr=log,
            ) as head,
        ):
            try:
                wait_until(lambda: bool(cluster.applications()), START_TIMEOUT_S)
                deploy = ray_program(
                    "ray.serve.scripts", "deploy", str(file), "--address", cluster.dashboard
                )
                subprocess.run(deploy, env=environment, check=True)
                wait_until(lambda: len(cluster.replicas()) == 1, START_TIMEOUT_S)
                yield cluster
            finally:
                head.terminate()  # it ends all processes of the cluster


async def hold(client: Client, name: str) -> None:
    """Opens a stream that waits for more text, and so occupies the only slot of a replica."""
    voice = {"mode": "id", "id": "alloy"}
    await client.send(name, "Once upon a time, ", voice=voice, **{"continue": True})
    event = await client.receive()
    assert event["type"] == "chunk", event


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition, START_TIMEOUT_S)


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
            started_s = time.monotonic()
            reply = await asyncio.to_thread(two_replicas.speak)
            await clients[2].send("refused", "Hello. ", voice={"mode": "id", "id": "alloy"})
            event = await clients[2].receive()
            assert time.monotonic() - started_s < IMMEDIATELY_S
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
