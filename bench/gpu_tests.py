"""Summary of the tests on a GPU, from pytest's JUnit reports.

pytest -m gpu --junit-xml gpu.xml
python -m bench.gpu_tests gpu.xml --json bench/results/gpu-tests.json
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch

from bench.report import write


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def summarise(files: Sequence[Path]) -> dict[str, object]:
    """Summarises the tests of several reports.

    A test that is in more than one report counts with its last outcome.

    Args:
        files: JUnit reports, the oldest first.

    Returns:
        Number of tests by outcome, in total and by test module; names of failed and of skipped
        tests; seconds of all tests together.

    Raises:
        ValueError: The reports have no test.
    """
    outcomes: dict[tuple[str, str], str] = {}
    seconds: dict[tuple[str, str], float] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            test = (case.get("classname", ""), case.get("name", ""))
            outcomes[test] = _outcome(case)
            seconds[test] = float(case.get("time", "0"))
    if not outcomes:
        raise ValueError(f"no tests in {', '.join(map(str, files))}; run pytest with --junit-xml")
    modules = sorted({module for module, _ in outcomes})
    return {
        "tests": dict(Counter(outcomes.values())),
        "tests_by_module": {
            module: dict(
                Counter(outcome for test, outcome in outcomes.items() if test[0] == module)
            )
            for module in modules
        },
        "failed": sorted("::".join(test) for test, found in outcomes.items() if found == "failed"),
        "skipped": sorted(
            "::".join(test) for test, found in outcomes.items() if found == "skipped"
        ),
        "seconds": round(sum(seconds.values())),
    }


def main() -> int:
    """Prints the summary; returns 1 if a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path, help="JUnit reports, the oldest first")
    parser.add_argument("--json", type=Path, help="file for the summary")
    options = parser.parse_args()
    summary = summarise(options.reports)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    write({"gpu": gpu, "command": "bench.gpu_tests"} | summary, options.json, packages=("torch",))
    return bool(summary["failed"])


if __name__ == "__main__":
    sys.exit(main())
