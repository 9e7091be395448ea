"""`python -m megakernel_tts` is the command `megakernel-tts`."""

import sys

from megakernel_tts.cli.main import main

sys.exit(main())
