"""Time that nobody can set: how long the machine has been up, and which boot that was."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Names this boot of this machine; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def uptime() -> tuple[str, int]:
    """The boot, and whole seconds since then, with sleep counted where the system does."""
    clock = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
    seconds = time.monotonic() if clock is None else time.clock_gettime(clock)
    return boot_id(), int(seconds)
