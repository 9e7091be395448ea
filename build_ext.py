"""Builds or checks the CUDA kernels.

python build_ext.py                 # compile the released sizes for the GPU of this machine
python build_ext.py --check         # compile for every architecture; needs nvcc but no GPU
python build_ext.py --check most    # the same, of similar kernels those with the most registers
"""

import argparse
import sys

from megakernel_common.kernels import build
from megakernel_stt.kernels.transducer import RELEASED_HIDDEN, transducer_program
from megakernel_tts.kernels import models


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--check",
        nargs="?",
        const="all",
        choices=("all", "most"),
        help="compile for every architecture; of similar kernels all (default), or\n"
        "those with the most registers",
    )
    options = parser.parse_args()
    try:
        if options.check:
            everything = options.check == "all"
            programs = models.all_programs() if everything else models.most_registers_programs()
            programs.append(transducer_program(RELEASED_HIDDEN))
            return 0 if build.check(programs) else 1
        import torch

        from megakernel_common.kernels.loader import load_module

        for program in (*models.released_programs(), transducer_program(RELEASED_HIDDEN)):
            load_module(program, torch.device("cuda"))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
