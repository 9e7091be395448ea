"""The event loop of the server, and of its engine processes."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import uvicorn


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine on the event loop of uvicorn's choice: uvloop, where it exists.

    uvloop combines the messages that are sent to a connection in one iteration.
    """
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        runner.run(main)
