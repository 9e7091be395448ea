"""The files of deploy/ fit each other, the command and the server."""

import json
import re
import shlex
import tomllib
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from megakernel_common.kernels.loader import cache_folder
from megakernel_tts.cli.configuration import Setting
from megakernel_tts.cli.console import UsageError
from megakernel_tts.cli.main import _parser
from megakernel_tts.server.serving import CLOSE_TIMEOUT_S
from megakernel_tts.server.settings import ServerSettings
from tests.server.running import RunningServer

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
STOP_S = ServerSettings().drain_timeout_s + CLOSE_TIMEOUT_S  # from the signal to the exit


def instructions() -> list[tuple[str, str]]:
    """The instructions of the last stage of the Dockerfile."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found = [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line]
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return found[last:]


def instruction(name: str) -> str:
    """The arguments of the only instruction of a name."""
    (value,) = [value for each, value in instructions() if each == name]
    return value


def image_environment() -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(instruction("ENV")))


def resolve(arguments: list[str], environment: dict[str, str]) -> dict[str, Setting]:
    """The options of a command, which is refused if one of them is unknown or invalid."""
    given: Namespace = _parser().parse_args(arguments)
    return given.configuration.resolve(given, environment)


def image_options(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The options with which a container of the image runs."""
    settings = resolve(arguments, image_environment() | environment)
    return {name: setting.value for name, setting in settings.items()}


COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICE = COMPOSE["services"]["megakernel-tts"]
MANIFESTS = [*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))]


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [each for each in MANIFESTS if each["kind"] == kind]
    return found


TEMPLATE = manifest("Deployment")["spec"]["template"]
POD = TEMPLATE["spec"]
(CONTAINER,) = POD["containers"]
CONTAINER_ENVIRONMENT = {each["name"]: each["value"] for each in CONTAINER["env"]}


def test_the_image_installs_extras_that_exist_and_runs_the_command() -> None:
    name, _, extras = instruction("ARG").partition("=")
    assert name == "EXTRAS" and "$EXTRAS" in "".join(value for _, value in instructions())
    assert {*extras.split(",")} <= PROJECT["project"]["optional-dependencies"].keys()
    assert {"server", "codecs"} <= {*extras.split(",")}
    program = json.loads(instruction("ENTRYPOINT"))[-1]
    assert program in PROJECT["project"]["scripts"]
    options = image_options(json.loads(instruction("CMD")), {})
    assert (options["host"], str(options["port"])) == ("0.0.0.0", instruction("EXPOSE"))


def test_the_image_receives_what_the_package_is_built_from() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    kept = {line[1:] for line in ignored if line.startswith("!")}
    folders = PROJECT["tool"]["setuptools"]["package-dir"].values()
    project = PROJECT["project"]
    needed = {*folders, "pyproject.toml", project["readme"], *project["license-files"]}
    assert kept == needed and all((ROOT / name).exists() for name in kept)


def test_the_health_check_requests_a_path_of_the_server(server: RunningServer) -> None:
    (url,) = re.findall(r"http://[^']*", instruction("HEALTHCHECK"))
    address = f"http://127.0.0.1:{instruction('EXPOSE')}"
    assert httpx.get(url.replace(address, server.url)).status_code == 200


def test_kernels_are_cached_in_a_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", image_environment()["XDG_CACHE_HOME"])
    volumes = json.loads(instruction("VOLUME"))
    assert any(cache_folder().is_relative_to(volume) for volume in volumes)


def test_the_service_of_compose_fits_the_image() -> None:
    context = DEPLOY / SERVICE["build"]["context"]
    assert (context / SERVICE["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    options = image_options(SERVICE["command"], SERVICE["environment"])
    (port,) = SERVICE["ports"]
    assert port.split(":")[-1] == instruction("EXPOSE")
    mounts = dict(volume.split(":") for volume in SERVICE["volumes"])
    assert mounts.keys() == COMPOSE["volumes"].keys()
    assert {*mounts.values()} == {*json.loads(instruction("VOLUME"))}
    assert str(options["voice-dir"]) in mounts.values()
    (secret,) = SERVICE["secrets"]
    assert secret in COMPOSE["secrets"] and str(options["api-key-file"]) == f"/run/secrets/{secret}"
    assert float(SERVICE["stop_grace_period"].removesuffix("s")) > STOP_S


def test_the_pod_fits_the_image() -> None:
    options = image_options(CONTAINER["args"], CONTAINER_ENVIRONMENT)
    mounts = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert {*json.loads(instruction("VOLUME"))} <= {*mounts.values()}
    assert str(options["voice-dir"]) in mounts.values()
    assert options["api-key-file"].parent == Path(mounts["keys"])
    (port,) = CONTAINER["ports"]
    assert str(port["containerPort"]) == instruction("EXPOSE")
    assert str(POD["securityContext"]["runAsUser"]) == instruction("USER")
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_manifests_refer_to_each_other() -> None:
    volumes = {each["name"]: each for each in POD["volumes"]}
    assert {each["name"] for each in CONTAINER["volumeMounts"]} == volumes.keys()
    claims = {each["metadata"]["name"] for each in MANIFESTS if "Claim" in each["kind"]}
    used = [v["persistentVolumeClaim"] for v in volumes.values() if "persistentVolumeClaim" in v]
    assert {each["claimName"] for each in used} == claims
    labels = TEMPLATE["metadata"]["labels"]
    service = manifest("Service")["spec"]
    assert service["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert manifest(kind)["spec"]["selector"]["matchLabels"] == labels
    (port,) = service["ports"]
    assert port["targetPort"] == CONTAINER["ports"][0]["name"]


@pytest.mark.parametrize(
    ("probe", "path"),
    [("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")],
)
def test_probes_request_paths_of_the_server(server: RunningServer, probe: str, path: str) -> None:
    request = CONTAINER[probe]["httpGet"]
    assert request == {"path": path, "port": CONTAINER["ports"][0]["name"]}
    assert httpx.get(f"{server.url}{path}").status_code == 200


def test_the_pod_has_the_time_that_a_start_and_a_stop_take() -> None:
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    program, seconds = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert POD["terminationGracePeriodSeconds"] > float(seconds) + STOP_S


def test_variables_of_the_service_would_be_options() -> None:
    """What Kubernetes sets without `enableServiceLinks: false`."""
    name = manifest("Service")["metadata"]["name"].upper().replace("-", "_")
    with pytest.raises(UsageError, match=f"{name}_PORT"):
        resolve(["serve"], {f"{name}_PORT": "tcp://10.0.0.1:8000"})
    assert POD["enableServiceLinks"] is False
