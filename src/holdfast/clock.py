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


def elapsed() -> float:
    """Seconds since the machine was booted, with sleep counted where the system does."""
    clock = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def uptime() -> tuple[str, int]:
    """The boot, and whole seconds since then."""
    return boot_id(), int(elapsed())


def since(boot: str, then: float) -> float:
    """Seconds since a moment of a boot; for ever, if that was another one, as far as is known."""
    passed = elapsed() - then
    return passed if boot == boot_id() and passed >= 0 else float("inf")
