"""A read that fails once is an error of the disk, not damage."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

from holdfast.errors import Unavailable
from tests.support.stores import Home


class FailingReads(apsw.VFS):
    """A file system whose next read of a page fails."""

    def __init__(self) -> None:
        super().__init__("shaky", "")
        self.fails = False

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802 - apsw's name
        shaky = self

        class File(apsw.VFSFile):
            def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
                if shaky.fails and amount >= 4096:
                    shaky.fails = False
                    raise apsw.IOError("injected")
                return super().xRead(amount, offset)

        return File("", name, flags)


def test_a_failed_read_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home("sqlite", tmp_path)
    for n in range(20):
        home.session().save({"log": [os.urandom(999).hex()], "n": n})
    shaky, real = FailingReads(), apsw.Connection
    monkeypatch.setattr(apsw, "Connection", partial(real, vfs="shaky"))
    session = home.reopened().session("s")
    shaky.fails = True
    with pytest.raises(Unavailable, match="injected"):
        session.load("step:3")
    assert session.load("step:3")["n"] == 2
    home.give_back()
    shaky.unregister()
