"""Whose fault it is when calls are nested too deeply: that of stored bytes, or of who asks."""

from __future__ import annotations

from holdfast.errors import Corrupt

_ROOM = 256
"""Calls from C and back, of two levels each: more than the deepest value that is stored takes."""


def blames_caller(error: BaseException) -> bool:
    """Whether it is a RecursionError that sound bytes would bring here, too.

    Then it says nothing about those that were read, and goes up to who asked from so deep a stack:
    taken for damage, it would be remembered, or written.
    """
    if not isinstance(error, RecursionError):
        return False
    try:
        _descend(_ROOM)
    except RecursionError:
        return True
    return False


def _descend(calls: int) -> bool:
    return calls > 0 and any(map(_descend, (calls - 1,)))


class _Following:
    """Around code that follows stored references: Corrupt if they lead too deep, as in a circle."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RecursionError) and not blames_caller(error):
            raise Corrupt("stored references are nested too deeply") from error


FOLLOWING = _Following()
