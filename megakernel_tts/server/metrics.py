"""Metrics in Prometheus' text format."""

from bisect import bisect_left
from collections.abc import Callable, Iterator

_PREFIX = "megakernel_tts:"
_LATENCY_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_RTF_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.25, 1.5, 2, 5, 10)
_DURATION_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)


class Counter:
    """A number that grows, for each combination of its labels' values."""

    def __init__(self, name: str, description: str, *labels: str) -> None:
        self._name, self._description, self._labels = _PREFIX + name, description, labels
        self._values: dict[tuple[str, ...], int] = {} if labels else {(): 0}

    def add(self, *values: str, amount: int = 1) -> None:
        """Adds an amount, for a value of each label."""
        self._values[values] = self._values.get(values, 0) + amount

    def lines(self, labels: str) -> Iterator[str]:
        """Its lines; `labels` are those of every metric."""
        yield from _head(self._name, self._description, "counter")
        for values, count in self._values.items():
            pairs = zip(self._labels, values, strict=True)
            own = "".join(f',{label}="{_escape(value)}"' for label, value in pairs)
            yield f"{self._name}{{{labels}{own}}} {count}"


class Gauge:
    """A value that is read when the metrics are."""

    def __init__(self, name: str, description: str, read: Callable[[], float]) -> None:
        self._name, self._description, self._read = _PREFIX + name, description, read

    def lines(self, labels: str) -> Iterator[str]:
        """Its lines; `labels` are those of every metric."""
        yield from _head(self._name, self._description, "gauge")
        yield f"{self._name}{{{labels}}} {self._read():g}"


class Histogram:
    """A distribution of values."""

    def __init__(self, name: str, description: str, bounds: tuple[float, ...]) -> None:
        self._name, self._description, self._bounds = _PREFIX + name, description, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Adds a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, labels: str) -> Iterator[str]:
        """Its lines; `labels` are those of every metric."""
        yield from _head(self._name, self._description, "histogram")
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            shown = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{self._name}_bucket{{{labels},le="{shown}"}} {total}'
        yield f"{self._name}_sum{{{labels}}} {self._sum:g}"
        yield f"{self._name}_count{{{labels}}} {total}"


class Metrics:
    """The metrics of a server, under the names that vLLM-Omni and SGLang-Omni share.

    Attributes:
        first_audio_s: From the request (of live text: its first word) to the first audio.
        audio_s: Durations of streams.
        real_time_factor: Time of a stream divided by the duration of its audio.
        underrun_s: Seconds for which playback had to wait for audio, per stream.
        continuity_ok: Streams with at most 100 ms of them.
        latency_s: From the request to its last audio.
        slot_wait_s: Part of `first_audio_s` for which all slots were in use.
        cancel_s: From a cancellation until the engine has stopped the stream.
        finished: Streams that ended, by reason.
        accepted: Streams that were opened, by name of the key.
        characters: Characters of their texts, by name of the key.
        rejected: Requests that were refused, by reason and name of the key.
    """

    MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model: str) -> None:
        """Starts all metrics at 0.

        Args:
            model: Value of the label `model_name`.
        """
        self._labels = f'model_name="{_escape(model)}"'
        self.first_audio_s = Histogram(
            "audio_ttfp_s", "Seconds to the first audio packet.", _LATENCY_BUCKETS_S
        )
        self.audio_s = Histogram("audio_duration_s", "Seconds of audio.", _DURATION_BUCKETS_S)
        self.real_time_factor = Histogram("audio_rtf", "Real-time factor.", _RTF_BUCKETS)
        self.underrun_s = Histogram(
            "audio_underrun_s", "Seconds for which playback waited.", _LATENCY_BUCKETS_S
        )
        self.continuity_ok = Counter(
            "audio_continuity_ok_total", "Streams without a longer wait.", "threshold_ms"
        )
        self.latency_s = Histogram(
            "e2e_request_latency_s", "Seconds to the last audio.", _DURATION_BUCKETS_S
        )
        self.slot_wait_s = Histogram(
            "slot_wait_s", "Seconds for which all slots were in use.", _LATENCY_BUCKETS_S
        )
        self.cancel_s = Histogram(
            "cancel_latency_s", "Seconds from cancellation to a free slot.", _LATENCY_BUCKETS_S
        )
        self.finished = Counter("requests_success_total", "Streams that ended.", "finished_reason")
        self.accepted = Counter("requests_total", "Streams that were opened.", "key")
        self.characters = Counter("characters_total", "Characters of their texts.", "key")
        self.rejected = Counter(
            "rejected_requests_total", "Requests that were refused.", "reason", "key"
        )
        self._gauges: list[Gauge] = []
        self._counters: list[Counter] = []

    def add_gauge(self, name: str, description: str, read: Callable[[], float]) -> None:
        """Adds a gauge that calls `read` whenever the metrics are read."""
        self._gauges.append(Gauge(name, description, read))

    def add_counter(self, counter: Counter) -> None:
        """Adds a counter that its owner counts with."""
        self._counters.append(counter)

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        metrics: list[Counter | Gauge | Histogram] = [
            *self._gauges,
            *self._counters,
            *(value for value in vars(self).values() if isinstance(value, Counter | Histogram)),
        ]
        return "\n".join(line for metric in metrics for line in metric.lines(self._labels)) + "\n"


def _head(name: str, description: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} {kind}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
