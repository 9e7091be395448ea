"""Builds or checks the CUDA kernels.

python build_ext.py                 # compile the released sizes for this GPU and eight slots
python build_ext.py --check         # compile for every architecture; needs nvcc but no GPU
python build_ext.py --check all     # the same, also what has not changed since the last check
"""

import argparse
import sys

from megakernel_common.kernels import build, spill_check
from megakernel_common.kernels.program import CSRC
from megakernel_stt.kernels.conformer import RELEASED_SIZES, conformer_program
from megakernel_stt.kernels.transducer import RELEASED_HIDDEN, transducer_program
from megakernel_tts.kernels import models

_RECORD = CSRC / "registers.json"
_RECOGNITION = (transducer_program(RELEASED_HIDDEN), conformer_program(*RELEASED_SIZES))


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--check",
        nargs="?",
        const="changed",
        choices=("changed", "all"),
        help="compile for every architecture: what has changed since the check that\n"
        "csrc/registers.json records (default), or all",
    )
    options = parser.parse_args()
    try:
        if options.check:
            programs = [*models.all_programs(), *_RECOGNITION]
            passed = spill_check.check(
                programs,
                build.compiler_id(),
                build.report_usage,
                _RECORD,
                again=options.check == "all",
            )
            return 0 if passed else 1
        import torch

        from megakernel_common.kernels.loader import load_module

        for program in (*models.released_programs(), *_RECOGNITION):
            load_module(program, torch.device("cuda"))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
