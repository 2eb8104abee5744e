"""The hashes by which PostgreSQL finds names and marks, made anew from what they are hashes of."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from psycopg.types.numeric import Int8

from holdfast.codec import records
from holdfast.errors import UNREADABLE

if TYPE_CHECKING:
    from holdfast.backends.postgres_link import Link

_NAMES = "SELECT num, name, body FROM sessions WHERE hash <> sha256(name)"
_MARKS = "SELECT pos, kind, value, body FROM marks WHERE hash <> sha256(value)"


def rehash(link: Link) -> None:
    """Only of rows that are sound.

    The hash of a name that is damaged stays as it is, and so the name is not free: else who asks
    for it would begin its session anew.
    """
    sessions: list[Any] = link.execute(_NAMES).fetchall()
    for number, name, body in sessions:
        with suppress(*UNREADABLE):
            records.unseal_session(number, name, body)
            change = "UPDATE sessions SET hash = sha256(name) WHERE num = %s AND name = %s"
            link.execute(change, (Int8(number), name))
    marks: list[Any] = link.execute(_MARKS).fetchall()
    for pos, kind, value, body in marks:
        with suppress(*UNREADABLE):
            records.unseal_mark(pos, kind, value, body)
            change = (
                "UPDATE marks SET hash = sha256(value) WHERE pos = %s AND kind = %s AND value = %s"
            )
            link.execute(change, (Int8(pos), kind, value))
