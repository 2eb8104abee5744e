"""A clock that cannot be set: the time since boot, with an id of the boot.

Leases and tombstones use it, because the wall clock can be wrong or be set back.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of the current boot; empty where the system provides none (not Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def elapsed() -> float:
    """Return the seconds since boot. Time asleep counts where the system has such a clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def uptime() -> tuple[str, int]:
    """Return the id of the boot, and the whole seconds since then."""
    return boot_id(), int(elapsed())


def since(boot: str, then: float) -> float:
    """Return the seconds since `then`, a moment of `boot`; infinity if it cannot be known.

    It cannot be known after a reboot, or when `then` lies in the future.
    """
    passed = elapsed() - then
    return passed if boot == boot_id() and passed >= 0 else float("inf")
