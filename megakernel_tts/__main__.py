"""`python -m megakernel_tts` is the command `megakernel-tts`."""

import sys

from megakernel_tts.cli import main

sys.exit(main())
