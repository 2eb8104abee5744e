"""The logger named "holdfast". The module `logging` is imported only when something is logged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logging import Logger


class _Logger:
    def __getattr__(self, name: str) -> Any:
        from logging import getLogger

        return getattr(getLogger("holdfast"), name)


logger: Logger = _Logger()  # type: ignore[assignment]
