"""The benchmark's report: as a table, a JSON file and a plot, with its conditions."""

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megakernel_common.files import replace_file
from megakernel_tts import Sampling
from megakernel_tts.bench.arrivals import Arrivals
from megakernel_tts.bench.event_loop import EventLoop
from megakernel_tts.bench.peers import Peer
from megakernel_tts.bench.provenance import provenance
from megakernel_tts.bench.stages import Stages
from megakernel_tts.bench.timing import FirstChunk, Streaming
from megakernel_tts.bench.torch_graph import TorchGraph


@dataclass(frozen=True)
class Memory:
    """GPU memory that torch has allocated, in GB (1e9 bytes): after loading, and the maximum."""

    loaded: float
    peak: float


@dataclass(frozen=True)
class Report:
    """All figures of a model.

    Attributes:
        model: Name of the model, or size of the random weights.
        backend: Name of the backend.
        device: Name of the device.
        dtype: Of talker and code predictor.
        text: The synthesised text.
        layout: Where the text is in the prompt.
        sampling: Sampling parameters; the seed differs between requests.
        first_chunk: Time to the first chunk with a warm prefix cache.
        first_chunk_cold: Time to the first chunk with an empty prefix cache.
        stages: Stages of the time to the first chunk.
        streaming: Figures for each number of streams and each chunk size.
        event_loop: Delays of an event loop with the maximum number of streams.
        memory: None without a GPU.
        arrivals: Figures of random arrivals, for each requested rate.
        torch_graph: A CUDA graph of plain torch with each number of streams; empty without a GPU.
        peers: Figures of other programs, if requested.
    """

    model: str
    backend: str
    device: str
    dtype: str
    text: str
    layout: str
    sampling: Sampling
    first_chunk: FirstChunk
    first_chunk_cold: FirstChunk
    stages: Stages
    streaming: tuple[Streaming, ...]
    event_loop: EventLoop
    memory: Memory | None
    arrivals: tuple[Arrivals, ...] = ()
    torch_graph: tuple[TorchGraph, ...] = ()
    peers: tuple[Peer, ...] = ()


def write_json(report: Report, file: Path) -> None:
    """Writes all figures and their conditions as JSON.

    Raises:
        OSError: See `replace_file`.
    """
    content = asdict(report) | provenance()
    replace_file(file, (json.dumps(content, indent=2) + "\n").encode())


def table(report: Report) -> Iterator[str]:
    """Formats the figures as lines of text."""
    yield f"{report.model}: {report.backend}, {report.dtype}, on {report.device}"
    if report.memory is not None:
        yield f"GPU memory: {report.memory.loaded:.2f} GB, {report.memory.peak:.2f} at most"
    yield ""
    for name, first in (
        ("First chunk, cold", report.first_chunk_cold),
        ("First chunk, one frame", report.first_chunk),
    ):
        yield (
            f"{name} ({first.runs} runs): p50 {first.p50:.2f} ms, "
            f"p95 {first.p95:.2f} ms, p99 {first.p99:.2f} ms"
        )
    for name, milliseconds in vars(report.stages).items():
        yield f"  {name:12} {milliseconds:9.3f} ms"
    yield ""
    yield (
        "chunk  streams  ms/frame  real-time factor  frames/s  audio s/s  underruns  "
        "first chunk, first to last stream (ms)"
    )
    for cell in report.streaming:
        first_chunks = " ".join(f"{milliseconds:.1f}" for milliseconds in cell.first_chunk_ms)
        yield (
            f"{cell.chunk_frames:5}  {cell.streams:7}  {cell.ms_per_frame:8.2f}  "
            f"{cell.real_time_factor:16.4f}  {cell.frames_per_second:8.1f}  "
            f"{cell.audio_seconds_per_second:9.2f}  {cell.underruns:9}  {first_chunks}"
        )
    for graph in report.torch_graph:
        yield (
            f"CUDA graph of plain torch, {graph.streams} streams, without codec: "
            f"{graph.ms_per_frame:.2f} ms/frame"
        )
    for arrivals in report.arrivals:
        yield ""
        yield (
            f"{arrivals.rate:g} requests per second for {arrivals.duration_s:g} s: "
            f"{arrivals.requests} requests, {arrivals.refused} refused, "
            f"{arrivals.max_concurrent} at once at most"
        )
        yield (
            f"  first chunk p50 {arrivals.first_chunk_ms_p50:.2f} ms, "
            f"p95 {arrivals.first_chunk_ms_p95:.2f} ms, p99 {arrivals.first_chunk_ms_p99:.2f} ms"
        )
        yield (
            f"  {arrivals.underruns} underruns in {arrivals.streams_with_underruns} streams, "
            f"{arrivals.longest_gap_ms:.1f} ms at most; "
            f"{arrivals.audio_seconds_per_second:.1f} audio seconds per second"
        )
    delay = report.event_loop
    yield ""
    yield (
        f"Event loop delay, {delay.streams} streams: p50 {delay.p50:.2f} ms, "
        f"p99 {delay.p99:.2f} ms, maximum {delay.max:.2f} ms ({delay.max_idle:.2f} when idle)"
    )
    for peer in report.peers:
        yield ""
        yield from _peer_table(peer, report)


def _peer_table(peer: Peer, report: Report) -> Iterator[str]:
    if peer.note is not None:
        yield peer.note
        return
    single = {cell.chunk_frames: cell for cell in report.streaming if cell.streams == 1}
    yield f"{peer.name} ({peer.version or 'version unknown'}), with its time relative to ours"
    for figures in peer.figures:
        chunk = figures.chunk_frames
        ours = single[max(single) if chunk is None else chunk]
        size = "whole speech" if chunk is None else f"chunk {chunk}"
        yield (
            f"  {size}: "
            f"first chunk {figures.first_chunk_ms:.2f} ms "
            f"({figures.first_chunk_ms / ours.first_chunk_ms[0]:.2f} x), "
            f"{figures.ms_per_frame:.2f} ms/frame "
            f"({figures.ms_per_frame / ours.ms_per_frame:.2f} x that of chunk {ours.chunk_frames})"
        )


def plot(report: Report, file: Path) -> None:
    """Plots the stages of the first chunk as a PNG; needs matplotlib.

    Raises:
        OSError: See `replace_file`.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  # an extra

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    start = 0.0
    stages = vars(report.stages)
    for row, milliseconds in enumerate(stages.values()):
        axes.barh(row, milliseconds, left=start)
        axes.text(start + milliseconds, row, f" {milliseconds:.2f}", va="center", fontsize=8)
        start += milliseconds
    axes.set_yticks(range(len(stages)), [name.replace("_", " ") for name in stages])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * start)
    axes.set_xlabel("milliseconds since the request")
    axes.set_title(f"First chunk: {report.model}, {report.backend}, {report.device}", fontsize=10)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    replace_file(file, image.getvalue())
