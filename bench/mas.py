"""Monotonic alignment search beside others, by the protocol of Super-MAS.

Scores float32 [B, T, S] of S = 4 T frames, all of them used; milliseconds by
`triton.testing.do_bench` (25 ms to warm up, 500 ms of runs, the cache emptied before each), the
median and the 20th and 80th percentile. What takes more than 0.1 s is run three times, and a column
ends where a run takes more than two seconds.

  cython         monotonic-alignment-search as PyPI has it: one thread, copies to the host and back
  cython_openmp  the same, built with OpenMP
  super_mas      Super-MAS as published, where super_monotonic_align can be imported
  restated       our re-statement of Super-MAS's algorithm in Triton
  drop_in        ours, by the same signature: scores and mask to a path of float32
  native         ours: scores and lengths to durations
  bound_drop_in, bound_native
                 the bytes that must be moved (of the scores, those that a path can go through), at
                 the rate that a copy of 1 GiB reaches here

python -m bench.mas --json bench/results/mas.json --plot mas.png
python -m bench.mas --drawn bench/results/mas.json --plot mas.png  # where matplotlib is
"""

import argparse
import json
import tempfile
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

_SLOW = 100.0  # ms: few runs
_TOO_SLOW = 2000.0
_RATIOS = (("drop_in", "super_mas"), ("drop_in", "restated"), ("native", "super_mas"),
           ("native", "restated"))  # fmt: skip

Cell = dict[str, float]


@dataclass(frozen=True)
class Given:
    """Scores float32 and mask int32 [B, T, S], lengths int32 [B]."""

    scores: Tensor
    mask: Tensor
    text: Tensor
    frames: Tensor


Run = Callable[[Given], Tensor]


@dataclass(frozen=True)
class Column:
    """What is measured; `note` says why it is not, if it is not."""

    name: str
    run: Run | None
    note: str | None = None
    destroys: bool = False  # its scores


def _found(name: str, find: Callable[[], mas_cython.MaximumPath], destroys: bool = False) -> Column:
    try:
        path = find()
        return Column(name, lambda given: path(given.scores, given.mask), destroys=destroys)
    except ImportError as error:
        return Column(name, None, f"{name} is n/a: {error}.")


def columns(folder: Path) -> list[Column]:
    """All, found or not.

    Args:
        folder: Where one of them is built.
    """
    peers = (("super_mas", "super_monotonic_align"), ("restated", "bench.mas_triton"))
    return [
        _found("cython", mas_cython.shipped),
        _found("cython_openmp", lambda: mas_cython.with_openmp(folder)),
        *(
            _found(name, lambda module=module: import_module(module).maximum_path, destroys=True)
            for name, module in peers
        ),
        Column("drop_in", lambda given: maximum_path(given.scores, given.mask)),
        Column("native", lambda given: mas(given.scores, given.text, given.frames)),
    ]


def time_of(act: Callable[[], object], rep: int) -> Cell:
    """Milliseconds of a run.

    Args:
        act: Runs it, on the current stream.
        rep: Milliseconds of runs.
    """
    act()  # builds
    torch.cuda.synchronize()
    (once,) = event_times(act, 1)
    if once > _SLOW:
        times = [once] if once > _TOO_SLOW else [once, *event_times(act, 2)]
        return {"p50": median(times), "p20": min(times), "p80": max(times)}
    from triton.testing import do_bench  # pyright: ignore[reportMissingImports]  # with CUDA's torch

    p50, p20, p80 = do_bench(act, warmup=25, rep=rep, quantiles=[0.5, 0.2, 0.8])
    return {"p50": p50, "p20": p20, "p80": p80}


def copy_rate() -> float:
    """Bytes a millisecond, read and written, of a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(event_times(lambda: target.copy_(source), 20))


def bounds(items: int, tokens: int, frames: int, rate: float) -> dict[str, Cell]:
    """The least milliseconds of both of ours."""
    read = 4 * items * tokens * (frames - tokens + 1)
    durations, path = 4 * items * tokens, 4 * items * tokens * frames
    return {
        "bound_drop_in": {"p50": (read + path) / rate},
        "bound_native": {"p50": (read + durations) / rate},
    }


def measure(
    found: list[Column], batches: list[int], token_counts: list[int], rep: int
) -> Iterator[dict[str, object]]:
    """A row of figures for each shape.

    Args:
        found: What is measured.
        batches: Items.
        token_counts: Tokens; four times as many frames.
        rep: Milliseconds of runs.
    """
    rate = copy_rate()
    progress = tqdm(total=len(batches) * len(token_counts), unit="shape")
    for items in batches:
        ended: set[str] = set()
        for tokens in token_counts:
            frames = 4 * tokens
            generator = torch.Generator("cuda").manual_seed(tokens)
            given = Given(
                torch.randn(items, tokens, frames, device="cuda", generator=generator),
                torch.ones(items, tokens, frames, dtype=torch.int32, device="cuda"),
                torch.full((items,), tokens, dtype=torch.int32, device="cuda"),
                torch.full((items,), frames, dtype=torch.int32, device="cuda"),
            )
            expected = maximum_path(given.scores, given.mask)
            cells: dict[str, Cell | None] = {}
            agree: dict[str, bool] = {}
            for column in found:
                cells[column.name] = None
                if column.run is None or column.name in ended:
                    continue
                own = replace(given, scores=given.scores.clone()) if column.destroys else given
                made = column.run(own)
                agree[column.name] = torch.equal(
                    made, expected if made.dim() == 3 else expected.sum(2).to(made.dtype)
                )
                del made
                cell = time_of(lambda run=column.run, own=own: run(own), rep)
                cells[column.name] = {name: round(ms, 4) for name, ms in cell.items()}
                if cell["p50"] > _TOO_SLOW:
                    ended.add(column.name)
            for name, cell in bounds(items, tokens, frames, rate).items():
                cells[name] = {"p50": round(cell["p50"], 4)}
            progress.update()
            yield {
                "items": items, "tokens": tokens, "frames": frames, "ms": cells,
                "times_as_fast": _ratios(cells), "same_path": agree,
            }  # fmt: skip
    progress.close()


def _ratios(cells: dict[str, Cell | None]) -> dict[str, float]:
    found: dict[str, float] = {}
    for ours, theirs in _RATIOS:
        mine, other = cells[ours], cells[theirs]
        if mine is not None and other is not None:
            found[f"{ours} over {theirs}"] = round(other["p50"] / mine["p50"], 1)
    for kind in ("drop_in", "native"):
        mine, bound = cells[kind], cells[f"bound_{kind}"]
        assert mine is not None and bound is not None
        found[f"bound_{kind} over {kind}"] = round(bound["p50"] / mine["p50"], 3)
    return found


def plot(rows: list[dict[str, object]], gpu: str, file: Path) -> None:
    """Draws the medians over the tokens, a picture for each number of items; needs matplotlib."""
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
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--items", type=_numbers, default=[16, 32], metavar="N,N", help="16,32")
    parser.add_argument(
        "--tokens", type=_numbers, default=[*range(128, 2049, 128)], metavar="N,N",
        help="128 to 2048 in steps of 128",
    )  # fmt: skip
    parser.add_argument("--only", metavar="NAME,NAME", help="columns (default: all)")
    parser.add_argument("--rep", type=int, default=500, help="milliseconds of runs (default: 500)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="where the picture goes")
    parser.add_argument(
        "--drawn", type=Path, metavar="FILE", help="draw these figures, measure nothing"
    )
    options = parser.parse_args()
    if options.drawn is not None:
        if options.plot is None:
            parser.error("--drawn needs --plot: where should the picture go?")
        figures = json.loads(options.drawn.read_text())
        return plot(figures["rows"], figures["gpu"], options.plot)
    with tempfile.TemporaryDirectory() as folder:
        found = columns(Path(folder))
        if options.only is not None:
            wanted = {*options.only.split(","), "drop_in", "native"}
            found = [c if c.name in wanted else Column(c.name, None) for c in found]
        rows: list[dict[str, object]] = []
        for row in measure(found, options.items, options.tokens, options.rep):
            tqdm.write(f"B {row['items']}, T {row['tokens']}: {row['ms']} {row['times_as_fast']}")
            rows.append(row)
    notes = [column.note for column in found if column.note is not None]
    gpu = torch.cuda.get_device_name()
    figures = {"gpu": gpu, "command": "bench.mas", "notes": notes, "rows": rows}
    write(figures, options.json, packages=("torch",))
    if options.plot is not None:
        plot(rows, gpu, options.plot)


if __name__ == "__main__":
    main()
