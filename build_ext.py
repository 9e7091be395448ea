"""Builds or checks the CUDA kernels.

python build_ext.py            # compile the released sizes for the GPU of this machine
python build_ext.py --check    # compile for every architecture; needs nvcc but no GPU
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
    parser.add_argument("--check", action="store_true", help="compile for every architecture")
    options = parser.parse_args()
    try:
        if options.check:
            programs = [*models.all_programs(), transducer_program(RELEASED_HIDDEN)]
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
