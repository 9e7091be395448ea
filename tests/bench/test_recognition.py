"""The benchmark of recognition, on a CPU: its bias of blank, its chunks, and NeMo beside it."""

from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import bench.recognition
from bench.recognition import (
    TOKENS_PER_FRAME,
    beside_nemo,
    calibrated,
    encoder_frames,
    measure_chunks,
)
from megakernel_stt.engine.slot_recogniser import SlotRecognisers
from megakernel_stt.kernels.transducer import KernelTransducer
from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.model.random_checkpoint import Size, random_model
from megakernel_stt.model.weights import TransducerWeights
from megakernel_stt.network.transducer import Transducer
from tests.emulator.transducer import emulated_transducer
from tests.stt.batches import decode, triples


def test_the_bias_of_blank_gives_the_tokens_per_frame_that_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each reading of the clock is a second after the one before."""
    clock = SimpleNamespace(perf_counter=partial(next, count(0.0, 1.0)))
    monkeypatch.setattr(bench.recognition, "time", clock)
    model = random_model("streaming", Size(), torch.device("cpu"), torch.float32)
    weights, config = model.weights.transducer, model.config.transducer
    with torch.inference_mode():
        made = SlotRecognisers(model, emulated_transducer(weights, config), None, 2)
        recogniser = made.make(0)
        frames = encoder_frames(model, recogniser, 40)
        found, rate = calibrated(weights, config, frames, Transducer)
        assert abs(rate - TOKENS_PER_FRAME) < 0.1
        model = replace(model, weights=replace(model.weights, transducer=found))
        made = SlotRecognisers(model, emulated_transducer(found, config), None, 2)
        row = measure_chunks(made.make(0), 2, 4)
    assert row["streams"] == 2
    for name, milliseconds in (("graph", 1000), ("host", 2000), ("samples_to_tokens", 3000)):
        assert row[name] == {"p50_ms": milliseconds, "p99_ms": milliseconds}


def test_encoder_frames_are_of_whole_chunks_of_any_length() -> None:
    model = random_model("streaming", Size(), torch.device("cpu"), torch.float32)
    decoder = emulated_transducer(model.weights.transducer, model.config.transducer)
    with torch.inference_mode():
        recogniser = SlotRecognisers(model, decoder, None, 1).make(3)
        frames = encoder_frames(model, recogniser, 10)
    assert frames.shape == (8, 4 * 10, 32)


class Clock:
    """The GPU's time in ms, of which an event takes the present one."""

    now_ms = 0.0

    def event(self, enable_timing: bool) -> "Event":
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.at_ms = self.clock.now_ms

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


def stand_in(clock: Clock, wrong_type: torch.dtype | None) -> type:
    """NeMo's interface with our decoder in torch; a launch takes 6 ms.

    Args:
        clock: Is advanced.
        wrong_type: Type of weights in which the first stream loses its last token.
    """

    class StandIn:
        def __init__(self, weights: TransducerWeights, config: TransducerConfig, mode: str) -> None:
            assert mode == "graph"
            self.decoder, self.dtype = Transducer(weights, config), weights.embedding.dtype

        def launch(self, frames: Tensor, lengths: Tensor) -> None:
            assert lengths.tolist() == [frames.shape[1]] * len(frames)
            clock.now_ms += 6

        def decode(self, frames: Tensor, lengths: list[int]) -> list[list[tuple[int, int, int]]]:
            found, _ = decode(self.decoder, list(frames))
            return [
                triples(emissions)[: -1 if i == 0 and self.dtype == wrong_type else None]
                for i, emissions in enumerate(found)
            ]

    return StandIn


@pytest.mark.parametrize("wrong_type", [None, torch.float32, torch.bfloat16])
def test_nemo_is_measured_beside_and_its_tokens_are_compared(
    wrong_type: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def load(weights: TransducerWeights, config: TransducerConfig) -> KernelTransducer:
        ours = emulated_transducer(weights, config)
        project = ours.project

        def timed(frames: Tensor) -> Tensor:
            clock.now_ms += 2
            return project(frames)

        monkeypatch.setattr(ours, "project", timed)
        return ours

    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench.recognition, "load_transducer", load)
    monkeypatch.setattr(bench.recognition, "NemoTransducer", stand_in(clock, wrong_type))
    model = random_model("rnnt", Size(), torch.device("cpu"), torch.bfloat16)
    frames = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        weights, config = model.weights.transducer, model.config.transducer
        row, is_equal = beside_nemo(weights, config, frames, repeats=2)
    assert (row["launch_ms"], row["nemo_ms"], row["times_faster"]) == (2, 6, 3)
    assert is_equal == (wrong_type != torch.float32)
    assert row["equal_streams"] == {
        "float32": 3 - (wrong_type == torch.float32),
        "bfloat16": 3 - (wrong_type == torch.bfloat16),
    }


@pytest.mark.parametrize(("part", "is_installed"), [("decode", False), ("chunk", True)])
def test_nemo_without_its_package_or_beside_other_parts_is_refused(
    part: str,
    is_installed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["recognition", part, "--nemo"])
    monkeypatch.setattr(bench.recognition, "nemo_is_installed", lambda: is_installed)
    with pytest.raises(SystemExit) as error:
        bench.recognition.main()
    assert error.value.code == 2 and "docs/recognition.md" in capsys.readouterr().err


def test_unequal_tokens_are_written_and_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[dict[str, object]] = []
    monkeypatch.setattr("sys.argv", ["recognition", "decode", "--nemo"])
    monkeypatch.setattr(bench.recognition, "nemo_is_installed", lambda: True)
    monkeypatch.setattr(bench.recognition, "write", lambda found, *_, **__: written.append(found))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    for is_equal in (True, False):
        figures = {"nemo_tokens_equal_in_float32": is_equal}
        monkeypatch.setattr(bench.recognition, "decode", lambda _, found=figures: found)
        assert bench.recognition.main() == (0 if is_equal else 1)
        assert written[-1].items() >= figures.items()
