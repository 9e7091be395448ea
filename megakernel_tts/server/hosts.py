"""The hosts under which clients reach a server: the guard against DNS rebinding.

A page of another site can have its own name resolve to 127.0.0.1. To a browser the server on this
machine is then of the page's site, and differs in the name in the header `Host` only.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from megakernel_tts.server.auth import refusal


class AllowedHosts:
    """Middleware that refuses requests whose header `Host` has another name than allowed ones.

    Addresses and names of this machine (`localhost`, `*.localhost`) are always allowed, and so are
    requests without the header, which no browser sends.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """Wraps an application.

        Args:
            app: The application.
            names: Names of hosts, without ports, that are allowed as well.
        """
        self._app = app
        self._names = frozenset(map(_normalized, names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] in ("http", "websocket"):
            host = Headers(scope=scope).get("host", "")
            if host and not self._allows(name := _name_of(host)):
                message = (
                    f"The host {name!r} is not allowed. If it is a name of this server, start the "
                    f"server with --allowed-host {name}."
                )
                await refusal(403, message, "invalid_host")(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, name: str) -> bool:
        local = name == "localhost" or name.endswith(".localhost")
        return local or name in self._names or _is_address(name)


def _name_of(host: str) -> str:
    """The name or address in a header `Host`, without the port."""
    try:
        return _normalized(urlsplit(f"//{host}").hostname or host)
    except ValueError:  # brackets without an address
        return host


def _normalized(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
