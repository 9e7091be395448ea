"""The application: all protocols, health and metrics, over one engine."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute

import megakernel_tts
from megakernel_tts import MegakernelTTSError
from megakernel_tts.server.accounts import Accounts
from megakernel_tts.server.auth import Authentication
from megakernel_tts.server.cartesia import Cartesia
from megakernel_tts.server.elevenlabs import ElevenLabs
from megakernel_tts.server.engine import SpeechEngine
from megakernel_tts.server.hosts import AllowedHosts
from megakernel_tts.server.http import RequestIds
from megakernel_tts.server.nari import Nari
from megakernel_tts.server.openai import OpenAI, http_error
from megakernel_tts.server.page import Page
from megakernel_tts.server.settings import ServerSettings
from megakernel_tts.server.streams import SpeechStreams
from megakernel_tts.server.vapi import Vapi

if TYPE_CHECKING:
    from megakernel_tts.server.tracing import Tracing
    from megakernel_tts.server.wyoming import WyomingService

_HEALTH_PATHS = ("/health", "/ready")  # for load balancers, which have no key
_SCHEMA_FILE = Path(__file__).with_name("openapi.json")

_log = logging.getLogger("megakernel_tts.server")


class Server:
    """An ASGI application that speaks with one engine.

    Attributes:
        app: The application.
        streams: Its open streams.
    """

    def __init__(
        self,
        tts: SpeechEngine,
        settings: ServerSettings | None = None,
        wyoming: "WyomingService | None" = None,
        tracing: "Tracing | None" = None,
    ) -> None:
        """Makes the application; its start warms up the engine, if it is cold.

        Args:
            tts: The engine, whose owner closes it. A stop during the warm-up closes it as well.
            settings: The defaults if None.
            wyoming: Serves the same streams over Wyoming's protocol, if not None.
            tracing: Receives spans of each request; None for no traces.

        Raises:
            ValueError: The settings do not suit the model.
            OSError: The folder of uploaded voices cannot be read.
        """
        settings = settings or ServerSettings()
        self.streams = SpeechStreams(tts, settings, tracing)
        self._tts = tts
        self._wyoming = wyoming
        self._stopping = False
        names = settings.allowed_hosts
        hosts = [] if names is None else [Middleware(AllowedHosts, names=names)]
        handlers: dict[Any, Any] = {HTTPException: http_error}
        self.app = Starlette(
            routes=[  # speech first: they are tried in this order
                *ElevenLabs(self.streams).routes(),
                WebSocketRoute("/v1/audio/speech/ws", Nari(self.streams).serve),
                Mount("/v1", OpenAI(self.streams).application()),
                Mount("/tts", Cartesia(self.streams).application()),
                Mount("/vapi", Vapi(self.streams).application()),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/version", self._version),
                Route("/openapi.json", self._schema),
                *Page(self.streams, self._unready_reason).routes(),
            ],
            middleware=[
                Middleware(RequestIds),
                *hosts,
                Middleware(
                    Authentication,
                    accounts=Accounts(settings.api_keys),
                    open_paths={*_HEALTH_PATHS, *Page.PUBLIC_PATHS},
                ),
            ],
            exception_handlers=handlers,
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        async with self._wyoming.serving(self.streams) if self._wyoming else nullcontext():
            warmup = asyncio.create_task(self._warm_up())
            yield
            self._stopping = True
            if not warmup.done():
                self._tts.close()  # ends the warm-up, whose thread a cancellation would not stop
            await warmup
        self.streams.cloner.close()

    async def _warm_up(self) -> None:
        try:
            if not self._tts.warm:
                await self._tts.awarmup()
        except MegakernelTTSError:
            if self._stopping:
                return
            _log.exception("The engine could not be warmed up; the server does not become ready.")

    async def _health(self, _: Request) -> Response:
        """Whether the engine's thread runs."""
        healthy = self.streams.running
        return JSONResponse({"healthy": healthy}, 200 if healthy else 503)

    async def _ready(self, _: Request) -> Response:
        """Whether a load balancer should send requests."""
        reason = self._unready_reason()
        return JSONResponse({"ready": reason is None, "reason": reason}, 503 if reason else 200)

    def _unready_reason(self) -> str | None:
        if not self.streams.running:
            return "the engine has stopped"
        if self.streams.draining:
            return "the server is stopping"
        if not self._tts.warm:
            return "the engine is warming up"
        return "the queue is full" if self.streams.full else None

    async def _version(self, _: Request) -> Response:
        return JSONResponse(
            {"version": megakernel_tts.__version__, "model": self.streams.catalog.model}
        )

    async def _schema(self, _: Request) -> Response:
        """The description of the HTTP interface."""
        schema = json.loads(_SCHEMA_FILE.read_text(encoding="utf-8"))
        schema["info"]["version"] = megakernel_tts.__version__
        return JSONResponse(schema)

    async def _metrics(self, _: Request) -> Response:
        metrics = self.streams.metrics
        return PlainTextResponse(metrics.text(), headers={"content-type": metrics.MEDIA_TYPE})
