"""One process of a load generator: sends requests for speech at random times and reads the audio.

For each `RandomLoad` on a line of standard input it prints a line with a `LoadRecord`, both as
JSON. It ends with its input. `bench.load` starts it.
"""

import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import SimpleNamespace

import aiohttp

from megakernel_tts.bench.playback import PlaybackGaps

READY = "ready"  # the first line
_BYTES_PER_S = 48_000  # of 16-bit samples at 24 kHz
_READ_TIMEOUT_S = 60.0  # without a byte of a reply
_REFUSALS = ("overloaded", "draining")  # codes of a server that has no capacity


@dataclass(frozen=True)
class RandomLoad:
    """Requests with independent, random times of arrival (a Poisson process).

    Attributes:
        url: Of OpenAI's endpoint for speech.
        fields: Of each request, which also gets a seed of its own.
        rate: Requests per second.
        start_s: When the arrivals start, in seconds of `time.monotonic`, whose clock all
            processes of a host share.
        duration_s: Seconds in which requests arrive.
        seed: Of the times of arrival and of the speech.
    """

    url: str
    fields: Mapping[str, object]
    rate: float
    start_s: float
    duration_s: float
    seed: int


class Outcome(StrEnum):
    """What became of a request."""

    COMPLETE = "complete"
    REFUSED = "refused"  # for lack of capacity
    FAILED = "failed"  # with another error, or audio without an end


@dataclass(frozen=True)
class StreamRecord:
    """A request and its audio. Times are in seconds.

    Attributes:
        arrival_s: When it should have been sent, after the start of the load.
        delay_s: From the arrival until the HTTP library had a connection and wrote the body.
        end_s: From then to the end of the reply.
        outcome: What became of it.
        first_s: From the sending of the body to the first audio; None if there was none.
        audio_s: Duration of its audio.
        gaps_s: Time without audio before each late chunk, if it is played from its first chunk on.
    """

    arrival_s: float
    delay_s: float
    end_s: float
    outcome: Outcome
    first_s: float | None
    audio_s: float
    gaps_s: tuple[float, ...]

    @property
    def sent_s(self) -> float:
        """When it was sent, after the start of the load."""
        return self.arrival_s + self.delay_s

    @property
    def ended_s(self) -> float:
        """When its reply ended, after the start of the load."""
        return self.sent_s + self.end_s


@dataclass(frozen=True)
class LoadRecord:
    """What one process did with a load.

    Attributes:
        streams: The requests in the order of their ends.
        cpu_s: CPU time of the process.
    """

    streams: tuple[StreamRecord, ...]
    cpu_s: float

    @classmethod
    def parse(cls, line: str) -> "LoadRecord":
        """Reads a line that the process printed."""
        content = json.loads(line)
        streams = (
            StreamRecord(
                **(each | {"gaps_s": (*each["gaps_s"],), "outcome": Outcome(each["outcome"])})
            )
            for each in content["streams"]
        )
        return cls((*streams,), content["cpu_s"])


async def send_load(load: RandomLoad) -> LoadRecord:
    """Sends the requests and reads every reply to its end."""
    rng, records = random.Random(load.seed), list[StreamRecord]()
    cpu_s, seed = time.process_time(), load.seed << 32
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_READ_TIMEOUT_S)
    connector, tracing = aiohttp.TCPConnector(limit=0), aiohttp.TraceConfig()
    tracing.on_request_chunk_sent.append(_note_sending)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trace_configs=[tracing]
    ) as http:

        async def send(arrival_s: float, seed: int) -> None:
            records.append(await _send_request(http, load, arrival_s, seed))

        async with asyncio.TaskGroup() as tasks:
            arrival_s = rng.expovariate(load.rate)
            while arrival_s < load.duration_s:
                await asyncio.sleep(max(0.0, load.start_s + arrival_s - time.monotonic()))
                tasks.create_task(send(arrival_s, seed))
                arrival_s, seed = arrival_s + rng.expovariate(load.rate), seed + 1
    return LoadRecord((*records,), time.process_time() - cpu_s)


@dataclass
class _Sending:
    """When the library wrote the body of a request; before that, when it was called.

    The load counts from the body, as Nari's benchmark does: a connection and the library's own work
    are not the server's time.
    """

    time_s: float


async def _note_sending(_session: object, context: SimpleNamespace, _params: object) -> None:
    """Called by the library as it writes a body, which is a single piece."""
    context.trace_request_ctx.time_s = time.monotonic()


async def _send_request(
    http: aiohttp.ClientSession, load: RandomLoad, arrival_s: float, seed: int
) -> StreamRecord:
    """Sends one request and reads its reply."""
    sending = _Sending(time.monotonic())

    def elapsed_s() -> float:
        return time.monotonic() - sending.time_s

    first_s, num_bytes, playback = None, 0, PlaybackGaps()
    body = {**load.fields, "seed": seed}
    try:
        async with http.post(load.url, json=body, trace_request_ctx=sending) as reply:
            if reply.status == 200:
                async for part in reply.content.iter_any():
                    now_s = elapsed_s()
                    first_s = now_s if first_s is None else first_s
                    num_bytes += len(part)
                    playback.add(now_s, len(part) / _BYTES_PER_S)
                outcome = Outcome.COMPLETE
            else:
                outcome = await _outcome_of_error(reply)
    except (aiohttp.ClientError, TimeoutError):
        outcome = Outcome.FAILED
    return StreamRecord(
        arrival_s,
        sending.time_s - load.start_s - arrival_s,
        elapsed_s(),
        outcome,
        first_s,
        num_bytes / _BYTES_PER_S,
        (*playback.gaps_s,),
    )


async def _outcome_of_error(reply: aiohttp.ClientResponse) -> Outcome:
    """Distinguishes a lack of capacity from other errors."""
    try:
        code = (await reply.json(content_type=None))["error"]["code"]
    except (ValueError, KeyError, TypeError):  # of a proxy, perhaps
        return Outcome.FAILED
    return Outcome.REFUSED if code in _REFUSALS else Outcome.FAILED


def main() -> None:
    """Serves the lines of standard input."""
    gc.freeze()
    print(READY, flush=True)
    for line in sys.stdin:
        record = asyncio.run(send_load(RandomLoad(**json.loads(line))))
        print(json.dumps(asdict(record)), flush=True)


if __name__ == "__main__":
    main()
