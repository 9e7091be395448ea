"""Measures what the server adds to the engine's first chunk, its client included.

Requests to an engine in this process and to a server in another one alternate. Both engines have
random weights on a GPU, or the device is simulated: work takes the times of the 0.6B on an H200,
and the engine's code is that of a GPU. The clock starts when the whole text is passed to the
engine, or sent on a connection that the server has accepted; it ends with the first samples, or
with the first message or bytes of audio. A WebSocket's text may continue, so that the session is
opened before the text is pushed. The measured client uses plain sockets, as the time of a client
library is not the server's. With eight cores or more the server has four of its own. A request
ends with its first audio, and the next one comes when the engine has stopped it. Messages that
arrive for a stream after its cancellation was sent are counted. "Beside 63 sockets" each of 63
other streams speaks at the pace of playback: in this process, or on WebSockets of a third one.

python -m bench.server_overhead --json bench/results/server-overhead-cpu.json
python -m bench.server_overhead --model 0.6B --json bench/results/server-overhead-h200.json
"""

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.cartesia import cartesia_message
from bench.other_sockets import INTERVAL_S, other_sockets
from bench.plain_socket import PlainSocket
from bench.process_boundary import open_session, read_to_end, time_first_chunk
from bench.report import write
from bench.separate_cores import separate_cores
from bench.server_process import EngineSource, server_process
from bench.timed_device import H200_TIMES
from megakernel_tts import TTS, AudioChunk
from megakernel_tts.model.random_released import SIZES, write_released_checkpoint

_SLOTS = 80  # more than sockets, so that no stream waits for a slot
_OTHER_SOCKETS = 63
_SERVER_CORES = 4  # of its own, if there are eight
_ROUNDS = 10
# Before a request: the frame of the one before has ended, and others' frames are at any point.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.01, 0.03
_TEXT = "Certainly, I can help you with that. Which day of the week would suit you best?"


class _SocketClient:
    """Requests on one WebSocket.

    Attributes:
        num_after_cancel: Messages of streams that arrived after their cancellation was sent.
    """

    def __init__(self, socket: PlainSocket) -> None:
        self.num_after_cancel = 0
        self._socket = socket
        self._num_requests = 0

    @classmethod
    @asynccontextmanager
    async def connect(cls, host: str, port: int) -> AsyncGenerator["_SocketClient"]:
        """Opens the connection; the end of the block closes it."""
        async with PlainSocket.connect(host, port, "/tts/websocket") as socket:
            yield cls(socket)

    async def time_first_chunk(self) -> float:
        """Returns the seconds to the first chunk, and cancels the context.

        Raises:
            RuntimeError: The server has refused the text.
        """
        self._num_requests += 1
        context_id = str(self._num_requests)
        message = json.dumps(cartesia_message(_TEXT, context_id=context_id)).encode()
        start_s = time.perf_counter()
        self._socket.send(message)
        while True:
            content = await self._socket.receive()
            now_s = time.perf_counter()
            event = json.loads(content)
            if event["context_id"] != context_id:
                self.num_after_cancel += 1
            elif event["type"] == "error":
                raise RuntimeError(f"The server has refused speech: {event}")
            elif event["type"] == "chunk":
                break
        self._socket.send(json.dumps({"context_id": context_id, "cancel": True}).encode())
        return now_s - start_s


class _HttpClient:
    """Requests over HTTP, each on a connection of its own, which is opened before the pause."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        body = json.dumps({"input": _TEXT, "response_format": "pcm"}).encode()
        lines = ("POST /v1/audio/speech HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}")
        self._request = "\r\n".join((*lines, "", "")).encode() + body
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @classmethod
    @asynccontextmanager
    async def connect(cls, host: str, port: int) -> AsyncGenerator["_HttpClient"]:
        """Opens the first connection; the end of the block closes the last one."""
        client = cls(host, port)
        client._connection = await asyncio.open_connection(host, port)
        try:
            yield client
        finally:
            await client._disconnect()

    async def time_first_chunk(self) -> float:
        """Returns the seconds to the first bytes of audio, and opens another connection.

        Raises:
            RuntimeError: The server has refused the text.
        """
        assert self._connection is not None
        reader, writer = self._connection
        start_s = time.perf_counter()
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(1)
        seconds = time.perf_counter() - start_s
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"The server has refused speech: {head.decode()}")
        await self._disconnect()
        self._connection = await asyncio.open_connection(*self._address)
        return seconds

    async def _disconnect(self) -> None:
        assert self._connection is not None
        _, writer = self._connection
        writer.close()
        await writer.wait_closed()


async def _speak_locally(tts: TTS) -> None:
    """Speaks at the pace of playback until it is cancelled."""
    while True:
        session = await open_session(tts, _TEXT)
        try:
            async with aclosing(aiter(session)) as events:
                async for event in events:
                    if isinstance(event, AudioChunk):
                        await asyncio.sleep(len(event.pcm) / event.sample_rate)
        finally:
            session.cancel()
            await read_to_end(session)


@asynccontextmanager
async def _other_streams(tts: TTS, number: int) -> AsyncGenerator[None]:
    """Speaks in this process until the block ends; the streams have begun at different times."""
    tasks: list[asyncio.Task[None]] = []
    for _ in range(number):
        tasks.append(asyncio.create_task(_speak_locally(tts)))
        await asyncio.sleep(INTERVAL_S)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        if failures := [end for end in ends if not isinstance(end, asyncio.CancelledError)]:
            raise RuntimeError(f"Another stream has failed: {failures[0]!r}.")


@dataclass(frozen=True)
class _Side:
    """The engine, or the server.

    Attributes:
        request: Requests the text and gives the seconds to the first audio.
        others: Speaks so many other streams while a block runs.
    """

    request: Callable[[], Awaitable[float]]
    others: Callable[[int], AbstractAsyncContextManager[None]]


async def _measure(
    sides: tuple[_Side, _Side], requests: int, num_others: int
) -> tuple[list[float], list[float]]:
    """Returns the times of both sides in seconds; they alternate in rounds.

    Args:
        sides: The engine and the server.
        requests: To each side.
        num_others: Streams that the measured side speaks meanwhile.
    """
    rng = random.Random(0)
    times_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for side, times in zip(sides, times_s, strict=True):
            async with side.others(num_others) if num_others else nullcontext():
                for _ in range(requests // _ROUNDS):
                    await asyncio.sleep(rng.uniform(_MIN_PAUSE_S, _MAX_PAUSE_S))
                    times.append(await side.request())
    return times_s


def describe(engine_s: Sequence[float], server_s: Sequence[float]) -> dict[str, float]:
    """Returns medians and 95th percentiles in milliseconds, and their differences."""
    engine, server = (1000 * np.percentile(times, [50, 95]) for times in (engine_s, server_s))
    figures: dict[str, float] = {}
    for name, values in (("engine", engine), ("server", server), ("added", server - engine)):
        figures[f"{name}_p50"], figures[f"{name}_p95"] = (round(float(ms), 2) for ms in values)
    return figures


async def run(
    source: EngineSource,
    requests: int,
    cores: Sequence[int] = (),
    num_others: int = _OTHER_SOCKETS,
) -> dict[str, dict[str, float]]:
    """Returns the figures of all cases.

    Args:
        source: Of both engines.
        requests: Of each case, to the engine and to the server.
        cores: On which the server runs; empty for any.
        num_others: Streams of the case with other sockets.
    """
    figures: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        tts = stack.enter_context(source.load())
        await tts.awarmup()
        authority = await stack.enter_async_context(server_process(source, cores))
        host, port = authority.split(":")
        gc.freeze()

        cases = (
            ("websocket", _SocketClient, 0),
            ("http", _HttpClient, 0),
            (f"websocket_beside_{num_others}_sockets", _SocketClient, num_others),
        )
        for name, client_class, num_beside in cases:
            # A WebSocket's text may continue, so its prompt has another layout than a whole text's.
            live = client_class is _SocketClient
            engine = _Side(partial(time_first_chunk, tts, live=live), partial(_other_streams, tts))
            async with client_class.connect(host, int(port)) as client:
                others = partial(other_sockets, authority, text=_TEXT)
                server = _Side(client.time_first_chunk, others)
                times_s = await _measure((engine, server), requests, num_beside)
            figures[name] = describe(*times_s)
            if isinstance(client, _SocketClient):
                figures[name]["messages_after_cancel"] = client.num_after_cancel
    return figures


@contextmanager
def _source(model: str | None) -> Generator[EngineSource]:
    """The simulated device, or random weights of a released size in a temporary folder."""
    if model is None:
        yield EngineSource(_SLOTS)
        return
    with tempfile.TemporaryDirectory() as folder:
        print("writing random weights", flush=True)
        write_released_checkpoint(Path(folder), model, torch.device("cuda"))
        yield EngineSource(_SLOTS, folder)


def main() -> None:
    """Prints the figures; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=500, help="of each case (default: 500)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--model",
        choices=SIZES,
        help="random weights of a size on a GPU (default: simulated)",
    )
    options = parser.parse_args()
    # Before CUDA starts threads, which stay on the cores of the thread that starts them.
    with separate_cores(_SERVER_CORES) as cores, _source(options.model) as source:
        figures = asyncio.run(run(source, options.requests, cores))
    content: dict[str, object] = {"engine": "simulated device", "times_ms": asdict(H200_TIMES)}
    if options.model:
        gpu = torch.cuda.get_device_name()
        content = {"engine": f"{options.model}, random weights", "gpu": gpu}
    content |= {"server_cores_alone": len(cores), "requests": options.requests}
    content |= {"first_audio_ms": figures}
    write(content, options.json, ("torch", "uvicorn", "starlette", "websockets"))


if __name__ == "__main__":
    main()
