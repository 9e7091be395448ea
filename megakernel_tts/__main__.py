"""The command `megakernel-tts`, also as `python -m megakernel_tts`."""

import signal
import sys


def main() -> int:
    """Runs the command; an interrupt before and after it ends the process without a traceback."""
    _end_at_interrupt()
    from megakernel_tts.cli import main as cli

    try:
        return cli.main()
    finally:
        _end_at_interrupt()


def _end_at_interrupt() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
