"""The server as an application of Ray Serve: one replica for each GPU, on any number of hosts.

`serve deploy deploy/ray.yaml` deploys `app`. Ray Serve runs in its HAProxy mode, in which audio
passes through HAProxy alone on its way from a replica to the client.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray.serve import (  # pyright: ignore[reportMissingImports]
    Application,
    deployment,
    ingress,
)
from ray.serve.config import AutoscalingContext  # pyright: ignore[reportMissingImports]
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from megakernel_tts import TTS
from megakernel_tts.server.app import Server
from megakernel_tts.server.logs import LogFormat, configure_logging
from megakernel_tts.server.settings import check_access, read_settings

_LOAD = "streams_per_slot"  # name of the metric that replicas report
# A WebSocket is one of Ray's requests for as long as it is open, and Ray lets more of them wait
# without an answer. The number is above that of connections that HAProxy accepts, so that the
# server's own admission control answers each of them.
_MAX_CONNECTIONS = 100_000
# HAProxy leaves a replica that stops within 30 s; its streams then have 60 s to finish.
_SHUTDOWN_TIMEOUT_S = 90.0


class ReplicaOptions(BaseModel):
    """Options of each replica. Names, meaning and defaults are those of `megakernel-tts serve`.

    Files are read by the replicas, so each host has them.
    """

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"), extra="forbid", frozen=True
    )

    model: str = "demo"
    slots: int = 8
    cache_positions: int | None = None
    prefill_positions: int | None = None
    max_queue: int = 32
    queue_timeout: float = 5.0
    voice: list[str] = Field(default_factory=list[str])
    pronunciations: Path | None = None
    api_key_file: Path | None = None
    no_auth: bool = False
    log_format: LogFormat = "text"

    def model_post_init(self, _: Any) -> None:
        """Checks the access.

        Raises:
            ValueError: Neither or both of `api-key-file` and `no-auth` are given.
        """
        check_access("the replicas", keys=self.api_key_file is not None, no_auth=self.no_auth)


class _RequestIds:
    """Middleware that takes over the identifiers of Ray's HTTP server, which returns them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] == "http":  # that of a WebSocket would not reach the client
            request_id = Headers(scope=scope)["x-request-id"]
            scope.setdefault("state", {})["request_id"] = request_id
        await self._app(scope, receive, send)


@deployment(
    max_ongoing_requests=_MAX_CONNECTIONS,
    graceful_shutdown_timeout_s=_SHUTDOWN_TIMEOUT_S,
    logging_config={"enable_access_log": False},  # the server's log has a line for each request
)
@ingress()
class SpeechReplica:
    """One engine and its server, in a process of Ray."""

    def __init__(self, options: ReplicaOptions) -> None:
        """Loads the model and warms it up; the replica gets requests when this returns.

        Args:
            options: The options.

        Raises:
            MegakernelTTSError: The model cannot be loaded.
            ValueError: An option or a file is invalid, or the voices do not suit the model.
            OSError: A file cannot be read.
        """
        self._tts: TTS | None = None  # Ray calls __del__ also if this raises
        logging.basicConfig(level=logging.WARNING)
        configure_logging(options.log_format)
        settings = read_settings(
            api_key_file=options.api_key_file,
            voice=options.voice,
            voice_dir=None,
            pronunciations=options.pronunciations,
            max_queue=options.max_queue,
            queue_timeout=options.queue_timeout,
        )
        settings = replace(settings, uploads=False)
        self._tts = tts = TTS.load(
            options.model,
            slots=options.slots,
            cache_positions=options.cache_positions,
            prefill_positions=options.prefill_positions,
        )
        tts.warmup()
        self._server = Server(tts, settings)
        self._server.app.add_middleware(_RequestIds)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application; called by Ray."""
        return self._server.app

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises.

        Raises:
            RuntimeError: The engine has stopped.
        """
        if not self._server.streams.running:
            raise RuntimeError("The engine has stopped.")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `StreamsPerSlot` receives; called by Ray."""
        streams = self._server.streams
        return {_LOAD: streams.num_open / streams.num_slots}

    def __del__(self) -> None:
        """Called by Ray when the replica stops."""
        if self._tts is not None:
            self._tts.close()


class StreamsPerSlot:
    """Autoscaling policy: as many replicas as the open streams need, those in queues included.

    Ray's own policy counts connections, and most of a call's WebSocket is silence.
    """

    def __init__(self, target: float = 0.75) -> None:
        """Takes the aim of the policy.

        Args:
            target: Open streams for each slot of the engines. What is below 1 is a reserve for the
                time that another replica needs to start.
        """
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The number of replicas, which Ray rounds up, and no state for the next call."""
        loads = (context.aggregated_metrics or {}).get(_LOAD)
        if not loads:  # no replica has reported yet
            return context.target_num_replicas, {}
        return sum(loads.values()) / self._target, {}


def app(options: ReplicaOptions) -> Application:
    """Makes the application from `args` of `serve deploy`, or arguments of `serve run`."""
    return SpeechReplica.bind(options)  # pyright: ignore[reportAttributeAccessIssue]
