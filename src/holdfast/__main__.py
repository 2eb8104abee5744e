"""`holdfast`, and `python -m holdfast`."""

from __future__ import annotations

import gc
import io
import sys
from typing import NoReturn

_SELDOM = 50_000


def main() -> NoReturn:
    """Run the command that was typed."""
    # Imports leave no garbage, and neither does a command at its end: to look for it there, as the
    # interpreter does by default, took a fifth of the time of a short command.
    gc.set_threshold(_SELDOM)
    from holdfast.cli.main import run

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a state may hold what no terminal shows
    code = run()
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    main()
