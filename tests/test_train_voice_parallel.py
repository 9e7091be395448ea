"""Data-parallel training of the talker."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.train_voice import talker
from examples.train_voice.dialogue import Dataset
from examples.train_voice.layout import Work
from examples.train_voice.parallel import DataParallel
from examples.train_voice.talker_net import TalkerNet
from tests.test_train_voice import write_random_codes


def _join(rank: int, size: int, folder: Path) -> None:
    """Averages gradients, then trains two steps on texts that the processes do not share."""
    group = DataParallel(rank, size, folder / "rendezvous")
    gradients = torch.tensor([1.0, 10.0]) * (rank + 1)
    group.average(gradients)
    first = torch.tensor([group.first(rank + 0.25)])
    work, device = Work(folder / "work"), torch.device("cpu")
    torch.manual_seed(0)
    config = work.model_config()
    net, dataset = TalkerNet(config, device), Dataset(work, config, device)
    initial = torch.cat([p.detach().flatten() for p in net.parameters.values()])
    steps, rng = talker._Training(net, dataset, group), np.random.default_rng(rank)
    batches = talker._batches(dataset, group, rng, 1 << 30, 64)
    texts = list[int]()
    for chosen, length in list(batches)[:2]:
        steps(chosen, length, 0.5, 1e-2, rng)
        texts += chosen.tolist()
    trained = torch.cat([p.detach().flatten() for p in net.parameters.values()])
    changed = (trained - initial).abs().max()
    torch.save([gradients, first, trained, changed, texts], folder / f"{rank}.pt")


def test_processes_train_the_same_parameters_on_different_texts(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    write_random_codes(Work(tmp_path / "work"), [("clara", "A b c.")] * 12, [8] * 12)
    torch.multiprocessing.spawn(_join, (2, tmp_path), 2)  # pyright: ignore[reportPrivateImportUsage]
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for gradients, first, _, changed, _ in (one, other):
        assert gradients.tolist() == [1.5, 15.0]
        assert first.tolist() == [0.25]
        assert changed > 1e-3
    assert torch.equal(one[2], other[2])
    assert not set(one[4]) & set(other[4])


def test_the_talker_trains_in_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    work = Work(Path("run"))  # as in the README's commands
    work.folder.mkdir()
    write_random_codes(work, [("clara", "A b c."), ("henry", "D.")] * 10, [8, 2] * 10)
    for minutes in (0.02, 0.05):  # the second call continues
        talker.train(work, minutes, positions=200, seed=0, processes=2)
        rows = [json.loads(line) for line in work.log("talker").read_text().splitlines()]
        assert rows[-1]["seconds"] >= 60 * minutes
        assert np.isfinite([v for row in rows for v in row.values()]).all()
        assert len(torch.load(work.state("talker"))["parameters"]) > 10


def test_one_process_changes_nothing() -> None:
    group, gradients = DataParallel(), torch.ones(2)
    group.average(gradients)
    assert gradients.tolist() == [1.0, 1.0]
    assert group.first(0.5) == 0.5
