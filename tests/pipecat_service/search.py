"""Searches for words that are committed to a conversation in the wrong order or at the wrong time.

Runs the checks of `test_committed_words` and `test_underruns` with many seeds, in virtual time. The
exit status is 1 if one fails.

nice python -m tests.pipecat_service.search --json bench/results/pipecat-words.json
"""

import argparse
import sys
import time
from pathlib import Path

from loguru import logger
from tqdm import tqdm

from bench.report import write
from bench.virtual_time import observable_engines
from tests.pipecat_service import test_committed_words, test_underruns
from tests.pipecat_service.test_committed_words import NUM_CONCURRENT, check_responses
from tests.pipecat_service.test_underruns import check_interruptions


def search_responses(num_responses: int) -> list[str]:
    """Checks responses with the seeds from 0 on; returns what failed."""
    failures: list[str] = []
    with test_committed_words.make_engine() as engine:
        for first in tqdm(range(0, num_responses, NUM_CONCURRENT), desc="responses", disable=None):
            seeds = range(first, min(num_responses, first + NUM_CONCURRENT))
            try:
                check_responses(engine, seeds)
            except AssertionError as error:
                failures.append(f"responses {seeds}: {error}")
    return failures


def search_interruptions(num_seeds: int) -> tuple[int, list[str]]:
    """Interrupts turns with the seeds from 0 on; returns the number of turns and what failed."""
    num_interruptions, failures = 0, list[str]()
    with test_underruns.make_engine() as engine:
        for seed in tqdm(range(num_seeds), desc="interruptions", disable=None):
            try:
                num_interruptions += check_interruptions(engine, seed, num_turns=40)
            except AssertionError as error:
                failures.append(f"interruptions with seed {seed}: {error}")
    return num_interruptions, failures


def main() -> None:
    """Prints the extent of the search and its result; writes them with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=300, help="default: 300, seeds from 0")
    parser.add_argument("--seeds", type=int, default=10, help="of 200 interruptions; default: 10")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    options = parser.parse_args()
    logger.remove()
    start = time.perf_counter()
    with observable_engines():
        failures = search_responses(options.responses)
        num_interruptions, more_failures = search_interruptions(options.seeds)
    failures += more_failures
    result = {
        "responses": options.responses,
        "response_seeds": [0, options.responses - 1],
        "interruptions": num_interruptions,
        "interruption_seeds": [0, options.seeds - 1],
        "failures": failures,
        "seconds": round(time.perf_counter() - start, 1),
    }
    write(result, options.json)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
