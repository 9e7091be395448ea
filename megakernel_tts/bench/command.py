"""The benchmark from its options to its report."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from megakernel_tts.backends.select import pick_device
from megakernel_tts.bench.event_loop import event_loop
from megakernel_tts.bench.options import Options
from megakernel_tts.bench.peers import PEERS, Peer, Task, run_peer
from megakernel_tts.bench.report import Memory, Report
from megakernel_tts.bench.stages import first_chunk_stages
from megakernel_tts.bench.timing import Request, Streaming, first_chunk, streaming
from megakernel_tts.model.hub import find_checkpoint
from megakernel_tts.model.random_released import write_released_checkpoint
from megakernel_tts.tts import TTS

TEXT = "Hello, it is good to hear you."
ENDLESS = 50  # frames of random weights, which seldom end their speech
_WARM = 3  # rounds before those that count


def measure(options: Options) -> Report:
    """Loads a model, warms it up and measures it; progress goes to standard error.

    Raises:
        CheckpointError: The model is missing or broken.
        ValueError: No such device, or more streams than memory can hold.
        SynthesisError: It failed on the way.
    """
    device = pick_device(options.device)
    with _checkpoint(options, device) as (folder, name):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with TTS.load(folder, str(device), slots=max(options.streams)) as tts:
            request = _request(tts, options)
            report = _report(tts, request, options, name)
        if not options.peer:
            return report
        peers = tuple(_ask(peer, report, request, options, folder) for peer in PEERS)
        return replace(report, peers=peers)


@contextmanager
def _checkpoint(options: Options, device: torch.device) -> Iterator[tuple[Path, str]]:
    """The model's folder and how it is named."""
    if options.random_weights is None:
        yield find_checkpoint(options.model), options.model
        return
    with tempfile.TemporaryDirectory() as folder:
        write_released_checkpoint(Path(folder), options.random_weights, device)
        yield Path(folder), f"{options.random_weights}, random weights, {ENDLESS} frames at most"


def _request(tts: TTS, options: Options) -> Request:
    """What is said, in the model's first voice; a Base model's and a VoiceDesign's is made up."""
    voice, instruct = tts._voice_examples()[0]
    sampling = tts.sampling
    if options.random_weights is not None:
        sampling = replace(sampling, max_frames=ENDLESS, guard=False)
    return Request(TEXT, sampling, next(iter(tts.voices), voice), instruct, options.layout)


def _report(tts: TTS, request: Request, options: Options, name: str) -> Report:
    """Our own figures."""
    backend, prompt_builder = tts._loaded.engine.backend, tts._loaded.engine.prompt_builder
    place, on_gpu = prompt_builder.device, prompt_builder.device.type == "cuda"
    loaded = torch.cuda.memory_allocated(place) if on_gpu else 0
    cells = [(chunk, count) for count in options.streams for chunk in options.chunks]
    stage_runs, rounds = _fewer(options.runs, 5), _fewer(options.runs, 10)
    steps = 1 + options.runs + 2 * stage_runs + len(cells) + 1
    with tqdm(total=steps, desc="bench", unit="step", disable=None) as progress:
        _warm_up(tts, request, cells)
        progress.update()
        first = first_chunk(tts, request, options.runs, progress.update)
        cold = first_chunk(tts, request, stage_runs, progress.update, cold=True)
        stages = first_chunk_stages(tts, request, stage_runs, progress.update)
        streams: list[Streaming] = []
        for chunk, count in cells:
            streams.append(streaming(tts, request, chunk, count, rounds))
            progress.update()
        late = event_loop(tts, request, max(options.streams), _fewer(options.runs, 20))
        progress.update()
    memory, device = None, "cpu"
    if on_gpu:
        memory = Memory(loaded / 1e9, torch.cuda.max_memory_allocated(place) / 1e9)
        device = torch.cuda.get_device_name(place)
    return Report(
        model=name,
        backend=backend.name,
        device=device,
        dtype=str(prompt_builder.pad.dtype).removeprefix("torch."),
        text=request.text,
        layout=request.layout,
        sampling=request.sampling,
        first_chunk=first,
        first_chunk_cold=cold,
        stages=stages,
        streaming=tuple(streams),
        event_loop=late,
        memory=memory,
    )


def _fewer(runs: int, times: int) -> int:
    return max(1, runs // times)


def _warm_up(tts: TTS, request: Request, cells: Sequence[tuple[int, int]]) -> None:
    """Every path of a request, and a few short ones in every chunk and number of streams."""
    tts.warmup()
    for chunk, count in [(1, 1), *cells]:
        short = replace(request.sampling, max_frames=2 * chunk)
        streaming(tts, replace(request, sampling=short), chunk, count, _WARM)


def _ask(name: str, report: Report, request: Request, options: Options, folder: Path) -> Peer:
    """A peer's figures for the same request, or why there are none."""
    if not isinstance(request.voice, str):
        note = f"{name} is measured with CustomVoice models alone: it needs a named voice."
        return Peer(name, None, (), note)
    task = Task(
        folder=str(folder),
        text=request.text,
        voice=request.voice,
        sampling=request.sampling,
        device=str(pick_device(options.device)),
        dtype=report.dtype,
        chunks=options.chunks,
        runs=_fewer(options.runs, 10),
    )
    return run_peer(name, task)
