"""The logger of holdfast, "holdfast". What never logs does not even import logging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logging import Logger


class _Logger:
    def __getattr__(self, name: str) -> Any:
        from logging import getLogger

        return getattr(getLogger("holdfast"), name)


logger: Logger = _Logger()  # type: ignore[assignment]
