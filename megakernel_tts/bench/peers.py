"""Measures other programs with the same checkpoint, each in a separate process.

The process runs `python -m megakernel_tts.bench.peers TASK.json FIGURES.json`.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from megakernel_tts import Sampling

PEERS = {"faster-qwen3-tts": "faster_qwen3_tts", "qwen-tts": "qwen_tts"}  # name -> module

_FRAMES_PER_SECOND = 12.5
_NUM_WARMUP_REQUESTS = 3
_MIMI_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class Task:
    """The request that a peer repeats; the same as our own.

    Attributes:
        folder: Of the checkpoint.
        text: The text.
        voice: A named voice.
        sampling: Sampling parameters; not all peers support those of the code predictor.
        device: Of the model.
        dtype: Of the networks, the name in torch.
        chunk_sizes: Frames per chunk; every value is measured.
        num_runs: Requests per chunk size.
    """

    folder: str
    text: str
    voice: str
    sampling: Sampling
    device: str
    dtype: str
    chunk_sizes: tuple[int, ...]
    num_runs: int


@dataclass(frozen=True)
class PeerFigures:
    """Median times of a peer.

    Attributes:
        chunk_frames: Frames per chunk; None if the peer returns the whole speech at once.
        first_chunk_ms: Time until the first samples are in host memory.
        ms_per_frame: Time until the last samples are in host memory, divided by the frames.
        real_time_factor: The same time divided by the duration of the audio.
    """

    chunk_frames: int | None
    first_chunk_ms: float
    ms_per_frame: float
    real_time_factor: float


@dataclass(frozen=True)
class Peer:
    """Figures of a peer, or a note why there are none."""

    name: str
    version: str | None
    figures: tuple[PeerFigures, ...]
    note: str | None = None


def run_peer(name: str, task: Task) -> Peer:
    """Measures a peer in a separate process, if it is installed."""
    module = PEERS[name]
    if find_spec(module) is None:
        return Peer(name, None, (), f"{name} is not installed, so it was not measured.")
    with tempfile.TemporaryDirectory() as folder:
        task_file, figures_file = Path(folder, "task.json"), Path(folder, "figures.json")
        task_file.write_text(json.dumps({"module": module} | asdict(task)), encoding="utf-8")
        run = subprocess.run(
            [sys.executable, "-m", __name__, str(task_file), str(figures_file)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if run.returncode != 0:
            lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
            return Peer(name, _version(module), (), f"{name} failed: {lines[-1]}")
        content = json.loads(figures_file.read_text(encoding="utf-8"))
    return Peer(name, _version(module), tuple(PeerFigures(**figures) for figures in content))


def _version(module: str) -> str | None:
    """Names and versions of the packages that contain a module; forks have other names."""
    names = sorted(set(metadata.packages_distributions().get(module, ())))
    return ", ".join(f"{name} {metadata.version(name)}" for name in names) or None


def _adapt_transformers() -> None:
    """Adds the attribute `MimiConfig.rope_theta`, without which the peers cannot load a codec.

    qwen-tts-hf 0.1.1.post1, which both peers load, reads it for the codec's encoder.
    transformers 5.17 holds the value in `MimiConfig.rope_parameters` instead. Only cloning runs
    the encoder, so the measured work does not depend on the value.
    """
    config: Any = import_module("transformers").MimiConfig
    config.rope_theta = _MIMI_ROPE_THETA


# Frames per chunk (None: the whole speech at once) -> samples of each chunk and their rate.
Synthesise = Callable[[int | None], Iterator[tuple[Any, int]]]


def _faster(task: Task, sampling: dict[str, Any]) -> tuple[Synthesise, Sequence[int | None]]:
    import torch

    package: Any = import_module("faster_qwen3_tts")
    _adapt_transformers()
    model = package.FasterQwen3TTS.from_pretrained(
        task.folder, device=task.device, dtype=getattr(torch, task.dtype)
    )

    def synthesise(chunk_frames: int | None) -> Iterator[tuple[Any, int]]:
        for samples, rate, _ in model.generate_custom_voice_streaming(
            text=task.text,
            speaker=task.voice,
            language="Auto",
            chunk_size=chunk_frames,
            **sampling,
        ):
            yield samples, rate

    return synthesise, task.chunk_sizes


def _official(task: Task, sampling: dict[str, Any]) -> tuple[Synthesise, Sequence[int | None]]:
    import torch

    package: Any = import_module("qwen_tts")
    _adapt_transformers()
    model = package.Qwen3TTSModel.from_pretrained(
        task.folder, device_map=task.device, dtype=getattr(torch, task.dtype)
    )
    sampling = sampling | {
        "subtalker_dosample": task.sampling.predictor_temperature > 0,
        "subtalker_temperature": task.sampling.predictor_temperature,
        "subtalker_top_k": task.sampling.predictor_top_k,
        "subtalker_top_p": task.sampling.predictor_top_p,
    }

    def synthesise(_: int | None) -> Iterator[tuple[Any, int]]:
        waves, rate = model.generate_custom_voice(
            text=task.text, speaker=task.voice, language="Auto", **sampling
        )
        yield waves[0], rate

    return synthesise, (None,)


_LOADERS = {"faster_qwen3_tts": _faster, "qwen_tts": _official}


def _measure(synthesise: Synthesise, chunk_frames: int | None, num_runs: int) -> PeerFigures:
    import torch

    first_chunk_s: list[float] = []
    total_s: list[float] = []
    audio_s: list[float] = []
    for seed in range(-_NUM_WARMUP_REQUESTS, num_runs):
        torch.manual_seed(seed)
        first_s, duration_s, end_s = None, 0.0, 0.0
        start_s = perf_counter()
        for samples, rate in synthesise(chunk_frames):
            end_s = perf_counter()
            first_s = end_s if first_s is None else first_s
            duration_s += len(samples) / rate
        if first_s is None:
            raise RuntimeError("the peer returned no audio")
        if seed >= 0:
            first_chunk_s.append(first_s - start_s)
            total_s.append(end_s - start_s)
            audio_s.append(duration_s)
    real_time_factor = median(total / audio for total, audio in zip(total_s, audio_s, strict=True))
    return PeerFigures(
        chunk_frames,
        round(1e3 * median(first_chunk_s), 3),
        round(1e3 * real_time_factor / _FRAMES_PER_SECOND, 3),
        round(real_time_factor, 4),
    )


def main(arguments: Sequence[str]) -> None:
    """Reads a task, measures the peer and writes its figures."""
    task_file, figures_file = map(Path, arguments)
    content = json.loads(task_file.read_text(encoding="utf-8"))
    load = _LOADERS[content.pop("module")]
    sampling = Sampling(**content.pop("sampling"))
    task = Task(**content, sampling=sampling)
    common = {
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_frames,
    }
    synthesise, chunk_sizes = load(task, common)
    figures = [asdict(_measure(synthesise, size, task.num_runs)) for size in chunk_sizes]
    figures_file.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
