"""The benchmark's figures, files and command, and the measurement of peers."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

from megakernel_tts import TTS, AudioChunk, EngineBusyError, SynthesisError
from megakernel_tts.bench import event_loop, stages, timing
from megakernel_tts.bench.arrivals import measure_arrivals
from megakernel_tts.bench.event_loop import measure_event_loop
from megakernel_tts.bench.heap import frozen_heap
from megakernel_tts.bench.playback import PlaybackGaps
from megakernel_tts.bench.stages import measure_stages, stage_timer
from megakernel_tts.bench.timing import (
    BenchmarkRequest,
    time_first_chunk,
    time_request,
    time_streams,
)
from megakernel_tts.bench.torch_graph import torch_frame
from megakernel_tts.cli.main import main
from megakernel_tts.loader import LoadedModel
from megakernel_tts.model.random_checkpoint import write_checkpoint
from tests.bench.options import QUICK


class OffsetClock:
    """The clock of the benchmark, which a test can advance."""

    def __init__(self) -> None:
        self._offset_s = 0.0

    def __call__(self) -> float:
        return perf_counter() + self._offset_s

    def advance(self, seconds: float) -> None:
        self._offset_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> OffsetClock:
    clock = OffsetClock()
    for module in (event_loop, stages, timing):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


@pytest.fixture(scope="module")
def demo() -> Iterator[TTS]:
    with TTS.load(device="cpu", slots=2) as tts:
        yield tts


@pytest.fixture
def hello(demo: TTS) -> BenchmarkRequest:
    return BenchmarkRequest("Hello.", demo.sampling, "clara")


@pytest.fixture
def brief(hello: BenchmarkRequest) -> BenchmarkRequest:
    """A request whose speech is cut after three frames."""
    return replace(hello, sampling=replace(hello.sampling, max_frames=3))


def test_request_is_timed_from_its_text_to_its_end(demo: TTS, hello: BenchmarkRequest) -> None:
    before = perf_counter()
    times = time_request(demo, hello, 1, seed=3)
    after = perf_counter()
    assert before <= times.start_s < times.first_s < times.end_s <= after
    speech = demo.say("Hello.", "clara", sampling=replace(demo.sampling, seed=3))
    assert times.frames == len(speech.codes) > 1, "the speech was not synthesised to its end"
    assert times.audio_s == pytest.approx(speech.seconds)


def test_stages_add_up_to_the_first_chunk_and_leave_the_engine_unchanged(
    demo: TTS, hello: BenchmarkRequest
) -> None:
    before = vars(demo._loaded.engine.vocoder).copy()
    with stage_timer(demo) as timer:
        times = time_request(demo, hello, 1, seed=0)
        milliseconds = vars(timer.read(times))
    total = sum(milliseconds.values())
    assert all(stage > 0 for stage in milliseconds.values()), milliseconds
    assert total == pytest.approx(1e3 * (times.first_s - times.start_s))
    assert vars(demo._loaded.engine.vocoder) == before


def test_delay_of_a_call_is_attributed_to_its_stage(
    demo: TTS, brief: BenchmarkRequest, clock: OffsetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = demo._loaded.engine
    for owner, name, stage in (
        (demo._loaded.tokenizer, "encode", "tokenise"),
        (engine.prompt_builder, "build", "prompt"),
        (engine.backend, "prefill", "prefill"),
        (engine.vocoder, "decode", "codec"),
    ):
        with monkeypatch.context() as patch:
            call = getattr(type(owner), name)

            def slow(self: object, *arguments: Any, call: Any = call, **keywords: Any) -> Any:
                clock.advance(10.0)
                return call(self, *arguments, **keywords)

            patch.setattr(type(owner), name, slow)
            milliseconds = vars(measure_stages(demo, brief, 1))
        assert milliseconds[stage] >= 10_000
        assert max(milliseconds, key=lambda name: milliseconds[name]) == stage, milliseconds


def test_percentiles_of_the_first_chunk_are_ordered(demo: TTS, brief: BenchmarkRequest) -> None:
    first_chunk = time_first_chunk(demo, brief, 4)
    assert first_chunk.runs == 4
    assert 0 < first_chunk.p50 <= first_chunk.p95 <= first_chunk.p99


def test_cold_requests_clear_the_prefix_cache(
    demo: TTS, brief: BenchmarkRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[bool] = []
    backend = demo._loaded.engine.backend
    monkeypatch.setattr(backend, "clear_prefix_cache", lambda: cleared.append(True))
    assert time_first_chunk(demo, brief, 3, cold=True).runs == len(cleared) == 3


def test_figures_of_streams_include_every_stream(demo: TTS, hello: BenchmarkRequest) -> None:
    figures = time_streams(demo, hello, 2, streams=2, rounds=1)
    assert (figures.chunk_frames, figures.streams, figures.rounds) == (2, 2, 1)
    first, second = figures.first_chunk_ms
    assert 0 < first <= second
    assert figures.real_time_factor == pytest.approx(figures.ms_per_frame / 80, rel=1e-2)


def test_throughput_and_underruns_are_of_all_streams(
    demo: TTS, hello: BenchmarkRequest, clock: OffsetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute passes before the second chunk of each stream."""
    astream = demo.astream

    async def stalled(*arguments: Any, **keywords: Any) -> AsyncIterator[AudioChunk]:
        num_chunks = 0
        async for chunk in astream(*arguments, **keywords):
            num_chunks += 1
            if num_chunks == 2:
                clock.advance(60.0)
            yield chunk

    monkeypatch.setattr(demo, "astream", stalled)
    short = replace(hello, sampling=replace(demo.sampling, max_frames=4))
    figures = time_streams(demo, short, 1, streams=2, rounds=1)
    assert figures.underruns >= 2
    assert 0 < figures.frames_per_second <= 8 / 60
    assert figures.audio_seconds_per_second == pytest.approx(0.08 * 8 / 60, abs=0.01)


def test_streams_of_all_rounds_are_read_on_one_event_loop(
    demo: TTS, brief: BenchmarkRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of a round are opened before one of them is read; seeds are not used twice."""
    astream = demo.astream
    events: list[str] = []
    loops: set[asyncio.AbstractEventLoop] = set()
    seeds: list[int] = []

    async def observed(*arguments: Any, **keywords: Any) -> AsyncIterator[AudioChunk]:
        events.append("opened")
        loops.add(asyncio.get_running_loop())
        seeds.append(keywords["sampling"].seed)
        assert gc.get_freeze_count(), "objects from before the measurement are collected"
        async for chunk in astream(*arguments, **keywords):
            events.append("read")
            yield chunk

    monkeypatch.setattr(demo, "astream", observed)
    gc.unfreeze()
    figures = time_streams(demo, brief, 3, streams=2, rounds=2)
    assert figures.rounds == 2 and sorted(seeds) == [0, 1, 2, 3]
    assert events == 2 * ["opened", "opened", "read", "read"]
    assert len(loops) == 1 and not gc.get_freeze_count()


def test_clock_of_a_stream_starts_before_its_text_is_passed_on(
    demo: TTS, brief: BenchmarkRequest, clock: OffsetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    astream = demo.astream

    def slow(*arguments: Any, **keywords: Any) -> Any:
        clock.advance(10.0)
        return astream(*arguments, **keywords)

    monkeypatch.setattr(demo, "astream", slow)
    figures = time_streams(demo, brief, 1, streams=1, rounds=1)
    assert 10_000 <= figures.first_chunk_ms[0] < 20_000


def test_a_stream_that_fails_ends_the_others(
    demo: TTS, hello: BenchmarkRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised as it is, and not within a group."""
    astream, error = demo.astream, SynthesisError("a failure")
    speaking, cancelled = asyncio.Event(), 0

    async def failing(*arguments: Any, **keywords: Any) -> AsyncIterator[AudioChunk]:
        nonlocal cancelled
        if keywords["sampling"].seed == 0:
            await asyncio.wait_for(speaking.wait(), 60)
            raise error
        try:
            async for chunk in astream(*arguments, **keywords):
                speaking.set()
                yield chunk
        except asyncio.CancelledError:
            cancelled += 1
            raise

    monkeypatch.setattr(demo, "astream", failing)
    with pytest.raises(SynthesisError) as caught:
        time_streams(demo, hello, 1, streams=2, rounds=1)
    assert caught.value is error and cancelled == 1
    demo.say("Hello.", "clara")  # after which the engine has left the stream that was cancelled
    assert demo._loaded.engine.num_sessions == 0


def test_a_chunk_is_late_if_the_audio_before_it_was_played() -> None:
    playback = PlaybackGaps()
    chunks = ((5.0, 0.08), (5.05, 0.16), (5.24, 0.08), (5.5, 0.08), (5.58, 0.08))
    ends_s = [playback.add(now_s, audio_s) for now_s, audio_s in chunks]
    assert ends_s == pytest.approx([5.08, 5.24, 5.32, 5.58, 5.66])
    assert playback.gaps_s == pytest.approx([0.18])


def test_arrivals_are_read_to_their_ends(
    demo: TTS, hello: BenchmarkRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused ones are counted; the order of the random times is the same in each run."""
    astream, num_opened = demo.astream, 0

    async def refusing(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_opened
        num_opened += 1
        if num_opened == 2:
            raise EngineBusyError("too many sessions")
        keywords["sampling"] = replace(keywords["sampling"], max_frames=3)
        async for chunk in astream(*arguments, **keywords):
            yield chunk

    monkeypatch.setattr(demo, "astream", refusing)
    figures = measure_arrivals(demo, hello, rate=20.0, duration_s=0.3)
    assert figures.requests == num_opened > 2 and figures.refused == 1
    assert 1 <= figures.max_concurrent <= figures.requests
    assert 0 < figures.first_chunk_ms_p50 <= figures.first_chunk_ms_p95
    assert figures.first_chunk_ms_p95 <= figures.first_chunk_ms_p99
    assert 0 < figures.audio_seconds_per_second <= 3 * 0.08 * figures.requests / 0.2


def test_a_frame_of_the_graph_has_a_row_for_each_stream(load: Callable[..., LoadedModel]) -> None:
    """Streams with equal inputs and caches differ by what is sampled only."""
    loaded = load(size="1b7")
    model = getattr(loaded.engine.backend, "model")  # noqa: B009
    torch.manual_seed(0)
    with torch.inference_mode():
        for num_streams in (1, 3):
            rows = torch_frame(model, loaded.config, 5, num_streams)()
            assert rows.shape == (num_streams, loaded.config.talker.stack.hidden_size)
            assert rows.isfinite().all()
            assert len({tuple(row.tolist()) for row in rows}) == num_streams


def test_blocking_work_on_the_event_loop_is_measured(
    demo: TTS, hello: BenchmarkRequest, clock: OffsetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    astream = demo.astream
    short = replace(hello, sampling=replace(demo.sampling, max_frames=4))

    def blocking(*arguments: Any, **keywords: Any) -> Any:
        clock.advance(10.0)
        return astream(*arguments, **keywords)

    free = measure_event_loop(demo, short, streams=2, rounds=1)
    monkeypatch.setattr(demo, "astream", blocking)
    blocked = measure_event_loop(demo, short, streams=2, rounds=1)
    assert (free.streams, free.rounds) == (2, 1)
    assert blocked.max >= 10_000 > free.max >= free.p99 >= free.p50
    assert blocked.max_idle < 10_000


def test_objects_that_were_excluded_from_collection_stay_so() -> None:
    excluded = [object()]
    gc.freeze()  # as a server does
    with frozen_heap():
        pass
    assert all(each is not excluded for each in gc.get_objects())


def test_command_prints_a_table_and_writes_json(
    tmp_path: Path,
    short_copy: Callable[..., str],
    no_warm_up: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megakernel_tts.bench.benchmark._NUM_WARMUP_ROUNDS", 1)
    file, model = tmp_path / "figures.json", short_copy()
    few = ["--runs", "2", "--chunks", "8", "--streams", "1,2", "--rate", "5", "--duration", "0.5"]
    assert main(["bench", model, "--device", "cpu", *few, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["model"] == model and report["backend"] == "reference"
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
    assert all(one["frames_per_second"] > 0 for one in report["streaming"])
    (arrivals,) = report["arrivals"]
    assert arrivals["requests"] > 0 and "5 requests per second for 0.5 s" in printed
    assert report["torch_graph"] == [], "there is no GPU"


@pytest.mark.gpu
def test_report_of_a_gpu_has_its_name_and_memory(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    few = ["--runs", "4", "--chunks", "1", "--streams", "1"]
    assert main(["bench", "--device", "cuda", *few, "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["device"] == torch.cuda.get_device_name()
    assert 0 < report["memory"]["loaded"] <= report["memory"]["peak"]
    assert all(milliseconds > 0 for milliseconds in report["stages"].values())
    assert [graph["streams"] for graph in report["torch_graph"]] == [1]
    assert report["torch_graph"][0]["ms_per_frame"] > 0


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib")
def test_plot_is_a_png_file(tmp_path: Path, short_model: Callable[..., str]) -> None:
    file = tmp_path / "stages.png"
    assert main(["bench", short_model(), *QUICK, "--plot", str(file)]) == 0
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 5000


def test_plot_without_matplotlib_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megakernel_tts.cli.bench.find_spec", lambda name: None)
    assert main(["bench", "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'megakernel-tts[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/none"], 1, "is not a model"),
        (["--device", "tpu"], 1, "choose auto, cpu, cuda"),
        (["--json", "/none/a.json"], 2, "/none is not a folder"),
        (["--json", "/"], 2, "/ is a folder; name a file"),
        (["--peer", "--streams", "2"], 2, "add 1 to --streams"),
    ],
)
def test_invalid_arguments_give_a_message(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "0"], "'0' is not a whole number of 1 or more"),
        (["--chunks", "1,x"], "'x' is not a whole number"),
        (["--rate", "10,0"], "'0' is not a number above 0"),
        (["--duration", "inf"], "'inf' is not a number above 0"),
        (["--random-weights", "3B"], "invalid choice"),
        (["here", "--random-weights", "0.6B"], "not allowed with"),
    ],
)
def test_invalid_option_values_are_usage_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_speech_of_random_weights_is_limited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a small checkpoint instead of one of a released size."""

    def small(folder: Path, size: str, device: object) -> None:
        assert size == "1.7B"
        write_checkpoint(folder, "custom_voice", "1b7")

    monkeypatch.setattr("megakernel_tts.bench.benchmark.write_released_checkpoint", small)
    monkeypatch.setattr("megakernel_tts.bench.benchmark.RANDOM_FRAMES", 5)
    monkeypatch.setattr("megakernel_tts.bench.benchmark._warm_up", lambda *_: None)
    file = tmp_path / "a.json"
    few = ["--device", "cpu", "--runs", "1", "--chunks", "8", "--streams", "1"]
    assert main(["bench", "--random-weights", "1.7B", *few, "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["model"] == "1.7B, random weights, 5 frames at most"
    assert report["sampling"]["max_frames"] == 5 and report["sampling"]["guard"] is False


def test_requests_use_the_requested_layout(
    demo: TTS, hello: BenchmarkRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same seed, the codes differ between the layouts."""
    sampling = replace(demo.sampling, seed=0, max_frames=6)
    full, streaming = (
        demo.say(hello.text, "clara", layout=layout, sampling=sampling).codes
        for layout in ("full", "streaming")
    )
    assert not np.array_equal(full, streaming)
    timed: list[np.ndarray] = []
    stream = demo.stream

    def observed(*arguments: Any, **keywords: Any) -> Iterator[AudioChunk]:
        for chunk in stream(*arguments, **keywords):
            timed.append(chunk.codes)
            yield chunk

    monkeypatch.setattr(demo, "stream", observed)
    time_request(demo, replace(hello, sampling=sampling, layout="streaming"), 1, seed=0)
    np.testing.assert_array_equal(np.concatenate(timed), streaming)
