"""The benchmark: its figures add up, its files are whole, and peers are measured alike."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest
import torch

from megakernel_tts import TTS
from megakernel_tts.bench.event_loop import event_loop
from megakernel_tts.bench.stages import _watch, first_chunk_stages
from megakernel_tts.bench.timing import Request, first_chunk, speak, streaming
from megakernel_tts.cli.main import main

FEW = ["--device", "cpu", "--runs", "1", "--chunks", "1,8", "--streams", "1"]


@pytest.fixture(scope="module")
def demo() -> Iterator[TTS]:
    with TTS.load(device="cpu", slots=2) as one:
        yield one


@pytest.fixture
def brief(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    """Copies of small checkpoints whose speech is four frames long."""

    def make(*which: str) -> str:
        model = shutil.copytree(checkpoint(*which), tmp_path / "model")
        (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": 4}))
        return str(model)

    return make


@pytest.fixture
def request_(demo: TTS) -> Request:
    return Request("Hello.", demo.sampling, "clara")


def test_a_request_is_timed_from_its_text_to_its_end(demo: TTS, request_: Request) -> None:
    before = perf_counter()
    timing = speak(demo, request_, 1, seed=3)
    after = perf_counter()
    assert before <= timing.start < timing.first < timing.end <= after
    speech = demo.say("Hello.", "clara", sampling=replace(demo.sampling, seed=3))
    assert timing.frames == len(speech.codes) > 1, "it was not spoken to its end"
    assert timing.audio == pytest.approx(speech.seconds)


def test_the_stages_add_up_to_the_first_chunk(demo: TTS, request_: Request) -> None:
    before = vars(demo._loaded.engine.vocoder).copy()
    with _watch(demo) as watch:
        timing = speak(demo, request_, 1, seed=0)
        parts = vars(watch.read(timing))
    assert all(milliseconds > 0 for milliseconds in parts.values()), parts
    assert sum(parts.values()) == pytest.approx(1e3 * (timing.first - timing.start))
    # The networks do the work; what surrounds them is small.
    assert parts["prefill"] + parts["first_frame"] + parts["codec"] > sum(parts.values()) / 2
    assert vars(demo._loaded.engine.vocoder) == before, "the stopwatch left something behind"


def test_a_slow_stage_is_the_one_that_grows(
    demo: TTS, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stopwatch gives a stage its own time, and nobody else's."""
    engine = demo._loaded.engine
    for owner, name, stage in (
        (demo._loaded.tokenizer, "encode", "tokenise"),
        (engine.prompt_builder, "build", "prompt"),
        (engine.backend, "prefill", "prefill"),
        (engine.vocoder, "decode", "codec"),
    ):
        with monkeypatch.context() as patch:
            own = getattr(type(owner), name)

            def slow(self: object, *a: Any, own: Any = own, **named: Any) -> Any:
                sleep(0.3)
                return own(self, *a, **named)

            patch.setattr(type(owner), name, slow)
            parts = vars(first_chunk_stages(demo, request_, 1))
        assert parts[stage] >= 300
        assert max(parts, key=lambda name: parts[name]) == stage, parts


def test_percentiles_are_in_order_and_streams_are_all_seen(
    demo: TTS, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = first_chunk(demo, request_, 4)
    assert first.runs == 4 and 0 < first.p50 <= first.p95 <= first.p99
    forgotten: list[bool] = []
    backend = demo._loaded.engine.backend
    monkeypatch.setattr(backend, "clear_prefix_cache", lambda: forgotten.append(True))
    assert first_chunk(demo, request_, 3, cold=True).runs == len(forgotten) == 3
    both = streaming(demo, request_, 2, streams=2, rounds=1)
    assert (both.chunk_frames, both.streams, both.rounds) == (2, 2, 1)
    assert 0 < both.first_chunk_ms[0] <= both.first_chunk_ms[1] and len(both.first_chunk_ms) == 2
    assert both.real_time_factor == pytest.approx(both.ms_per_frame / 80, rel=1e-2)


def test_what_holds_up_the_event_loop_is_seen(
    demo: TTS, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a stream does on the loop's own thread."""
    own = demo.astream
    short = replace(request_, sampling=replace(demo.sampling, max_frames=4))

    def held_up(*a: Any, **named: Any) -> Any:
        sleep(0.4)
        return own(*a, **named)

    free = event_loop(demo, short, streams=2, rounds=1)
    monkeypatch.setattr(demo, "astream", held_up)
    blocked = event_loop(demo, short, streams=2, rounds=1)
    assert (free.streams, free.rounds) == (2, 1)
    assert blocked.most >= 400 > free.most >= free.p99 >= free.p50
    assert blocked.most_at_rest < 400


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    few = ["--runs", "2", "--chunks", "8", "--streams", "1,2"]
    assert main(["bench", "--device", "cpu", *few, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["model"] == "demo" and report["backend"] == "reference"
    assert report["device"] == "cpu" and report["dtype"] == "float32" and report["memory"] is None
    assert {"machine", "python", "torch", "date"} <= set(report)
    first, cold = report["first_chunk"], report["first_chunk_cold"]
    assert first["runs"] == 2 and f"one frame (2 runs): p50 {first['p50']:.2f} ms" in printed
    assert cold["runs"] == 1 and f"cold (1 runs): p50 {cold['p50']:.2f} ms" in printed
    assert list(report["stages"]) == [
        "tokenise", "prompt", "prefill", "first_frame", "codec", "delivery", "hand_over",
    ]  # fmt: skip
    cells = [(one["chunk_frames"], one["streams"]) for one in report["streaming"]]
    assert cells == [(8, 1), (8, 2)]
    late = report["event_loop"]
    assert late["streams"] == 2 and f"2 streams: p50 {late['p50']:.2f} ms" in printed
    assert [len(one["first_chunk_ms"]) for one in report["streaming"]] == [1, 2]
    assert report["sampling"]["temperature"] > 0 and report["peers"] == []


@pytest.mark.gpu
def test_a_gpu_tells_its_name_and_its_memory(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    few = ["--runs", "4", "--chunks", "1", "--streams", "1"]
    assert main(["bench", "--device", "cuda", *few, "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["device"] == torch.cuda.get_device_name()
    assert 0 < report["memory"]["loaded"] <= report["memory"]["peak"]
    assert all(milliseconds > 0 for milliseconds in report["stages"].values())


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib")
def test_the_plot_is_a_png(tmp_path: Path, brief: Callable[..., str]) -> None:
    file = tmp_path / "stages.png"
    assert main(["bench", brief(), *FEW, "--plot", str(file)]) == 0
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 5000


def test_a_plot_without_matplotlib_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megakernel_tts.cli.main.find_spec", lambda name: None)
    assert main(["bench", "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'megakernel-tts[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/none"], 1, "is not a model"),
        (["--device", "tpu"], 1, "choose auto, cpu, cuda"),
        (["--json", "/none/a.json"], 2, "/none is no folder"),
        (["--json", "/"], 2, "/ is a folder; name a file"),
        (["--peer", "--streams", "2"], 2, "let --streams have a 1 in it"),
    ],
)
def test_mistakes_get_a_sentence(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "0"], "'0' is no whole number of 1 or more"),
        (["--chunks", "1,x"], "'x' is no whole number"),
        (["--random-weights", "3B"], "invalid choice"),
        (["here", "--random-weights", "0.6B"], "not allowed with"),
    ],
)
def test_bad_numbers_are_usage_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_random_weights_are_written_and_their_speech_is_cut(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a small checkpoint in place of the 2 GB."""
    from megakernel_tts.model.random_checkpoint import write_checkpoint

    def small(folder: Path, size: str, device: object) -> None:
        assert size == "1.7B"
        write_checkpoint(folder, "custom_voice", "1b7")

    monkeypatch.setattr("megakernel_tts.bench.command.write_released_checkpoint", small)
    file = tmp_path / "a.json"
    few = ["--device", "cpu", "--runs", "1", "--chunks", "8", "--streams", "1"]
    assert main(["bench", "--random-weights", "1.7B", *few, "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["model"] == "1.7B, random weights, 50 frames at most"
    assert report["sampling"]["max_frames"] == 50 and report["sampling"]["guard"] is False


@pytest.mark.parametrize(("kind", "size"), [("base", "0b6"), ("voice_design", "1b7")])
def test_models_without_named_voices_are_measured_but_not_beside_peers(
    kind: str, size: str, brief: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", brief(kind, size), *FEW, "--peer"]) == 0
    assert "CustomVoice models alone" in capsys.readouterr().out


FASTER = """
import numpy as np, time

class FasterQwen3TTS:
    @classmethod
    def from_pretrained(cls, folder, device="cuda", dtype=None):
        import pathlib, torch
        assert pathlib.Path(folder, "model.safetensors").is_file()
        assert (device, dtype) == ("cpu", torch.float32)
        return cls()

    def generate_custom_voice_streaming(
        self, text, speaker, language, instruct=None, non_streaming_mode=None, max_new_tokens=2048,
        min_new_tokens=2, temperature=0.9, top_k=50, top_p=1.0, do_sample=True,
        repetition_penalty=1.05, chunk_size=12,
    ):
        assert (speaker, language, do_sample) == ("serena", "Auto", True), (speaker, language)
        for _ in range(4):
            time.sleep(0.01 * chunk_size)
            yield np.zeros(1920 * chunk_size, np.float32), 24000, {}
"""
OFFICIAL = """
import numpy as np, time

class Qwen3TTSModel:
    @classmethod
    def from_pretrained(cls, folder, **how):
        assert set(how) == {"device_map", "dtype"}
        return cls()

    def generate_custom_voice(
        self, text, speaker, language="Auto", instruct=None, non_streaming_mode=True, *, do_sample,
        top_k, top_p, temperature, repetition_penalty, subtalker_dosample, subtalker_top_k,
        subtalker_top_p, subtalker_temperature, max_new_tokens,
    ):
        time.sleep(0.1)
        return [np.zeros(1920 * 5, np.float32)], 24000
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules this process and those that it starts can import."""
    folder = tmp_path / "packages"
    folder.mkdir()
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_peers_of_the_same_interface_are_measured(
    packages: Path, tmp_path: Path, brief: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Stand-ins: they keep the interface and take a known time; the real ones are not here."""
    (packages / "faster_qwen3_tts.py").write_text(FASTER)
    (packages / "qwen_tts.py").write_text(OFFICIAL)
    file = tmp_path / "a.json"
    assert main(["bench", brief(), *FEW, "--peer", "--json", str(file)]) == 0
    faster, official = json.loads(file.read_text(encoding="utf-8"))["peers"]
    assert (faster["note"], official["note"]) == (None, None)
    assert [one["chunk_frames"] for one in faster["figures"]] == [1, 8]
    one, eight = faster["figures"]
    assert 10 <= one["first_chunk_ms"] < eight["first_chunk_ms"] and eight["first_chunk_ms"] >= 80
    assert one["ms_per_frame"] >= 10 and eight["ms_per_frame"] >= 10
    assert eight["real_time_factor"] == pytest.approx(eight["ms_per_frame"] / 80, rel=1e-2)
    (whole,) = official["figures"]
    assert whole["chunk_frames"] is None and whole["first_chunk_ms"] >= 100
    assert whole["ms_per_frame"] == pytest.approx(whole["first_chunk_ms"] / 5, rel=1e-3)
    printed = capsys.readouterr().out
    assert "chunk 8: first chunk" in printed and "whole speech: first chunk" in printed


def test_a_peer_that_fails_or_is_missing_gets_one_line(
    packages: Path, brief: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    (packages / "faster_qwen3_tts.py").write_text("raise RuntimeError('no CUDA here')")
    assert main(["bench", brief(), *FEW, "--peer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "faster-qwen3-tts failed: RuntimeError: no CUDA here" in lines
    if find_spec("qwen_tts") is None:
        assert "qwen-tts is not installed: nothing to compare with." in lines


def test_the_layout_is_the_one_that_was_asked_for(demo: TTS, request_: Request) -> None:
    """The same seed says the text at another pace."""
    seeds = range(4)
    timed = [speak(demo, replace(request_, layout="streaming"), 1, seed).frames for seed in seeds]
    said = {
        layout: [
            len(demo.say("Hello.", "clara", layout=layout, sampling=sampling).codes)
            for sampling in (replace(demo.sampling, seed=seed) for seed in seeds)
        ]
        for layout in ("full", "streaming")
    }
    assert said["full"] != said["streaming"] == timed
