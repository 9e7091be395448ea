"""The benchmark from its options to its report."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from megakernel_tts.backend import pick_device
from megakernel_tts.bench.options import Options
from megakernel_tts.bench.peers import PEERS, Peer, Task, run_peer
from megakernel_tts.bench.report import Memory, Report
from megakernel_tts.bench.stages import first_chunk_stages
from megakernel_tts.bench.timing import Request, first_chunk, speak, streaming
from megakernel_tts.hub import find_checkpoint
from megakernel_tts.random_released import write_released
from megakernel_tts.tts import TTS

TEXT = "Hello, it is good to hear you."
ENDLESS = 50  # frames of random weights, which seldom end their speech
_WARM = 3  # requests before those that count


def measure(options: Options) -> Report:
    """Loads a model, warms it up and measures it; progress goes to standard error.

    Raises:
        CheckpointError: The model is missing or broken.
        ValueError: No such device, or more streams than memory can hold.
        SynthesisError: It failed on the way.
    """
    device = pick_device(options.device)
    with _checkpoint(options, device) as (folder, name):
        report, task = _measure_ours(options, device, folder, name)
        if not options.peer:
            return report
        return replace(report, peers=tuple(_ask(peer, task) for peer in PEERS))


@contextmanager
def _checkpoint(options: Options, device: torch.device) -> Iterator[tuple[Path, str]]:
    """The model's folder and how it is named."""
    if options.random_weights is None:
        yield find_checkpoint(options.model), options.model
        return
    with tempfile.TemporaryDirectory() as folder:
        write_released(Path(folder), options.random_weights, device)
        yield Path(folder), f"{options.random_weights}, random weights"


def _measure_ours(
    options: Options, device: torch.device, folder: Path, name: str
) -> tuple[Report, Task | None]:
    """Our figures, and what to ask peers for; None if they cannot speak with this model."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with TTS.load(folder, str(device), slots=max(options.streams)) as tts:
        loaded = torch.cuda.memory_allocated(device) if on_gpu else 0
        voice, instruct = tts._manners()[0]
        sampling = tts.sampling
        if options.random_weights is not None:
            sampling = replace(sampling, max_frames=ENDLESS, guard=False)
        request = Request(TEXT, sampling, voice, instruct)
        cells = [(chunk, count) for count in options.streams for chunk in options.chunks]
        stage_runs, rounds = max(1, options.runs // 5), max(1, options.runs // 10)
        steps = 1 + options.runs + stage_runs + len(cells)
        with tqdm(total=steps, desc="bench", unit="step", disable=None) as progress:
            _warm_up(tts, request, options.chunks)
            progress.update()
            first = first_chunk(tts, request, options.runs, progress.update)
            stages = first_chunk_stages(tts, request, stage_runs, progress.update)
            found = []
            for chunk, count in cells:
                found.append(streaming(tts, request, chunk, count, rounds))
                progress.update()
        engine = tts._loaded.engine
        pad = engine.prompter.pad
        memory = None
        if on_gpu:
            memory = Memory(loaded / 1e9, torch.cuda.max_memory_allocated(device) / 1e9)
        device_name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
        dtype = str(pad.dtype).removeprefix("torch.")
        report = Report(
            model=name,
            backend=engine.backend.name,
            device=device_name,
            dtype=dtype,
            text=TEXT,
            sampling=sampling,
            first_chunk=first,
            stages=stages,
            streaming=tuple(found),
            memory=memory,
        )
        names = list(tts.voices)
    if not names:
        return report, None
    task = Task(str(folder), TEXT, names[0], sampling, str(device), dtype, options.chunks, rounds)
    return report, task


def _warm_up(tts: TTS, request: Request, chunks: Sequence[int]) -> None:
    """Every path of a request, and a few requests of each size of chunk."""
    tts.warmup()
    for chunk in chunks:
        for seed in range(_WARM):
            speak(tts, request, chunk, seed)


def _ask(name: str, task: Task | None) -> Peer:
    if task is None:
        note = f"{name} is compared on CustomVoice models alone, which have named voices."
        return Peer(name, None, (), note)
    return run_peer(name, task)
