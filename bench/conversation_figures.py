"""Figures of `bench.conversations`, its targets, and their table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.microphones import percentiles_ms

Percentiles = dict[str, float]  # p50, p95, p99 and max in milliseconds; empty without a value

_TOKENS, _FINAL, _FIRST_CHUNK, _UNDERRUNS = (
    "audio to tokens",
    "finalize to Final",
    "first chunk",
    "underruns",
)
_FINAL_TARGET_MS = 30.0
_CHUNK_MS, _MAX_STREAMS = 80, 64  # for which there are targets of a chunk
_ONE_STREAM_TARGET_MS, _STREAMS_TARGET_MS = 2.0, 5.0


def percentiles(values_s: Sequence[float]) -> Percentiles:
    """Percentiles and maximum of seconds, in milliseconds."""
    largest = {"max": round(1000 * max(values_s), 2)} if values_s else {}
    return percentiles_ms(values_s, 50, 95, 99) | largest


@dataclass(frozen=True)
class Targets:
    """Bounds in milliseconds.

    Attributes:
        tokens_p99_ms: Of audio to tokens; None if there is none for this length of a chunk, or this
            number of streams.
        final_ms: Of every Final.
        first_chunk_p95_ms: Of the first chunk.
    """

    tokens_p99_ms: float | None
    final_ms: float
    first_chunk_p95_ms: float

    @classmethod
    def make(cls, conversations: int, chunk_ms: int, first_chunk_p95_ms: float) -> "Targets":
        """The targets of recognition, with one of synthesis.

        Args:
            conversations: Number of streams.
            chunk_ms: Length of a chunk of recognition.
            first_chunk_p95_ms: Bound of the first chunk.
        """
        tokens_ms = None
        if chunk_ms == _CHUNK_MS and conversations <= _MAX_STREAMS:
            tokens_ms = _ONE_STREAM_TARGET_MS if conversations == 1 else _STREAMS_TARGET_MS
        return cls(tokens_ms, _FINAL_TARGET_MS, first_chunk_p95_ms)


@dataclass(frozen=True)
class RecognitionFigures:
    """Recognition in one run; `bench.conversations` defines the times.

    Attributes:
        chunks: Chunks that were computed.
        audio_to_tokens_ms: Of these chunks.
        chunks_beside_synthesis: Chunks whose step ended while speech was synthesised.
        beside_synthesis_ms: Audio to tokens of these.
        results: Chunks whose new tokens were read.
        audio_to_result_ms: Of these.
        push_delay_ms: From the arrival of a packet to its push: the event loop is late.
        tokens_per_frame: Tokens, divided by frames of 80 ms.
        finals: Number of final results.
        finalize_to_final_ms: Of these.
    """

    chunks: int
    audio_to_tokens_ms: Percentiles
    chunks_beside_synthesis: int
    beside_synthesis_ms: Percentiles
    results: int
    audio_to_result_ms: Percentiles
    push_delay_ms: Percentiles
    tokens_per_frame: float
    finals: int
    finalize_to_final_ms: Percentiles

    def missed(self, targets: Targets) -> list[str]:
        """The targets that are missed."""
        tokens_ms, bound_ms = self.audio_to_tokens_ms.get("p99", np.inf), targets.tokens_p99_ms
        missed = [_TOKENS] if bound_ms is not None and tokens_ms > bound_ms else []
        is_late = self.finalize_to_final_ms.get("max", np.inf) > targets.final_ms
        return [*missed, _FINAL] if is_late else missed


@dataclass(frozen=True)
class SynthesisFigures:
    """Synthesis in one run.

    Attributes:
        replies: Number of requests.
        first_chunk_ms: Of these.
        audio_s: Seconds of all audio.
        underruns: Late chunks.
        replies_with_underruns: Requests with a late chunk.
        longest_gap_ms: Longest time without audio before a late chunk.
    """

    replies: int
    first_chunk_ms: Percentiles
    audio_s: float
    underruns: int
    replies_with_underruns: int
    longest_gap_ms: float

    def missed(self, targets: Targets) -> list[str]:
        """The targets that are missed."""
        is_late = self.first_chunk_ms.get("p95", np.inf) > targets.first_chunk_p95_ms
        missed = [_FIRST_CHUNK] if is_late else []
        return [*missed, _UNDERRUNS] if self.underruns else missed


@dataclass(frozen=True)
class ConversationFigures:
    """One run.

    Attributes:
        recognition: None if only synthesis ran.
        synthesis: None if only recognition ran.
        host_cores: CPU time of the process, divided by the time.
        missed_targets: Names of targets.
    """

    recognition: RecognitionFigures | None
    synthesis: SynthesisFigures | None
    host_cores: float
    missed_targets: list[str]


def table(runs: Mapping[str, ConversationFigures], targets: Targets) -> str:
    """A line for each figure, with a column for each run.

    Args:
        runs: By name.
        targets: The bounds.
    """
    tokens_target = "-" if targets.tokens_p99_ms is None else f"p99 {targets.tokens_p99_ms:g}"
    heads = [
        ("ms, p50 / p95 / p99 / max", "target"),
        (_TOKENS, tokens_target),
        ("  beside synthesis", "-"),
        ("audio to result", "-"),
        ("push delay", "-"),
        (_FINAL, f"max {targets.final_ms:g}"),
        (_FIRST_CHUNK, f"p95 {targets.first_chunk_p95_ms:g}"),
        (f"{_UNDERRUNS} (longest gap, ms)", "0"),
        ("chunks, finals, replies", "-"),
        ("host cores", "-"),
        ("within targets", ""),
    ]
    columns = [[name, *_cells(run)] for name, run in runs.items()]
    rows = zip(heads, *columns, strict=True)
    return "\n".join(
        f"{label:<30} {target:>8}" + "".join(f" {cell:>30}" for cell in cells)
        for (label, target), *cells in rows
    )


def _cells(run: ConversationFigures) -> list[str]:
    """A run's column of the table, without its name."""
    recognition, synthesis = run.recognition, run.synthesis
    cells, counts = ["-"] * 7, ["-"] * 3
    if recognition is not None:
        cells[:5] = [
            _join(recognition.audio_to_tokens_ms),
            _join(recognition.beside_synthesis_ms),
            _join(recognition.audio_to_result_ms),
            _join(recognition.push_delay_ms),
            _join(recognition.finalize_to_final_ms),
        ]
        counts[:2] = str(recognition.chunks), str(recognition.finals)
    if synthesis is not None:
        gaps = f"{synthesis.underruns} ({synthesis.longest_gap_ms:g})"
        cells[5:] = _join(synthesis.first_chunk_ms), gaps
        counts[2] = str(synthesis.replies)
    verdict = f"no: {', '.join(run.missed_targets)}" if run.missed_targets else "yes"
    return [*cells, ", ".join(counts), f"{run.host_cores:g}", verdict]


def _join(times_ms: Percentiles) -> str:
    """The percentiles in a cell."""
    return " / ".join(f"{time_ms:g}" for time_ms in times_ms.values()) or "-"
