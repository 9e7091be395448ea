"""Access: keys of clients, and the origin of requests from browsers."""

from collections.abc import Collection, Iterator
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from megakernel_tts.server.accounts import Accounts

_KEY_HEADERS = ("x-api-key", "xi-api-key", "x-vapi-secret")
_KEY_PARAMETERS = ("api_key", "access_token")
_SCHEMES = ("bearer", "token")


class Authentication:
    """Middleware that refuses requests without a valid key, and those of other sites' pages.

    A key is sent as `Authorization: Bearer` (or `Token`), as `X-API-Key` (or `xi-api-key`, or
    `X-Vapi-Secret`), or as the query parameter `api_key` or `access_token`. A browser sends the
    header `Origin` with the requests of a page; a page of another site could otherwise use a server
    on the same machine. The application finds the key's account in the scope's state.
    """

    def __init__(self, app: ASGIApp, accounts: Accounts, open_paths: Collection[str]) -> None:
        """Wraps an application.

        Args:
            app: The application.
            accounts: Accounts of the valid keys.
            open_paths: Paths that need no key.
        """
        self._app = app
        self._accounts = accounts
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in self._open_paths:
            headers = Headers(scope=scope)
            account = self._accounts.find(_keys_of(scope, headers))
            if account is None:
                refused = refusal(401, "A valid API key is needed.", "invalid_api_key")
                await refused(scope, receive, send)
                return
            if not _same_site(headers):
                message = "Pages of other sites may not use this server."
                await refusal(403, message, "invalid_origin")(scope, receive, send)
                return
            scope["state"]["account"] = account
        await self._app(scope, receive, send)


def _keys_of(scope: Scope, headers: Headers) -> Iterator[str]:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() in _SCHEMES:
        yield credentials.strip()
    for name in _KEY_HEADERS:
        if value := headers.get(name):
            yield value
    query = parse_qs(scope["query_string"].decode("latin-1"))
    for name in _KEY_PARAMETERS:
        yield from query.get(name, ())[:1]  # more would be more guesses for one request


def _same_site(headers: Headers) -> bool:
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def refusal(status: int, message: str, code: str) -> JSONResponse:
    """A refusal in OpenAI's format, of a request or of a WebSocket's handshake."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": error}, status, headers)
