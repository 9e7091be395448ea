"""Access: keys of clients, and the origin of requests from browsers."""

import hmac
from collections.abc import Collection, Iterator, Sequence
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_KEY_HEADERS = ("x-api-key", "xi-api-key", "x-vapi-secret")
_KEY_PARAMETERS = ("api_key", "access_token")
_SCHEMES = ("bearer", "token")


class Authentication:
    """Middleware that refuses requests without a valid key, and those of other sites' pages.

    A key is sent as `Authorization: Bearer` (or `Token`), as `X-API-Key` (or `xi-api-key`, or
    `X-Vapi-Secret`), or as the query parameter `api_key` or `access_token`. A browser sends the
    header `Origin` with the requests of a page; a page of another site could otherwise use a server
    on the same machine.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        """Wraps an application.

        Args:
            app: The application.
            keys: Valid keys; without any, no key is needed.
            open_paths: Paths that need no key.
        """
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in self._open_paths:
            headers = Headers(scope=scope)
            if not self._has_key(scope, headers):
                refusal = _refusal(401, "A valid API key is needed.", "invalid_api_key")
                await refusal(scope, receive, send)
                return
            if not _same_site(headers):
                message = "Pages of other sites may not use this server."
                await _refusal(403, message, "invalid_origin")(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope, headers: Headers) -> bool:
        if not self._keys:
            return True
        # All keys are compared, so that the time does not depend on which one matches.
        given = [key.encode() for key in _keys_of(scope, headers)]
        return any([hmac.compare_digest(key, one) for key in self._keys for one in given])


def _keys_of(scope: Scope, headers: Headers) -> Iterator[str]:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() in _SCHEMES:
        yield credentials.strip()
    for name in _KEY_HEADERS:
        if value := headers.get(name):
            yield value
    query = parse_qs(scope["query_string"].decode("latin-1"))
    for name in _KEY_PARAMETERS:
        yield from query.get(name, ())


def _same_site(headers: Headers) -> bool:
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def _refusal(status: int, message: str, code: str) -> JSONResponse:
    """A refusal in OpenAI's format, of a request or of a WebSocket's handshake."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": error}, status, headers)
