"""What the machine has, as far as loading a model depends on it."""

import os
import sys


def system_memory() -> int | None:
    """The machine's memory in bytes; None where the system does not report it."""
    if sys.platform == "win32" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
