"""The server on Ray Serve, in a Ray cluster of its own on this machine."""

import json
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import yaml

from bench.running_server import free_port
from bench.service import StartedProcess, started
from megakernel_tts.server.cluster.placement import count_gpus

ROOT = Path(__file__).parents[1]
_CONFIGURATION = ROOT / "deploy" / "ray.yaml"
_MEMORY_BYTES = 100_000_000  # of Ray's object store, which replicas do not use


def read_configuration() -> dict[str, Any]:
    """The file that users deploy."""
    return yaml.safe_load(_CONFIGURATION.read_text(encoding="utf-8"))


@dataclass
class RayCluster:
    """A Ray cluster on this machine, and the replicas that it runs: a `Service`.

    Attributes:
        authority: Host and port of Ray's proxy.
        dashboard: Base URL of Ray's interface for `serve deploy`.
        token: Its key.
        environment: All variables of Ray's commands.
        head: The process with which the cluster ends.
    """

    authority: str
    dashboard: str
    token: str
    environment: Mapping[str, str]
    head: StartedProcess

    def deploy(self, configuration: Mapping[str, Any]) -> None:
        """Deploys a configuration for this cluster's address; does not wait for the replicas.

        Raises:
            CalledProcessError: Ray has refused it.
        """
        host, _, port = self.authority.partition(":")
        address = {"http_options": {"host": host, "port": int(port)}}
        with TemporaryDirectory() as folder:
            file = Path(folder, "ray.yaml")
            file.write_text(yaml.safe_dump({**configuration, **address}), encoding="utf-8")
            deploy = _ray_command("ray.serve.scripts", "deploy", str(file))
            subprocess.run([*deploy, "--address", self.dashboard], env=self.environment, check=True)

    def applications(self) -> dict[str, Any]:
        """The state of the applications; empty until Ray answers."""
        request = urllib.request.Request(
            f"{self.dashboard}/api/serve/applications/",
            headers={"Authorization": f"Bearer {self.token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)
        except OSError:
            return {}

    def replicas(self) -> list[int]:
        """Process identifiers of the replicas that are ready."""
        application = self.applications().get("applications", {}).get("megakernel-tts", {})
        replicas = application.get("deployments", {}).get("SpeechReplica", {}).get("replicas", [])
        return [each["pid"] for each in replicas if each["state"] == "RUNNING"]

    def front(self) -> list[psutil.Process]:
        """See `Service`; all processes of the cluster besides the replicas."""
        head, replicas = psutil.Process(self.head.process.pid), {*self.replicas()}
        others = (each for each in head.children(recursive=True) if each.pid not in replicas)
        return [head, *others]

    def engines(self) -> list[psutil.Process]:
        """See `Service`."""
        return [psutil.Process(pid) for pid in self.replicas() if psutil.pid_exists(pid)]

    def num_ready(self) -> int:
        """See `Service`."""
        return len(self.replicas())


def _ray_command(module: str, *arguments: str) -> list[str]:
    """A command of Ray, run by this Python."""
    program = f"import sys; from {module} import cli; sys.exit(cli())"
    return [sys.executable, "-c", program, *arguments]


@contextmanager
def _killed_at_end(folder: str) -> Generator[None]:
    """Kills the processes that name a folder at the end of the block: Ray may leave HAProxy."""
    try:
        yield
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if any(folder in part for part in process.info["cmdline"] or ()):
                process.kill()


@contextmanager
def ray_cluster(environment: Mapping[str, str], *, num_gpus: int) -> Generator[RayCluster]:
    """Runs a Ray cluster without replicas on this machine until the block ends.

    Args:
        environment: Variables of all its processes. Others are those of this one, but a temporary
            folder is the home.
        num_gpus: Number of GPUs that it may use.

    Raises:
        RuntimeError: It does not start.
    """
    token, port, dashboard_port = secrets.token_hex(32), free_port(), free_port()
    with TemporaryDirectory(prefix="ray-") as folder:  # short, for the paths of its sockets
        variables = {
            **os.environ,
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
            **environment,
        }
        start = ["start", "--head", "--block", "--temp-dir", folder, "--port", "0"]
        start += ["--num-cpus", "2", "--num-gpus", str(num_gpus)]
        start += ["--object-store-memory", str(_MEMORY_BYTES)]
        start += ["--dashboard-port", str(dashboard_port)]
        command = _ray_command("ray.scripts.scripts", *start)
        with _killed_at_end(folder), started(command, Path(folder, "log"), variables) as head:
            cluster = RayCluster(
                f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}", token, variables, head
            )
            head.wait_until(lambda: bool(cluster.applications()), "Ray")
            yield cluster


@contextmanager
def serve_replicas(model: str, num_replicas: int, slots: int) -> Generator[RayCluster]:
    """Runs replicas until the block ends; the block starts when all are ready.

    Args:
        model: As in `megakernel-tts serve`.
        num_replicas: Each has a GPU, if there is any.
        slots: Of each replica.

    Raises:
        RuntimeError: The cluster or the replicas do not start.
        CalledProcessError: Ray has refused the configuration.
    """
    num_gpus = count_gpus()
    configuration = read_configuration()
    (application,) = configuration["applications"]
    application["args"] = {"model": model, "slots": slots, "no-auth": True}
    (deployment,) = application["deployments"]
    deployment["ray_actor_options"] = {"num_gpus": 1} if num_gpus else {"num_cpus": 0.1}
    del deployment["autoscaling_config"]
    deployment["num_replicas"] = num_replicas
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HOME": str(Path.home()),  # has the compiled kernels
    }
    with ray_cluster(environment, num_gpus=num_gpus) as cluster:
        cluster.deploy(configuration)
        cluster.head.wait_until(lambda: cluster.num_ready() == num_replicas, "replicas")
        yield cluster
