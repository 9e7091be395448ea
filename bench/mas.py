"""Compares implementations of monotonic alignment search, with the protocol of Super-MAS.

Scores are float32 [B, T, S] with S = 4 T frames and full lengths. Times are milliseconds by
`triton.testing.do_bench` (25 ms of warm-up, 500 ms of runs, the L2 cache cleared before each run):
median, 20th and 80th percentile. Implementations that take more than 0.1 s are run three times. A
column ends where a run takes more than two seconds.

  cython         monotonic-alignment-search from PyPI: one thread, copies to the host and back
  cython_openmp  the same, built with OpenMP
  super_mas      Super-MAS as published: installed, or a checkout of the repository
                 supertone-inc/super-monotonic-align (--super-mas)
  restated       a re-statement of Super-MAS's algorithm in Triton
  drop_in        `maximum_path`: scores and mask to a float32 path
  native         `mas`: scores and lengths to durations
  bound_drop_in, bound_native
                 the bytes that must be moved (scores that a path can reach, results) at the rate of
                 a copy of 1 GiB on this GPU

`host_us` is the median time after which a call of `drop_in` or `native` returns; the GPU is idle
before each call.

python -m bench.mas --json bench/results/mas.json --plot mas.png
python -m bench.mas --from-json bench/results/mas.json --plot mas.png  # needs matplotlib
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm

from bench import mas_cython
from bench.events import event_times
from bench.report import write
from megakernel_tts.align import mas, maximum_path

_FEW_RUNS_MS = 100.0
_SKIP_LARGER_MS = 2000.0
_NUM_HOST_CALLS = 100
_OWN = ("drop_in", "native")
_SUPER_MAS = "super_monotonic_align"
_RATIOS = (("drop_in", "super_mas"), ("drop_in", "restated"), ("native", "super_mas"),
           ("native", "restated"))  # fmt: skip

Cell = dict[str, float]


@dataclass(frozen=True)
class Inputs:
    """Scores float32 and mask int32 [B, T, S], lengths int32 [B]."""

    scores: Tensor
    mask: Tensor
    text: Tensor
    frames: Tensor


Run = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Column:
    """An implementation; `run` is None if it is not available, and `note` says why."""

    name: str
    run: Run | None
    note: str | None = None
    overwrites_scores: bool = False


def _imported(
    name: str, import_path: Callable[[], mas_cython.MaximumPath], overwrites_scores: bool = False
) -> Column:
    try:
        path = import_path()
        return Column(
            name,
            lambda inputs: path(inputs.scores, inputs.mask),
            overwrites_scores=overwrites_scores,
        )
    except ImportError as error:
        return Column(name, None, f"{name} is n/a: {error}.")


def columns(folder: Path, super_mas: Path | None = None) -> list[Column]:
    """All implementations, available or not.

    Args:
        folder: Folder for the build of `cython_openmp`.
        super_mas: Checkout of Super-MAS, which is added to the import path; None if it is installed
            or not measured.
    """
    if super_mas is not None:
        sys.path.insert(0, str(super_mas))
    modules = (("super_mas", _SUPER_MAS), ("restated", "bench.mas_triton"))
    return [
        _imported("cython", mas_cython.shipped),
        _imported("cython_openmp", lambda: mas_cython.with_openmp(folder)),
        *(
            _imported(
                name,
                lambda module=module: import_module(module).maximum_path,
                overwrites_scores=True,
            )
            for name, module in modules
        ),
        Column("drop_in", lambda inputs: maximum_path(inputs.scores, inputs.mask)),
        Column("native", lambda inputs: mas(inputs.scores, inputs.text, inputs.frames)),
    ]


def time_run(act: Callable[[], object], rep: int) -> Cell:
    """Milliseconds of a run.

    Args:
        act: Runs the implementation on the current stream.
        rep: Milliseconds of all runs.
    """
    act()  # the first run compiles
    torch.cuda.synchronize()
    (once_ms,) = event_times(act, 1)
    if once_ms > _FEW_RUNS_MS:
        times = [once_ms] if once_ms > _SKIP_LARGER_MS else [once_ms, *event_times(act, 2)]
        return {"p50": median(times), "p20": min(times), "p80": max(times)}
    from triton.testing import do_bench  # pyright: ignore[reportMissingImports]  # with CUDA's torch

    p50, p20, p80 = do_bench(act, warmup=25, rep=rep, quantiles=[0.5, 0.2, 0.8])
    return {"p50": p50, "p20": p20, "p80": p80}


def host_us(act: Callable[[], object]) -> float:
    """Median microseconds after which a call returns; the GPU is idle before each call."""
    times_us: list[float] = []
    for _ in range(_NUM_HOST_CALLS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        act()
        times_us.append(1e6 * (time.perf_counter() - start_s))
    return round(median(times_us), 1)


def copy_rate() -> float:
    """Bytes per millisecond, read and written, of a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(event_times(lambda: target.copy_(source), 20))


def bounds(items: int, tokens: int, frames: int, rate: float) -> dict[str, Cell]:
    """Lower bounds in milliseconds, from the bytes that must be moved."""
    read = 4 * items * tokens * (frames - tokens + 1)
    durations, path = 4 * items * tokens, 4 * items * tokens * frames
    return {
        "bound_drop_in": {"p50": (read + path) / rate},
        "bound_native": {"p50": (read + durations) / rate},
    }


def measure(
    implementations: list[Column], batches: list[int], token_counts: list[int], rep: int
) -> Iterator[dict[str, object]]:
    """Yields a row of figures for each shape.

    Args:
        implementations: The columns.
        batches: Numbers of items.
        token_counts: Numbers of tokens; there are four times as many frames.
        rep: Milliseconds of all runs of a cell.
    """
    rate = copy_rate()
    progress = tqdm(total=len(batches) * len(token_counts), unit="shape")
    for items in batches:
        ended: set[str] = set()
        for tokens in token_counts:
            frames = 4 * tokens
            generator = torch.Generator("cuda").manual_seed(tokens)
            inputs = Inputs(
                torch.randn(items, tokens, frames, device="cuda", generator=generator),
                torch.ones(items, tokens, frames, dtype=torch.int32, device="cuda"),
                torch.full((items,), tokens, dtype=torch.int32, device="cuda"),
                torch.full((items,), frames, dtype=torch.int32, device="cuda"),
            )
            expected = maximum_path(inputs.scores, inputs.mask)
            cells: dict[str, Cell | None] = {}
            own_host_us: dict[str, float] = {}
            agree: dict[str, bool] = {}
            for column in implementations:
                cells[column.name] = None
                if column.run is None or column.name in ended:
                    continue
                own = (
                    replace(inputs, scores=inputs.scores.clone())
                    if column.overwrites_scores
                    else inputs
                )
                made = column.run(own)
                agree[column.name] = torch.equal(
                    made, expected if made.dim() == 3 else expected.sum(2).to(made.dtype)
                )
                del made
                cell = time_run(lambda run=column.run, own=own: run(own), rep)
                cells[column.name] = {name: round(ms, 4) for name, ms in cell.items()}
                if cell["p50"] > _SKIP_LARGER_MS:
                    ended.add(column.name)
                if column.name in _OWN:
                    own_host_us[column.name] = host_us(lambda run=column.run, own=own: run(own))
            for name, cell in bounds(items, tokens, frames, rate).items():
                cells[name] = {"p50": round(cell["p50"], 4)}
            progress.update()
            yield {
                "items": items, "tokens": tokens, "frames": frames, "ms": cells,
                "host_us": own_host_us, "times_as_fast": _ratios(cells), "same_path": agree,
            }  # fmt: skip
    progress.close()


def _ratios(cells: dict[str, Cell | None]) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for name, other_name in _RATIOS:
        own, other = cells[name], cells[other_name]
        if own is not None and other is not None:
            ratios[f"{name} over {other_name}"] = round(other["p50"] / own["p50"], 1)
    for kind in _OWN:
        own, bound = cells[kind], cells[f"bound_{kind}"]
        assert own is not None and bound is not None
        ratios[f"bound_{kind} over {kind}"] = round(bound["p50"] / own["p50"], 3)
    return ratios


def plot(rows: list[dict[str, object]], gpu: str, file: Path) -> None:
    """Plots the medians by tokens, one panel per number of items; needs matplotlib."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  # an extra

    batches = sorted({int(str(row["items"])) for row in rows})
    figure = Figure(figsize=(6 * len(batches), 4.5), layout="constrained")
    for axes, items in zip(
        figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True
    ):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            cells = row["ms"]
            assert isinstance(cells, dict)
            for name, cell in cells.items():
                if row["items"] == items and cell is not None:
                    lines.setdefault(name, []).append((int(str(row["tokens"])), cell["p50"]))
        for name, points in lines.items():
            style = "--" if name.startswith("bound") else "-o"
            axes.plot(*zip(*points, strict=True), style, label=name, markersize=3)
        axes.set_yscale("log")
        axes.set_xlabel("tokens T, of S = 4 T frames")
        axes.set_ylabel("milliseconds")
        axes.set_title(f"{items} items, {gpu}", fontsize=10)
        axes.legend(fontsize=8)
    figure.savefig(file, format="png", dpi=150)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Measures and prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--items", type=_numbers, default=[16, 32], metavar="N,N", help="16,32")
    parser.add_argument(
        "--tokens", type=_numbers, default=[*range(128, 2049, 128)], metavar="N,N",
        help="128 to 2048 in steps of 128",
    )  # fmt: skip
    parser.add_argument(
        "--super-mas", type=Path, metavar="FOLDER", help="checkout of Super-MAS, to be measured"
    )
    parser.add_argument("--only", metavar="NAME,NAME", help="columns (default: all)")
    parser.add_argument("--rep", type=int, default=500, help="milliseconds of runs (default: 500)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="file for the plot")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", help="plot these figures and measure nothing"
    )
    options = parser.parse_args()
    if options.from_json is not None:
        if options.plot is None:
            parser.error("--from-json needs --plot: name the file for the plot")
        figures = json.loads(options.from_json.read_text())
        return plot(figures["rows"], figures["gpu"], options.plot)
    source = options.super_mas
    if source is not None and not (source / _SUPER_MAS / "__init__.py").is_file():
        parser.error(f"{source} is not a checkout of Super-MAS: it has no package {_SUPER_MAS}")
    with tempfile.TemporaryDirectory() as folder:
        implementations = columns(Path(folder), source)
        if options.only is not None:
            wanted = {*options.only.split(","), *_OWN}
            implementations = [
                c if c.name in wanted else Column(c.name, None) for c in implementations
            ]
        rows: list[dict[str, object]] = []
        for row in measure(implementations, options.items, options.tokens, options.rep):
            cells = f"{row['ms']} {row['host_us']} {row['times_as_fast']}"
            tqdm.write(f"B {row['items']}, T {row['tokens']}: {cells}")
            rows.append(row)
    notes = [column.note for column in implementations if column.note is not None]
    gpu = torch.cuda.get_device_name()
    figures = {"gpu": gpu, "command": "bench.mas", "notes": notes, "rows": rows}
    write(figures, options.json, packages=("torch",))
    if options.plot is not None:
        plot(rows, gpu, options.plot)


if __name__ == "__main__":
    main()
