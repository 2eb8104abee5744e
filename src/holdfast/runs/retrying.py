"""Trying again, with longer and longer pauses between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Retries:
    """How often a step is tried, after which errors, and how long to wait between."""

    attempts: int = 3
    on: type[Exception] | tuple[type[Exception], ...] = Exception
    wait: float = 0.5
    """Seconds before the second attempt; twice as long before each further one,"""
    longest: float = 30.0
    """but never longer than this."""

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise InvalidRequest(f"retries must be a number from 1 on, not {self.attempts!r}")

    def options(self) -> dict[str, Any]:
        """For tenacity, which is not imported before it is needed: it takes long."""
        import tenacity

        return {
            "stop": tenacity.stop_after_attempt(self.attempts),
            "retry": tenacity.retry_if_exception(
                lambda e: isinstance(e, self.on) and not isinstance(e, HoldfastError)
            ),
            "wait": tenacity.wait_random_exponential(self.wait, self.longest),
            "reraise": True,
        }


def retries_of(given: int | Retries) -> Retries:
    return given if isinstance(given, Retries) else Retries(given)


def retrying(given: int | Retries, fn: Callable[[], Any]) -> Any:
    import tenacity

    return tenacity.Retrying(**retries_of(given).options())(fn)
