"""Start time of the command line: of --help and log, next to a bare interpreter with SQLite."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from .lab import Lab, Row
from .timing import Ratio, duration, interleave

_BARE = "import apsw"
_COMMAND = "from holdfast.__main__ import main; main()"


def start(lab: Lab) -> list[Row]:
    """Time new processes. Their modules are compiled first, as in an installed package."""
    compiled = {
        "PYTHONPYCACHEPREFIX": str(lab.path("compiled").parent),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    environment = os.environ | compiled

    def arm(*arguments: str) -> Callable[[int], Callable[[], object]]:
        def run() -> None:
            subprocess.run(
                [sys.executable, "-c", *arguments],
                env=environment, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip

        run()
        return lambda _: run

    taken = interleave(
        lab.pick(40, 5),
        bare=arm(_BARE),
        help=arm(_COMMAND, "--help"),
        log=arm(_COMMAND, "--store", str(lab.long.path), "log"),
    )
    helped = Ratio.of(taken["help"], taken["bare"])
    logged = Ratio.of(taken["log"], taken["help"])
    return [
        lab.row(
            "`holdfast --help`",
            '≤ 3 × `python -c "import apsw"`',
            f"{helped} ({duration(taken['help'])} / {duration(taken['bare'])})",
            passed=helped.middle <= 3,
        ),
        lab.row(
            f"First screen of `holdfast log` on {lab.long.steps:,} checkpoints",
            "≤ 2 × `holdfast --help`",
            f"{logged} ({duration(taken['log'])} / {duration(taken['help'])})",
            passed=logged.middle <= 2,
        ),
    ]
