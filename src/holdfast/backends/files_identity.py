"""What a session's folder says of itself: whose it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.backends import disk
from holdfast.backends import files_text as text
from holdfast.backends.files_runs import whole
from holdfast.codec import portable
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from pathlib import Path

SESSION = "session.json"
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError)


class Identity(NamedTuple):
    """What a session's folder was made for, should the first line of the log be damaged."""

    number: int
    names: tuple[bytes, ...]
    """All that it has had, or was about to get."""
    row: bytes
    origin: tuple[int, int] | None
    first: int | None = None
    """The highest number of a checkpoint that the first line of its log tells of.

    None if that line may be lost: it was not synced.
    """

    def show(self) -> bytes:
        shown = {
            "session": [text.show_name(name) for name in self.names],
            "number": self.number,
            "row": text.show_row(self.row),
            "origin": self.origin,
            "first": self.first,
        }
        return text.seal_line(self.number, shown)

    @classmethod
    def read(cls, data: bytes) -> Identity | None:
        """None if the file is damaged."""
        try:
            number = portable.loads(data)["number"]
            shown = text.read_line(number, data.removesuffix(b"\n"))
            if shown is None:
                return None
            names = tuple([text.hide_name(name) for name in shown["session"]])
            origin = None if shown["origin"] is None else (shown["origin"][0], shown["origin"][1])
            first = None if shown.get("first") is None else whole(shown["first"])
            return cls(number, names, text.hide_row(shown["row"]), origin, first)
        except (*_MALFORMED, OverflowError, Corrupt):
            return None


def identity_of(path: Path) -> Identity | None:
    """What a folder says; None if it says nothing."""
    try:
        return Identity.read((path / SESSION).read_bytes())
    except OSError as e:
        if disk.is_there(e):
            raise
        return None
