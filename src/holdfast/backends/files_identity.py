"""What a session's folder says of itself: whose it is."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.backends import files_text as text
from holdfast.codec import portable
from holdfast.errors import Corrupt

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError)


class Identity(NamedTuple):
    """What a session's folder was made for, should the first line of the log be damaged."""

    number: int
    names: tuple[bytes, ...]
    """All that it has had, or was about to get."""
    row: bytes
    origin: tuple[int, int] | None

    def show(self) -> bytes:
        shown = {
            "session": [text.show_name(name) for name in self.names],
            "number": self.number,
            "row": text.show_row(self.row),
            "origin": self.origin,
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
            return cls(number, names, text.hide_row(shown["row"]), origin)
        except (*_MALFORMED, OverflowError, Corrupt):
            return None
