"""Kills an engine process of a speech service under load."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from bench.load import LoadClients, all_streams, wait_with_progress
from bench.load_client import Outcome
from bench.running_server import wait_until
from bench.service import POLL_INTERVAL_S, Service

_RECOVERY_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class EngineFailure:
    """What the end of an engine process did to a service under load.

    Attributes:
        rate: Requests per second.
        requests: Number of requests.
        open_streams: Requests that were open when the process was killed, on all engines.
        lost_streams: Those of them that ended with an error.
        last_error_s: Seconds until the last of these errors; None without one.
        other_errors: Requests beside them that ended with an error.
        refused: Requests that the server refused for lack of capacity.
        underruns_of_open_streams: Late chunks of the open streams that were not lost.
        underruns: Late chunks of all streams that were not lost.
        longest_gap_ms: Longest time without audio before one of them.
        recovery_s: Seconds until all engines were warm again.
    """

    rate: float
    requests: int
    open_streams: int
    lost_streams: int
    last_error_s: float | None
    other_errors: int
    refused: int
    underruns_of_open_streams: int
    underruns: int
    longest_gap_ms: float
    recovery_s: float


def measure_failure(
    service: Service,
    clients: LoadClients,
    fields: Mapping[str, object],
    rate: float,
    duration_s: float,
) -> EngineFailure:
    """Kills the last engine process after a third of a load.

    Args:
        service: All of its engines are warm.
        clients: Send the load.
        fields: Of each request.
        rate: Requests per second.
        duration_s: Seconds in which requests arrive.

    Raises:
        TimeoutError: The engine does not become warm again.
    """
    engines = service.engines()
    start_s = clients.send(service.authority, fields, rate, duration_s)
    wait_with_progress(start_s + duration_s / 3, f"{rate:g} requests/s, then an engine is killed")
    killed_s = time.monotonic()
    engines[-1].kill()

    def recovered() -> bool:
        others = [process for process in service.engines() if process != engines[-1]]
        return len(others) == service.num_ready() == len(engines)

    wait_until(recovered, _RECOVERY_TIMEOUT_S, POLL_INTERVAL_S)
    recovery_s = time.monotonic() - killed_s
    wait_with_progress(start_s + duration_s, f"{rate:g} requests/s after the recovery")
    streams = all_streams(clients.records())
    killed_after_s = killed_s - start_s
    open_streams = [each for each in streams if each.sent_s < killed_after_s < each.ended_s]
    failed = [each for each in streams if each.outcome is Outcome.FAILED]
    lost = [each for each in open_streams if each.outcome is Outcome.FAILED]
    ends_s = [each.ended_s for each in lost]
    gaps_s = [gap for each in streams if each not in lost for gap in each.gaps_s]
    return EngineFailure(
        rate=rate,
        requests=len(streams),
        open_streams=len(open_streams),
        lost_streams=len(lost),
        last_error_s=round(max(ends_s) - killed_after_s, 3) if lost else None,
        other_errors=len(failed) - len(lost),
        refused=sum(each.outcome is Outcome.REFUSED for each in streams),
        underruns_of_open_streams=sum(
            len(each.gaps_s) for each in open_streams if each not in lost
        ),
        underruns=len(gaps_s),
        longest_gap_ms=round(1e3 * max(gaps_s, default=0.0), 3),
        recovery_s=round(recovery_s, 2),
    )
