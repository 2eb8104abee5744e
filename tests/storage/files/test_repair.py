"""Lost lines of a log: what repair() accepts, what is left, and that all goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.storage.files.log import SessionLog
from tests.storage.files.test_backend import ITEM
from tests.transfer.test_copy import facts
from tests.transfer.test_copy_damage import flipped

LINES = 9


def opened(path: Path) -> holdfast.Store:
    return holdfast.open(f"files:{path}", durability="normal")


def filled(path: Path) -> dict[str, int]:
    """A session of LINES commits, and another forked from it; how long each state is."""
    with opened(path) as store:
        session = store.session("s", agent="planner")
        known = [session.save({"log": [ITEM] * 20}, key="first")]
        known += [session.append("log", ITEM, trigger="manual") for _ in range(3)]
        session.label(known[1], "precious")
        session.delete(known[2])
        session.rewind(known[1])
        known += [session.append("log", ITEM), session.append("log", ITEM)]
        fork = session.fork("fork", at=known[4])
        known.append(fork.append("log", ITEM))
        return {each.id: len(store.session(each.session).load(each)["log"]) for each in known
                if each is not known[2]}  # fmt: skip


def spoil(path: Path, lines: set[int]) -> None:
    log = path / "sessions/s/log.jsonl"
    found = log.read_bytes().splitlines(keepends=True)
    assert len(found) == LINES
    log.write_bytes(
        b"".join([flipped(x, len(x) // 2) if n in lines else x for n, x in enumerate(found)])
    )


def check_accepted(path: Path, lines: set[int]) -> None:
    known = filled(path)
    spoil(path, lines)
    with opened(path) as store:
        assert not store.verify().ok
        [done] = store.repair().sessions
        assert (done.session, "log" in done.rebuilt, done.lost) == ("s", True, ())
    for again in range(2):
        with opened(path) as store, holdfast.open("memory:") as other:
            assert store.verify(read_data=True).ok
            assert store.repair().sessions == ()
            assert store.copy(other).skipped == ()
            assert facts(other) == facts(store)
            for id, count in known.items():
                assert len(store.session(store.get(id).session).load(id)["log"]) == count
            assert store.session("s").get("key:first").id == next(iter(known))
            assert {c.id for c in store.checkpoints(agent="planner")} >= {*known} - {[*known][-1]}
            if not again:
                session = store.session("s")
                for short_lived in [session.append("log", ITEM) for _ in range(40)][:-1]:
                    session.delete(short_lived)
                store.gc()  # which writes the log anew


@pytest.mark.parametrize("line", range(LINES))
def test_a_lost_line_is_accepted(tmp_path: Path, line: int) -> None:
    check_accepted(tmp_path / "store", {line})


@pytest.mark.parametrize("line", range(1, LINES))
def test_lost_lines_are_accepted(tmp_path: Path, line: int) -> None:
    check_accepted(tmp_path / "store", {0, line - 1, line})


def test_a_backup_has_what_an_accepted_line_brought(tmp_path: Path) -> None:
    path = tmp_path / "store"
    known = filled(path)
    spoil(path, {3})  # the last one that tells how long its stream is
    with opened(path) as store:
        store.repair()
        assert store.backup(tmp_path / "backup").ok
    with opened(tmp_path / "backup") as store:
        for id, count in known.items():
            assert len(store.session(store.get(id).session).load(id)["log"]) == count


def test_what_was_found_without_its_line_must_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SessionLog.acceptance
    monkeypatch.setattr(
        SessionLog, "acceptance", lambda self, *args: whole(self, *args) | {"checkpoints": []}
    )
    with pytest.raises(AssertionError):
        check_accepted(tmp_path / "store", {3})


def test_an_acceptance_must_outlive_the_log_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = SessionLog._idle_runs

    def careless(self: SessionLog, entry: dict[str, Any]) -> Any:
        if "dropped" in entry:
            entry = {"n": entry["n"], "dropped": entry["dropped"]}
        return idle(self, entry)

    monkeypatch.setattr(SessionLog, "_idle_runs", careless)
    with pytest.raises(AssertionError):
        check_accepted(tmp_path / "store", {3})


def test_an_older_file_of_counters_leads_to_no_number_that_is_taken(tmp_path: Path) -> None:
    """As when a backup is put back beside sessions that are newer."""
    path = tmp_path / "store"
    with opened(path) as store:
        store.session("old").save({"log": [f"old {ITEM}"] * 20})
    older = (path / "counters.json").read_bytes()
    for name in ("new", "newer"):
        with opened(path) as store:
            store.session(name).save({"log": [f"{name} {ITEM}"] * 20})
    (path / "counters.json").write_bytes(older)
    with opened(path) as store:
        store.session("newest").save({"log": [f"newest {ITEM}"] * 20})
        for name in ("old", "new", "newer", "newest"):
            assert store.session(name).load() == {"log": [f"{name} {ITEM}"] * 20}
        assert store.verify(read_data=True).ok
