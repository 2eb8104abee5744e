"""The same operations give the same answers on every backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast import Retention
from holdfast.errors import HoldfastError
from holdfast.history.watch import Watcher
from tests.support.sessions import KEEP_LAST
from tests.support.stores import TEXT, Home


def day_of_a_store(home: Home) -> list[Any]:
    """A day in the life of a store, in words that do not depend on ids or times."""
    session = home.filled(3, label="l", tags=["t"])
    said: list[Any] = []
    names: dict[str | None, Any] = {None: None}

    def tell(name: str) -> None:
        session = home.session(name)
        for c in session.tree():
            names.setdefault(c.id, (c.session, c.seq))
        said.append([
            (c.seq, c.step, c.operation, names[c.parent], c.label, c.tags, c.size, c.added,
             c.state_hash) for c in (*session.tree(), *session.history())
        ])  # fmt: skip
        said.append((session.step, len(session), session.exists(), session.load()))

    def attempt(call: Callable[[], Any]) -> None:
        try:
            said.append(call())
        except HoldfastError as e:
            said.append(type(e).__name__)

    tell("s")
    stale = home.session()
    session.append("log", *range(100))
    attempt(lambda: stale.save({}).seq)
    attempt(lambda: session.save({"k": 1}, key="k").seq)
    attempt(lambda: session.save({"k": 2}, key="k").seq)
    session.rewind("l")
    attempt(lambda: session.save({"k": 3}, parent="@~1", label="l").seq)
    tell("s")
    fork = session.fork("f")
    attempt(lambda: len(session.fork("f")))
    fork.patch(set={"a": {"b": TEXT}}, append={"log": [1]})
    tell("f")
    for revision in ("@", "@~1", "l", "tag:t", "key:k", "step:2", "@~99", "", "label:no", "zz"):
        attempt(partial(session.load, revision))
    said.extend((i.name, i.checkpoints, i.agent) for i in home.reopened().sessions())
    tell("s")
    tell("f")
    return said


def test_saves_and_forks_are_the_same_on_every_backend(tmp_path):
    told = {}
    for kind in ("memory", "sqlite", "files", "postgres"):
        home = Home(kind, tmp_path / kind)
        told[kind] = day_of_a_store(home)
        home.give_back()
    assert told["memory"] == told["sqlite"] == told["files"] == told["postgres"]
    assert len(told["memory"]) > 25


def life_with_history(home: Home) -> list[Any]:
    """A life with history, in words that do not depend on ids or times."""
    said: list[Any] = []
    session = home.store.session("s", agent="x")
    watcher = Watcher(home.store._repository.backend)

    def attempt(call: Callable[[], Any]) -> None:
        try:
            done = call()
            if isinstance(done, holdfast.Operation):
                done = (done.kind, done.number, done.details)
            elif isinstance(done, holdfast.Plan):
                done = [v[1:] for v in done.verdicts]
            said.append(done)
        except HoldfastError as e:
            said.append(type(e).__name__)

    def tell() -> None:
        for name in ("s", "f", "g"):
            session = home.session(name)
            said.extend(
                [(c.session, c.seq, c.step, c.pruned, c.tags) for c in listed]
                for listed in (session.tree(), session.history())
            )
            said.append((session.exists(), session.step, len(session)))
        queries: list[dict[str, Any]] = [
            {}, {"agent": "x"}, {"tag": "t"}, {"label": "l3"}, {"status": "failed"},
            {"tag": "t", "limit": 2}, {"trigger": "g"},
        ]  # fmt: skip
        for query in queries:
            said.append([(c.session, c.seq) for c in home.store.checkpoints(**query)])
            query.pop("limit", None)
            said.append([i.name for i in home.store.sessions(**query)])
        hits = home.store.search("quick")
        said.append(
            [(hit.session, hit.checkpoint and hit.checkpoint.seq, hit.path) for hit in hits]
        )
        stats = home.store.stats()
        rows = stats.rows | {"items": stats.rows["items"] > 0}  # plain files pack none together
        said.append((stats[:3], stats.states, [s[:2] for s in stats.largest], rows))
        said.append([(type(e).__name__, e.session) for e in watcher.poll()])

    for i in range(8):
        session.save(
            {"i": i, "log": [TEXT] * i}, label=f"l{i}", tags=["t"] * (i % 2), trigger="g",
            status="failed" if i % 3 else "completed",
        )  # fmt: skip
    acts: list[Callable[[], Any]] = [
        session.undo, session.undo, session.redo, lambda: session.delete("@~2"),
        lambda: session.delete("@"), lambda: session.delete("l4"), session.undo,
        lambda: len(session.fork("f", "@~3")), lambda: session.prune(KEEP_LAST, dry_run=True),
        lambda: session.prune(Retention(keep_last=2, keep_labelled=False)), home.store.gc,
        session.undo, lambda: session.rewind("@~1").seq, session.redo, session.undo,
        lambda: home.session("f").undo(), lambda: home.session("f").redo(),
        lambda: len(home.session("f").fork("g")), lambda: home.session("f").delete(),
        home.store.gc, lambda: home.session("f").undo(), home.store.repair,
        lambda: session.save({"i": "end"}).step, session.delete, session.undo, session.redo,
        lambda: home.store.gc()[:2],
    ]  # fmt: skip
    for act in acts:
        attempt(act)
        tell()
    return said


def test_history_is_the_same_on_every_backend(tmp_path: Path) -> None:
    told = {}
    for kind in ("memory", "sqlite", "files", "postgres"):
        home = Home(kind, tmp_path / kind)
        told[kind] = life_with_history(home)
        home.give_back()
    assert told["memory"] == told["sqlite"] == told["files"] == told["postgres"]
    assert len(told["memory"]) > 500


def test_the_newest_come_first_however_many_are_wanted(home: Home) -> None:
    """PostgreSQL reads some long listings in pages."""
    for name in ("a", "b", "c"):
        home.filled(2, name)
    assert [info.name for info in home.store.recent(20_000)] == ["c", "b", "a"]
