"""Builds or checks the CUDA kernels.

python build_ext.py            # build for the GPU of this machine, as the first use would
python build_ext.py --check    # compile for every architecture; needs nvcc but no GPU
"""

import argparse
import sys

from megakernel_tts.kernels import build


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compile for every architecture")
    arguments = parser.parse_args()
    try:
        if arguments.check:
            return 0 if build.check() else 1
        import torch

        build.load(torch.device("cuda"))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
