"""The web page: its files at `/` and `/static`, and what it shows of the server at `/status`."""

import os
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import megakernel_tts
from megakernel_tts.server.streams import SpeechStreams

_FOLDER = Path(__file__).with_name("static")
_HEADERS = {
    "Cache-Control": "no-cache",  # a browser checks whether its copy is current
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; media-src blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Permissions-Policy": "microphone=(self)",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page:
    """The page of a server.

    Attributes:
        PUBLIC_PATHS: Paths of its files, which need no key: the page has a field for it.
    """

    PUBLIC_PATHS = frozenset({"/", *(f"/static/{file.name}" for file in _FOLDER.iterdir())})

    def __init__(self, streams: SpeechStreams, unready_reason: Callable[[], str | None]) -> None:
        """Prepares the routes.

        Args:
            streams: The streams of the server.
            unready_reason: Returns why the server is not ready, or None.
        """
        self._streams = streams
        self._unready_reason = unready_reason
        self._files = _Files(directory=_FOLDER, follow_symlink=True)

    def routes(self) -> list[BaseRoute]:
        """The routes of the page."""
        return [
            Route("/", self._index, include_in_schema=False),
            Route("/status", self._status, include_in_schema=False),
            Mount("/static", self._files),
        ]

    async def _index(self, request: Request) -> Response:
        return await self._files.get_response("index.html", request.scope)

    async def _status(self, _: Request) -> Response:
        """The model and the state of the server."""
        streams, catalog = self._streams, self._streams.catalog
        info = catalog.info
        voices = [
            {"name": name, "languages": info.voices.get(name, info.languages)}
            for name in catalog.voices
        ]
        status = {
            "version": megakernel_tts.__version__,
            "model": catalog.model,
            "note": info.note,
            "voices": voices,
            "languages": info.languages,
            "kind": info.kind,
            "takes_instruct": info.takes_instruct,
            "takes_voices": streams.cloner.available and streams.settings.uploads,
            "num_slots": streams.num_slots,
            "num_speaking": streams.num_speaking,
            "num_waiting": streams.num_waiting,
            "unready_reason": self._unready_reason(),
        }
        return JSONResponse(status, headers={"Cache-Control": "no-store"})


class _Files(StaticFiles):
    """The files, with headers that allow the page nothing but this server."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """See `StaticFiles`."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        return response
