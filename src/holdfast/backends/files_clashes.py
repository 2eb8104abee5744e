"""Numbers and names that are there twice: somebody brought a folder, or put an older file back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.codec.records import shown_name
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MOVE = "one of these folders is a copy, or of another store: move it away, and export() it there"


def session_clash(number: int, folders: Sequence[Path]) -> Corrupt:
    places = " and in ".join(["/".join(path.parts[-2:]) for path in folders])
    return Corrupt(f"session {number} is in {places}, so nobody knows which is meant", hint=_MOVE)


def name_clash(name: bytes, folders: Sequence[Path]) -> Corrupt:
    places = " and in ".join(["/".join(path.parts[-2:]) for path in folders])
    return Corrupt(f"there is a session {shown_name(name)!r} in {places}", hint=_MOVE)


def stream_clash(stream: int, paths: Sequence[Path]) -> Corrupt:
    places = " and in ".join(["/".join(path.parts[-4:]) for path in paths])
    return Corrupt(
        f"stream {stream} is in {places}, so nobody knows whose items are meant", hint=_MOVE
    )


def given_twice(what: str, folder: Path) -> Corrupt:
    """Who writes has reserved the number before the counters were set back."""
    return Corrupt(
        f"the number of {what} is taken by {folder}, so nothing was written",
        hint="counters.json is older than what lies beside it: open the store again",
    )
