"""The timing program without torch: it runs on a GPU, and its output is read back."""

from pathlib import Path

import pytest
import torch

from bench.kernel_timing import (
    LaunchTiming,
    compile_program,
    kernel_width,
    parse_timing,
    run_jobs,
)
from megakernel_common.kernels import build


def test_output_line_has_median_minimum_and_checksum() -> None:
    assert parse_timing("36.64 36.51 00ff") == LaunchTiming(36.64, 36.51, "00ff")


@pytest.mark.parametrize(
    ("architecture", "num_streams", "width"),
    [("90a", 1, 0), ("90a", 4, 0), ("90a", 5, 8), ("90a", 33, 48), ("86", 4, 0), ("86", 17, 32)],
)
def test_the_program_is_that_which_the_backend_launches(
    architecture: str, num_streams: int, width: int
) -> None:
    assert kernel_width(architecture, num_streams) == width


@pytest.mark.gpu
def test_every_job_is_timed_and_launches_agree(tmp_path: Path) -> None:
    program = compile_program("tiny", build.architecture_of(torch.device("cuda")), tmp_path)
    jobs = ["frames 1 16 2", "frames 3 140 2", "prompt 30", "batch 2 8"]
    timings = run_jobs(program, jobs, num_launches=2)
    assert len(timings) == len(jobs)
    assert all(0 < timing.min_ms <= timing.median_ms for timing in timings)
    assert run_jobs(program, jobs[:1], num_launches=1)[0].checksum == timings[0].checksum
    with pytest.raises(RuntimeError, match="no such job"):
        run_jobs(program, ["frames 0 16 2"], num_launches=1)
