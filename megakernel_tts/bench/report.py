"""Figures as a table, a file and a picture, with what a reader must know of how they were taken."""

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from megakernel_tts.bench.event_loop import EventLoop
from megakernel_tts.bench.peers import Peer
from megakernel_tts.bench.stages import Stages
from megakernel_tts.bench.timing import FirstChunk, Streaming
from megakernel_tts.sampling import Sampling

_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Memory:
    """Of the GPU, by torch's count, in GB (1e9 bytes)."""

    loaded: float
    peak: float


@dataclass(frozen=True)
class Report:
    """All figures of a model.

    Attributes:
        model: As it was named, or the size of random weights.
        backend: What made the frames.
        device: Its name.
        dtype: Of the talker and the predictor.
        text: What was said.
        layout: Where the text went in the prompt.
        sampling: How it was drawn, every time with another seed.
        first_chunk: Its time.
        first_chunk_cold: Its time if nothing is kept of the prompts before.
        stages: What that consists of.
        streaming: For every number of streams and every size of chunk.
        event_loop: With the most streams.
        memory: None without a GPU.
        peers: Those that were asked for.
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
    peers: tuple[Peer, ...] = ()


def provenance(packages: Sequence[str] = ("torch",)) -> dict[str, str]:
    """Machine, versions, commit (of a checkout) and date."""
    found = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
    if commit := _commit():
        found["commit"] = commit
    return found | {"date": date.today().isoformat()}


def _commit() -> str | None:
    """Of the checkout that this package is in; None if it was installed elsewhere."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(_PACKAGE), *arguments]
        try:
            run = subprocess.run(command, capture_output=True, text=True)
        except OSError:  # there is no git
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", "__init__.py") is not None
    return git("describe", "--always", "--dirty") if tracked else None


def write_json(report: Report, file: Path) -> None:
    """Writes all figures."""
    content = asdict(report) | provenance()
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def table(report: Report) -> Iterator[str]:
    """The figures for a reader, line by line."""
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
    yield "chunk  streams  ms/frame  real-time factor  first chunk, first to last stream (ms)"
    for one in report.streaming:
        places = " ".join(f"{milliseconds:.1f}" for milliseconds in one.first_chunk_ms)
        yield (
            f"{one.chunk_frames:5}  {one.streams:7}  {one.ms_per_frame:8.2f}  "
            f"{one.real_time_factor:16.4f}  {places}"
        )
    late = report.event_loop
    yield ""
    yield (
        f"Event loop late, {late.streams} streams: p50 {late.p50:.2f} ms, p99 {late.p99:.2f} ms, "
        f"at most {late.most:.2f} ms ({late.most_at_rest:.2f} at rest)"
    )
    for peer in report.peers:
        yield ""
        yield from _peer_table(peer, report)


def _peer_table(peer: Peer, report: Report) -> Iterator[str]:
    if peer.note is not None:
        yield peer.note
        return
    alone = {one.chunk_frames: one for one in report.streaming if one.streams == 1}
    yield f"{peer.name} ({peer.version or 'version unknown'}), and how many times as long it takes"
    for theirs in peer.figures:
        whole = theirs.chunk_frames is None
        ours = alone[max(alone) if theirs.chunk_frames is None else theirs.chunk_frames]
        yield (
            f"  {'whole speech' if whole else f'chunk {theirs.chunk_frames}'}: "
            f"first chunk {theirs.first_chunk_ms:.2f} ms "
            f"({theirs.first_chunk_ms / ours.first_chunk_ms[0]:.2f} x), "
            f"{theirs.ms_per_frame:.2f} ms/frame "
            f"({theirs.ms_per_frame / ours.ms_per_frame:.2f} x that of chunk {ours.chunk_frames})"
        )


def plot(report: Report, file: Path) -> None:
    """Draws the waterfall of the first chunk as a PNG; needs matplotlib."""
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
    axes.set_xlabel("milliseconds since the text was handed over")
    axes.set_title(f"First chunk: {report.model}, {report.backend}, {report.device}", fontsize=10)
    figure.savefig(file, format="png", dpi=150)
