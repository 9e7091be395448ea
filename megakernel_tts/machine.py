"""Properties of the machine."""

import os
import sys


def system_memory() -> int | None:
    """Returns the size of the main memory in bytes; None if the system does not report it."""
    if sys.platform == "win32" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
