"""Shards of the teacher's speech: making them in processes, and loading them."""

import os
import select
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.train_voice import workers
from examples.train_voice.layout import Work
from examples.train_voice.phonemes import VOICES
from examples.train_voice.recordings import HELD_OUT_INTERVAL, Recordings
from examples.train_voice.speech import FRAME, SAMPLE_RATE
from examples.train_voice.synthesis import (
    SHARD,
    make_in_workers,
    make_shards,
    shard_files,
    shorten_corpus,
)
from tests.fakes import TIMEOUT_S

ROOT = Path(__file__).parent.parent


def write_shards(work: Work, marks: np.ndarray, speakers: np.ndarray) -> None:
    """Writes recordings of three frames for each text; all samples of a text are its mark."""
    work.write_corpus([("clara", "a")] * len(marks))
    work.recordings.mkdir()
    for i, shard in enumerate(shard_files(work)):
        texts = np.arange(len(marks))[i * SHARD : (i + 1) * SHARD]
        np.savez(
            shard,
            wave=np.repeat(marks[texts], 3 * FRAME).astype(np.int16),
            phones=np.zeros((3 * len(texts), 2), np.uint8),
            words=np.zeros((3 * len(texts), 2), np.int16),
            frames=np.full(len(texts), 3),
            text=texts,
            speaker=speakers[texts],
        )


def test_crops_contain_no_held_out_recording(tmp_path: Path) -> None:
    work, texts = Work(tmp_path), np.arange(2 * HELD_OUT_INTERVAL + 10)
    marks = np.where(texts % HELD_OUT_INTERVAL == 0, 1000, 0)
    write_shards(work, marks, np.zeros_like(texts))
    recordings = Recordings(work, torch.device("cpu"))
    recordings.wait()
    assert recordings.complete
    wave, _ = recordings.crops(400, 4, np.random.default_rng(0))
    assert not wave.any()
    whole, _ = recordings.whole(recordings.held_out)
    assert whole.shape[0] == 3 and (whole > 0).all()


def test_recordings_are_loaded_in_order_up_to_the_given_hours(tmp_path: Path) -> None:
    """Each shard is a step of samples; the second one exceeds the hours."""
    work, texts = Work(tmp_path), np.arange(4 * SHARD)
    write_shards(work, texts // SHARD, np.zeros_like(texts))
    shard_hours = 3 * SHARD * FRAME / SAMPLE_RATE / 3600
    recordings = Recordings(work, torch.device("cpu"), hours=1.5 * shard_hours)
    recordings.poll(1)
    assert recordings.frames == 3 * SHARD and not recordings.complete
    recordings.poll(1)
    recordings.poll(None)
    assert recordings.frames == 6 * SHARD and recordings.complete
    whole = Recordings(work, torch.device("cpu"))
    whole.poll(None)
    wave, _ = whole.whole(np.array([0, SHARD - 1, SHARD, 4 * SHARD - 1]))
    assert whole.complete and (32768 * wave[:, 0]).tolist() == [0, 0, 1, 3]


def test_crops_of_the_low_voice_are_drawn_most_often(tmp_path: Path) -> None:
    """Recordings of two voices, one as long as the other; each voice has samples of its own."""
    work, texts = Work(tmp_path), np.arange(200)
    is_low = texts >= 100
    low, high = (list(VOICES).index(name) for name in ("henry", "clara"))
    write_shards(work, np.where(is_low, 1000, -1000), np.where(is_low, low, high))
    recordings = Recordings(work, torch.device("cpu"))
    recordings.wait()
    wave, _ = recordings.crops(2000, 2, np.random.default_rng(0))
    assert (wave[:, 0] > 0).float().mean() == pytest.approx(2 / 3, abs=0.05)


class Workers(Executor):
    """Runs shards when `make_shards` waits: each takes a minute of virtual time, or as given."""

    def __init__(self, *first_s: float) -> None:
        self.now_s = 0.0
        self._left_s = [*first_s]
        self.begun_s: list[float] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.begun_s.append(self.now_s)
        future = Future[Any]()
        if len(self.begun_s) % 2 == 0:  # the second of two ends both
            self.now_s += self._left_s.pop(0) if self._left_s else 60.0
        future.set_result(fn(*args, **kwargs))
        return future


def test_shards_are_made_in_order_until_one_would_exceed_the_time() -> None:
    """Two at once, a minute each: in 3.5 minutes there is time for three rounds."""
    begun, workers = list[int](), Workers()

    def make(shard: int) -> float:
        begun.append(shard)
        return 3600.0

    hours = make_shards(range(100), make, workers, 2, minutes=3.5, clock=lambda: workers.now_s)
    assert begun == [0, 1, 2, 3, 4, 5] and hours == 6
    assert workers.begun_s == [0, 0, 60, 60, 120, 120]
    assert make_shards(range(5), make, Workers(), 2) == 5


def test_shards_are_expected_to_take_as_long_as_the_last_ones() -> None:
    """The first two take twice as long; after 3 minutes there is time for one minute more."""
    workers = Workers(120.0)
    make_shards(range(100), lambda _: 0.0, workers, 2, minutes=4.5, clock=lambda: workers.now_s)
    assert workers.begun_s == [0, 0, 120, 120, 180, 180]


def half(shard: int) -> float:
    """Runs in a worker process; fails for a negative number."""
    if shard < 0:
        raise ValueError("negative")
    return shard / 2


def test_worker_processes_make_shards_and_pass_on_errors() -> None:
    assert make_in_workers([7200, 0, 3600], half, workers=2, minutes=10) == 1.5
    with pytest.raises(ValueError, match="negative"):
        make_in_workers([1, -1], half, workers=1, minutes=10)


def test_workers_use_the_gpus_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers.worker_processes(2, 1) as pool:
        indices = {pool.submit(workers._index).result() for _ in range(50)}
        first = min(indices)
        assert indices <= {first, first + 1}
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(workers, "_exit_with_parent", lambda: None)
    for index in range(5):
        monkeypatch.setattr(workers, "_index", lambda index=index: index)
        workers._start(torch.get_num_threads())
    assert chosen == [0, 1, 0, 1, 0]


def test_a_worker_ends_with_a_terminated_parent() -> None:
    program = (
        "import os, signal; from examples.train_voice.workers import worker_processes; "
        "print(worker_processes(1, 1).submit(os.getpid).result(), flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.terminate()
    ended, _, _ = select.select([worker], [], [], TIMEOUT_S)
    os.close(worker)
    assert ended


def test_the_corpus_ends_before_the_first_missing_shard(tmp_path: Path) -> None:
    work = Work(tmp_path)
    work.recordings.mkdir()
    corpus = [("clara", str(i)) for i in range(2 * SHARD + 1)]
    work.write_corpus(corpus)
    work.phonemes.write_text("".join(f"{text}\n" for _, text in corpus))
    files = shard_files(work)
    for file in (files[0], files[2]):
        file.touch()
    assert shorten_corpus(work) == SHARD
    assert work.read_corpus() == corpus[:SHARD]
    assert work.phonemes.read_text().splitlines()[-1] == str(SHARD - 1)
    assert shorten_corpus(work) == SHARD
