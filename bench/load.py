"""Load of a speech server from several client processes, and its figures."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain

import numpy as np
from tqdm import tqdm

from bench.load_client import READY, LoadRecord, Outcome, RandomLoad, StreamRecord

_START_DELAY_S = 0.2  # until every process has read its load
_PROGRESS_S = 0.5  # between updates of the progress bar
_CLIENT = (sys.executable, "-m", "bench.load_client")


@dataclass(frozen=True)
class LoadFigures:
    """Figures of requests that arrive at random.

    Attributes:
        rate: Requests per second.
        duration_s: Seconds in which they arrive.
        requests: Number of requests.
        complete: Requests whose audio was received to its end.
        refused: Requests that the server refused for lack of capacity.
        failed: Requests that ended with another error.
        served_per_second: Complete requests, divided by the time until the last one ended.
        audio_seconds_per_second: Seconds of all audio, divided by the same time.
        max_concurrent: Requests that were open at the same time at most.
        first_audio_ms_p50: Median time from the sending of a request's body to its first audio.
        first_audio_ms_p95: 95th percentile of it.
        first_audio_ms_p99: 99th percentile of it.
        underruns: Late chunks, if each stream is played from its first chunk on.
        streams_with_underruns: Streams with a late chunk.
        longest_gap_ms: Longest time without audio before a late chunk.
        client_delay_ms_p50: Median time from the arrival of a request to the sending of its body:
            the client's process is scheduled, and its library has a connection.
        client_delay_ms_p99: 99th percentile of it.
        client_cores: CPU time of each client process, divided by the same time.
    """

    rate: float
    duration_s: float
    requests: int
    complete: int
    refused: int
    failed: int
    served_per_second: float
    audio_seconds_per_second: float
    max_concurrent: int
    first_audio_ms_p50: float
    first_audio_ms_p95: float
    first_audio_ms_p99: float
    underruns: int
    streams_with_underruns: int
    longest_gap_ms: float
    client_delay_ms_p50: float
    client_delay_ms_p99: float
    client_cores: tuple[float, ...]

    def holds(self, max_p95_ms: float, max_underruns: float) -> bool:
        """Whether each request was sent and served, in time and without underruns.

        Args:
            max_p95_ms: Bound of the 95th percentile of the time to the first audio, and of the 99th
                of the clients' delays, beyond which they do not send at the rate.
            max_underruns: Share of the streams that may have an underrun.
        """
        served = 0 < self.requests == self.complete
        continuous = self.streams_with_underruns <= max_underruns * self.requests
        in_time = max(self.first_audio_ms_p95, self.client_delay_ms_p99) <= max_p95_ms
        return served and continuous and in_time


def summarise(rate: float, duration_s: float, records: Sequence[LoadRecord]) -> LoadFigures:
    """Returns the figures of a load.

    Args:
        rate: Requests per second of all processes.
        duration_s: Seconds in which they arrived.
        records: One of each client process.
    """
    streams = all_streams(records)
    elapsed_s = max([duration_s, *(each.ended_s for each in streams)])
    first_s = [each.first_s for each in streams if each.first_s is not None]
    p50, p95, p99 = _percentiles_ms(first_s, 50, 95, 99)
    delay_p50, delay_p99 = _percentiles_ms([each.delay_s for each in streams], 50, 99)
    gaps_s = [gap_s for each in streams for gap_s in each.gaps_s]
    number = {outcome: sum(each.outcome is outcome for each in streams) for outcome in Outcome}
    return LoadFigures(
        rate=rate,
        duration_s=duration_s,
        requests=len(streams),
        complete=number[Outcome.COMPLETE],
        refused=number[Outcome.REFUSED],
        failed=number[Outcome.FAILED],
        served_per_second=round(number[Outcome.COMPLETE] / elapsed_s, 2),
        audio_seconds_per_second=round(sum(each.audio_s for each in streams) / elapsed_s, 2),
        max_concurrent=_max_concurrent(streams),
        first_audio_ms_p50=p50,
        first_audio_ms_p95=p95,
        first_audio_ms_p99=p99,
        underruns=len(gaps_s),
        streams_with_underruns=sum(bool(each.gaps_s) for each in streams),
        longest_gap_ms=round(1e3 * max(gaps_s, default=0.0), 3),
        client_delay_ms_p50=delay_p50,
        client_delay_ms_p99=delay_p99,
        client_cores=tuple(round(record.cpu_s / elapsed_s, 3) for record in records),
    )


def wait_with_progress(end_s: float, description: str) -> None:
    """Waits until a time of `time.monotonic` and shows the progress on standard error."""
    total_s = max(0.0, end_s - time.monotonic())
    with tqdm(total=round(total_s, 1), desc=description, unit="s", disable=None) as progress:
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _PROGRESS_S))
            progress.update(round(total_s - max(0.0, end_s - time.monotonic()) - progress.n, 1))


def all_streams(records: Sequence[LoadRecord]) -> list[StreamRecord]:
    """The requests of all client processes."""
    return [*chain.from_iterable(record.streams for record in records)]


def _percentiles_ms(seconds: Sequence[float], *percents: int) -> list[float]:
    """Percentiles in milliseconds; 0 if there is no value."""
    if not seconds:
        return [0.0] * len(percents)
    return [round(1e3 * value, 3) for value in np.percentile(seconds, percents).tolist()]


def _max_concurrent(streams: Sequence[StreamRecord]) -> int:
    """Number of requests that were open at the same time at most."""
    changes = [(each.sent_s, 1) for each in streams]
    changes += [(each.ended_s, -1) for each in streams]
    open_streams = np.cumsum([change for _, change in sorted(changes)])
    return int(open_streams.max(initial=0))


class LoadClients:
    """Client processes, which share a load."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        """Takes over processes that are ready; `start` calls it."""
        self._processes = processes

    @classmethod
    @contextmanager
    def start(cls, number: int, cores: Sequence[int] = ()) -> Generator["LoadClients"]:
        """Starts processes, which the end of the block ends.

        Args:
            number: How many.
            cores: On which they run; empty for any.

        Raises:
            RuntimeError: A process has ended.
        """
        pipe = subprocess.PIPE
        with ExitStack() as stack:
            processes = [
                stack.enter_context(subprocess.Popen(_CLIENT, stdin=pipe, stdout=pipe, text=True))
                for _ in range(number)
            ]
            stack.callback(lambda: [process.kill() for process in processes])
            if cores:
                for process in processes:
                    os.sched_setaffinity(process.pid, cores)
            clients = cls(processes)
            for line in clients._read_lines():
                assert line.strip() == READY, line
            yield clients

    def send(
        self, authority: str, fields: Mapping[str, object], rate: float, duration_s: float
    ) -> float:
        """Sends requests that arrive at random; each process sends an equal part of them.

        Args:
            authority: Host and port of the server.
            fields: Of each request to OpenAI's endpoint for speech; a seed is added.
            rate: Requests per second of all processes.
            duration_s: Seconds in which requests arrive.

        Returns:
            When the arrivals start, in seconds of `time.monotonic`.
        """
        url, start_s = f"http://{authority}/v1/audio/speech", time.monotonic() + _START_DELAY_S
        for i, process in enumerate(self._processes):
            share = rate / len(self._processes)
            load = RandomLoad(url, fields, share, start_s, duration_s, seed=i)
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(load)) + "\n")
            process.stdin.flush()
        return start_s

    def records(self) -> list[LoadRecord]:
        """What each process did with the load; waits until every reply has ended.

        Raises:
            RuntimeError: A process has ended.
        """
        return [LoadRecord.parse(line) for line in self._read_lines()]

    def _read_lines(self) -> list[str]:
        """The next line of each process."""
        lines: list[str] = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                status = process.wait()
                raise RuntimeError(
                    f"A client process has ended with status {status}; its error is above."
                )
            lines.append(line)
        return lines
