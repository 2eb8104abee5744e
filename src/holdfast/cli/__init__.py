"""The command line: `holdfast`.

One module per family of commands, each imported only when one of its commands is called.
"""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

_SELDOM = 50_000


def main() -> NoReturn:
    """The entry point of the `holdfast` command."""
    # Imports leave no garbage, and neither does a command at its end: to look for it there, as the
    # interpreter does by default, took a fifth of the time of a short command.
    gc.set_threshold(_SELDOM)
    from holdfast.cli.main import run

    code = run()
    gc.freeze()
    sys.exit(code)
