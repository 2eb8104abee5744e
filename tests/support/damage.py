"""Damage to one session among others."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.storage.files.backend import FilesBackend
from holdfast.storage.memory import MemoryBackend
from tests.support import file_damage as filestore
from tests.support import memory_rows
from tests.support.stores import Home


def damage_one_of_four_sessions(home: Home, what: str) -> None:
    for name in NEIGHBOURS:
        home.filled(3, name)
    session = home.filled(3, "s", label="label")
    home.session("a").tag("@", "x")
    session.tag("@", "x")
    DAMAGES[what](home)


def check_neighbours(home: Home, count: int = 3) -> None:
    for name in NEIGHBOURS:
        session = home.session(name)
        assert [session.load(c)["i"] for c in session.tree()] == list(range(3))[-count:]
        assert session.verify().ok


NEIGHBOURS = ("a", "t", "z")


DAMAGES: dict[str, Callable[[Home], None]] = {
    "record": lambda home: home.spoil_checkpoint(2),
    "newest record": lambda home: home.spoil_checkpoint(3),
    "missing record": lambda home: home.spoil_checkpoint(3, None),
    "head": lambda home: home.spoil_head(),
    "missing head": lambda home: home.spoil_head(None),
    "session": lambda home: home.spoil_session(),
    "name": lambda home: home.spoil_name(),
    "mark": lambda home: home.spoil_marks(3),
    "item": lambda home: home.spoil_newest_item(),
}


def spoil_operation(home: Home, number: int) -> None:
    at = home._number("s")
    if isinstance(home.store._repository.backend, MemoryBackend):
        memory_rows.damage(home.store._repository.backend, "operations", b"torn", at << 32 | number)
    elif isinstance(home.store._repository.backend, FilesBackend):
        filestore.edit_log(
            home.store._repository.backend, at, lambda e: filestore.spoil_operation(e, number)
        )
    else:
        home._sql("UPDATE operations SET body = ? WHERE pos = ?", b"torn", at << 32 | number)
