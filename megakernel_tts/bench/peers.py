"""Other programs for the same checkpoints, each in a process of its own.

python -m megakernel_tts.bench.peers TASK.json ANSWER.json  # what such a process runs
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

from megakernel_tts.sampling import Sampling

PEERS = {"faster-qwen3-tts": "faster_qwen3_tts", "qwen-tts": "qwen_tts"}  # name -> module

_FRAMES_A_SECOND = 12.5
_WARM = 3  # requests before those that count


@dataclass(frozen=True)
class Task:
    """What a peer is asked for: the same as we were.

    Attributes:
        folder: The checkpoint.
        text: To be said.
        voice: A named one.
        sampling: How codes are drawn; the peers cannot all be given the predictor's part.
        device: Where it runs.
        dtype: Of the networks, as torch calls it.
        chunks: Frames of a chunk, one after the other.
        runs: Of each.
    """

    folder: str
    text: str
    voice: str
    sampling: Sampling
    device: str
    dtype: str
    chunks: tuple[int, ...]
    runs: int


@dataclass(frozen=True)
class PeerFigures:
    """What a peer took, the medians.

    Attributes:
        chunk_frames: None if it gives the whole speech at once.
        first_chunk_ms: Until the first samples are in host memory.
        ms_per_frame: Until the last ones are, for a frame.
        real_time_factor: The same for a second of audio.
    """

    chunk_frames: int | None
    first_chunk_ms: float
    ms_per_frame: float
    real_time_factor: float


@dataclass(frozen=True)
class Peer:
    """A peer's figures, or why there are none."""

    name: str
    version: str | None
    figures: tuple[PeerFigures, ...]
    note: str | None = None


def run_peer(name: str, task: Task) -> Peer:
    """Runs a peer in a process of its own, if it is installed."""
    module = PEERS[name]
    if find_spec(module) is None:
        return Peer(name, None, (), f"{name} is not installed: nothing to compare with.")
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "task.json"), Path(folder, "answer.json")
        question.write_text(json.dumps({"module": module} | asdict(task)), encoding="utf-8")
        run = subprocess.run(
            [sys.executable, "-m", __name__, str(question), str(answer)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if run.returncode != 0:
            lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
            return Peer(name, _version(module), (), f"{name} failed: {lines[-1]}")
        found = json.loads(answer.read_text(encoding="utf-8"))
    return Peer(name, _version(module), tuple(PeerFigures(**one) for one in found))


def _version(module: str) -> str | None:
    """Of the packages that a module comes from; forks go by other names."""
    names = sorted(set(metadata.packages_distributions().get(module, ())))
    return ", ".join(f"{name} {metadata.version(name)}" for name in names) or None


# A request of so many frames a chunk (None: all at once) -> its samples and their rate.
Speak = Callable[[int | None], Iterator[tuple[Any, int]]]


def _faster(task: Task, rules: dict[str, Any]) -> tuple[Speak, Sequence[int | None]]:
    import torch

    package: Any = import_module("faster_qwen3_tts")
    model = package.FasterQwen3TTS.from_pretrained(
        task.folder, device=task.device, dtype=getattr(torch, task.dtype)
    )

    def speak(chunk: int | None) -> Iterator[tuple[Any, int]]:
        for samples, rate, _ in model.generate_custom_voice_streaming(
            text=task.text, speaker=task.voice, language="Auto", chunk_size=chunk, **rules
        ):
            yield samples, rate

    return speak, task.chunks


def _official(task: Task, rules: dict[str, Any]) -> tuple[Speak, Sequence[int | None]]:
    import torch

    package: Any = import_module("qwen_tts")
    model = package.Qwen3TTSModel.from_pretrained(
        task.folder, device_map=task.device, dtype=getattr(torch, task.dtype)
    )
    sampling = task.sampling
    rules = rules | {
        "subtalker_dosample": sampling.predictor_temperature > 0,
        "subtalker_temperature": sampling.predictor_temperature,
        "subtalker_top_k": sampling.predictor_top_k,
        "subtalker_top_p": sampling.predictor_top_p,
    }

    def speak(_: int | None) -> Iterator[tuple[Any, int]]:
        waves, rate = model.generate_custom_voice(
            text=task.text, speaker=task.voice, language="Auto", **rules
        )
        yield waves[0], rate

    return speak, (None,)


_RUNNERS = {"faster_qwen3_tts": _faster, "qwen_tts": _official}


def _measure(speak: Speak, chunk: int | None, runs: int) -> PeerFigures:
    import torch

    firsts: list[float] = []
    wholes: list[float] = []
    audios: list[float] = []
    for seed in range(-_WARM, runs):
        torch.manual_seed(seed)
        first, audio, end = None, 0.0, 0.0
        start = perf_counter()
        for samples, rate in speak(chunk):
            end = perf_counter()
            first = end if first is None else first
            audio += len(samples) / rate
        if first is None:
            raise RuntimeError("it made no audio")
        if seed >= 0:
            firsts.append(first - start)
            wholes.append(end - start)
            audios.append(audio)
    factor = median(whole / audio for whole, audio in zip(wholes, audios, strict=True))
    return PeerFigures(
        chunk,
        round(1e3 * median(firsts), 3),
        round(1e3 * factor / _FRAMES_A_SECOND, 3),
        round(factor, 4),
    )


def main(arguments: Sequence[str]) -> None:
    """Reads a task, runs the peer, writes its figures."""
    question, answer = map(Path, arguments)
    content = json.loads(question.read_text(encoding="utf-8"))
    runner = _RUNNERS[content.pop("module")]
    sampling = Sampling(**content.pop("sampling"))
    task = Task(**content, sampling=sampling)
    rules = {
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_frames,
    }
    speak, chunks = runner(task, rules)
    figures = [asdict(_measure(speak, chunk, task.runs)) for chunk in chunks]
    answer.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
