"""The benchmark: loads a model, measures it, and collects the figures in a report."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from megakernel_common.devices import pick_device
from megakernel_tts import TTS
from megakernel_tts.bench.arrivals import Arrivals, measure_arrivals
from megakernel_tts.bench.event_loop import measure_event_loop
from megakernel_tts.bench.peers import PEERS, Peer, Task, run_peer
from megakernel_tts.bench.report import Memory, Report
from megakernel_tts.bench.stages import measure_stages
from megakernel_tts.bench.timing import BenchmarkRequest, Streaming, time_first_chunk, time_streams
from megakernel_tts.bench.torch_graph import measure_torch_graphs
from megakernel_tts.model.hub import find_checkpoint
from megakernel_tts.model.random_released import write_released_checkpoint
from megakernel_tts.warmup import voice_examples

TEXT = "Hello, it is good to hear you."
ARRIVALS_TEXT = f"{TEXT} It is a fine day, the sun is shining, and we have all the time we need."
RANDOM_FRAMES = 50  # maximum with random weights, which seldom sample the end of speech
_NUM_WARMUP_ROUNDS = 3


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        model: A model's name; ignored with random weights.
        random_weights: `0.6B`, `1.7B`, or None.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        num_runs: Requests for the time to the first chunk.
        chunk_sizes: Frames per chunk; every value is measured.
        stream_counts: Streams that begin at the same time; every value is measured.
        rates: Requests per second that arrive at random; every value is measured.
        duration_s: Seconds in which they arrive.
        layout: Where the text is in the prompt.
        peers: Whether to measure other programs as well.
    """

    model: str
    random_weights: str | None
    device: str
    num_runs: int
    chunk_sizes: tuple[int, ...]
    stream_counts: tuple[int, ...]
    rates: tuple[float, ...]
    duration_s: float
    layout: Literal["full", "streaming"]
    peers: bool


def measure(options: Options) -> Report:
    """Loads a model, warms it up and measures it; progress is shown on standard error.

    Raises:
        CheckpointError: The model is missing or invalid.
        ValueError: The device does not exist, or memory does not suffice for the streams.
        SynthesisError: A request failed.
    """
    device = pick_device(options.device)
    with _checkpoint(options, device) as (folder, name):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with TTS.load(folder, str(device), slots=max(options.stream_counts)) as tts:
            request = _request(tts, options)
            report = _measure_model(tts, request, options, name)
        if device.type == "cuda":
            graphs = measure_torch_graphs(folder, device, options.stream_counts)
            report = replace(report, torch_graph=graphs)
        if not options.peers:
            return report
        peers = tuple(_measure_peer(peer, report, request, options, folder) for peer in PEERS)
        return replace(report, peers=peers)


@contextmanager
def _checkpoint(options: Options, device: torch.device) -> Iterator[tuple[Path, str]]:
    """The model's folder, and its name in the report."""
    if options.random_weights is None:
        yield find_checkpoint(options.model), options.model
        return
    with tempfile.TemporaryDirectory() as folder:
        write_released_checkpoint(Path(folder), options.random_weights, device)
        name = f"{options.random_weights}, random weights, {RANDOM_FRAMES} frames at most"
        yield Path(folder), name


def _request(tts: TTS, options: Options) -> BenchmarkRequest:
    """The request, with the model's first voice; Base and VoiceDesign use an example voice."""
    voice, instruct = voice_examples(tts._loaded.config, tts.info)[0]
    sampling = tts.sampling
    if options.random_weights is not None:
        sampling = replace(sampling, max_frames=RANDOM_FRAMES, guard=False)
    return BenchmarkRequest(TEXT, sampling, next(iter(tts.voices), voice), instruct, options.layout)


def _measure_model(tts: TTS, request: BenchmarkRequest, options: Options, name: str) -> Report:
    """The report of a model, without peers."""
    backend, prompt_builder = tts._loaded.engine.backend, tts._loaded.engine.prompt_builder
    device, on_gpu = prompt_builder.device, prompt_builder.device.type == "cuda"
    loaded_bytes = torch.cuda.memory_allocated(device) if on_gpu else 0
    cells = [
        (chunk_frames, num_streams)
        for num_streams in options.stream_counts
        for chunk_frames in options.chunk_sizes
    ]
    num_stage_runs, num_rounds = _share(options.num_runs, 5), _share(options.num_runs, 10)
    num_steps = 1 + options.num_runs + 2 * num_stage_runs + len(cells) + 1
    num_steps += len(options.rates)
    with tqdm(total=num_steps, desc="bench", unit="step", disable=None) as progress:
        _warm_up(tts, request, cells)
        progress.update()
        first_chunk = time_first_chunk(tts, request, options.num_runs, progress.update)
        cold = time_first_chunk(tts, request, num_stage_runs, progress.update, cold=True)
        stages = measure_stages(tts, request, num_stage_runs, progress.update)
        streaming: list[Streaming] = []
        for chunk_frames, num_streams in cells:
            streaming.append(time_streams(tts, request, chunk_frames, num_streams, num_rounds))
            progress.update()
        num_streams, num_rounds = max(options.stream_counts), _share(options.num_runs, 20)
        event_loop = measure_event_loop(tts, request, num_streams, num_rounds)
        progress.update()
        arrivals: list[Arrivals] = []
        for rate in options.rates:
            spoken = replace(request, text=ARRIVALS_TEXT)
            arrivals.append(measure_arrivals(tts, spoken, rate, options.duration_s))
            progress.update()
    memory, device_name = None, "cpu"
    if on_gpu:
        memory = Memory(loaded_bytes / 1e9, torch.cuda.max_memory_allocated(device) / 1e9)
        device_name = torch.cuda.get_device_name(device)
    return Report(
        model=name,
        backend=backend.name,
        device=device_name,
        dtype=str(prompt_builder.pad.dtype).removeprefix("torch."),
        text=request.text,
        layout=request.layout,
        sampling=request.sampling,
        first_chunk=first_chunk,
        first_chunk_cold=cold,
        stages=stages,
        streaming=tuple(streaming),
        event_loop=event_loop,
        memory=memory,
        arrivals=tuple(arrivals),
    )


def _share(num_runs: int, divisor: int) -> int:
    return max(1, num_runs // divisor)


def _warm_up(tts: TTS, request: BenchmarkRequest, cells: Sequence[tuple[int, int]]) -> None:
    """Runs short requests with every chunk size and number of streams."""
    tts.warmup()
    for chunk_frames, num_streams in [(1, 1), *cells]:
        sampling = replace(request.sampling, max_frames=2 * chunk_frames)
        short = replace(request, sampling=sampling)
        time_streams(tts, short, chunk_frames, num_streams, _NUM_WARMUP_ROUNDS)


def _measure_peer(
    name: str, report: Report, request: BenchmarkRequest, options: Options, folder: Path
) -> Peer:
    """A peer's figures for the same request, or the reason why there are none."""
    if not isinstance(request.voice, str):
        note = f"{name} is measured only with CustomVoice models: it needs a named voice."
        return Peer(name, None, (), note)
    task = Task(
        folder=str(folder),
        text=request.text,
        voice=request.voice,
        sampling=request.sampling,
        device=str(pick_device(options.device)),
        dtype=report.dtype,
        chunk_sizes=options.chunk_sizes,
        num_runs=_share(options.num_runs, 10),
    )
    return run_peer(name, task)
