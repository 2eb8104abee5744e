"""Defects that were found once, each by its smallest case."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from enum import Enum
from typing import TYPE_CHECKING

import apsw
import pytest

import holdfast
from holdfast.codec import records, values

if TYPE_CHECKING:
    from pathlib import Path


def test_a_counter_set_back_is_noticed(tmp_path: Path) -> None:
    """Else a fork gets a number that its origin uses, and both write to one stream."""
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        store.session("s").append("log", "x" * 2000)
    connection = apsw.Connection(str(path))
    body = connection.execute("SELECT body FROM counters WHERE space = 'stream'").get
    assert records.unseal_counter("stream", body) > 1
    forged = records.seal_counter("stream", 1)[8:]
    connection.execute("UPDATE counters SET body = ? WHERE space = 'stream'", (body[:8] + forged,))
    connection.close()
    with holdfast.open(path) as store, pytest.raises(holdfast.Corrupt, match="counter"):
        store.session("s").fork("t")


def test_a_machine_without_zones_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    berlin = dt.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    with holdfast.open("memory:", cache_bytes=0) as store:
        session = store.session("s")
        session.save({"t": berlin, "m": ["a"], "in": {"t": berlin}})
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(values, "_known_zones", frozenset)
            assert store.verify().ok
            session.append("m", "b")
            session.patch(set={("in", "x"): 1})
            assert store.verify().ok
            assert session.load()["t"] == berlin
        assert session.load()["t"].tzinfo == berlin.tzinfo
        assert session.load()["in"]["t"].tzinfo == berlin.tzinfo


class Lists(Enum):
    LONG = ["y" * 300] * 5


def test_an_enum_of_a_list_hashes_like_the_list() -> None:
    with holdfast.open("memory:", cache_bytes=0) as store:
        by_enum = store.session("a").save({"m": [Lists.LONG, ["z" * 3000] * 3]})
        by_list = store.session("b").save({"m": [["y" * 300] * 5, ["z" * 3000] * 3]})
        assert by_enum.state_hash == by_list.state_hash
        assert store.verify().ok
