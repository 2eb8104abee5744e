"""What runs have promised to the code in them, and whether a store keeps it after a fault."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import holdfast
from holdfast import clock
from holdfast.history import journal as journals
from holdfast.history import leases
from holdfast.history.journal import Call

from .checking import load_findings, named
from .ledger import digest
from .runner import Part, Runner, Where


@dataclass
class Promises:
    """What holds at one moment of the life of runners, by what they said until then.

    A function that was entered has begun for all time, and whatever a call has returned it returns
    for ever, without being made again. A tool that had begun is not made again before somebody has
    asked for that. What was only tried may have happened or not.
    """

    tried: set[Where] = field(default_factory=set)
    entered: set[Where] = field(default_factory=set)
    tools: set[Where] = field(default_factory=set)  # those entered
    again: set[Where] = field(default_factory=set)  # tools that may be made again
    results: dict[Where, Any] = field(default_factory=dict)
    chunks: dict[Where, list[Any]] = field(default_factory=dict)
    runs: dict[tuple[str, int], str] = field(default_factory=dict)  # their ids
    ended: set[tuple[str, int]] = field(default_factory=set)
    saved: dict[str, tuple[str, str]] = field(default_factory=dict)  # id -> session, digest
    acknowledged: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, lines: Iterable[bytes]) -> Promises:
        promises = cls()
        for line in lines:
            promises.add(line)
        return promises

    def add(self, line: bytes) -> None:
        entry = json.loads(line)
        kind, what = entry["is"], entry.get("what")
        if kind in ("error", "wrong"):
            (self.errors if kind == "error" else self.wrong).append(what)
            return
        self.acknowledged += kind == "ack"
        if "key" in entry:
            where = (entry["session"], entry["n"], entry["turn"], entry["key"])
            getattr(self, f"_{what}")(where, entry)
            return
        run = (entry["session"], entry["n"])
        if what == "run":
            if self.runs.setdefault(run, entry["id"]) != entry["id"]:
                self.wrong.append(f"lost: run {run} was begun again as another")
        elif what == "end":
            self.ended.add(run)
        elif what == "checkpoint":
            self.saved[entry["id"]] = (entry["session"], entry["digest"])

    def _call(self, where: Where, entry: dict[str, Any]) -> None:
        self.tried.add(where)
        self.chunks.pop(where, None)  # another attempt streams anew

    def _entered(self, where: Where, entry: dict[str, Any]) -> None:
        if where in self.results:
            self.wrong.append(f"lost: {where} was made again after it had returned")
        if where in self.tools and where not in self.again:
            self.wrong.append(f"lost: tool {where} was made again, and nobody was asked")
        self.again.discard(where)
        self.entered.add(where)
        if entry["tool"]:
            self.tools.add(where)

    def _chunk(self, where: Where, entry: dict[str, Any]) -> None:
        self.chunks.setdefault(where, []).append(entry["chunk"])

    def _again(self, where: Where, entry: dict[str, Any]) -> None:
        self.again.add(where)

    def _result(self, where: Where, entry: dict[str, Any]) -> None:
        if self.results.setdefault(where, entry["result"]) != entry["result"]:
            self.wrong.append(f"wrong state: {where} returned something else than before")

    _answer = _result


# -- after a fault ---------------------------------------------------------------------------------


@contextmanager
def another_boot() -> Iterator[None]:
    """The machine was off meanwhile: what its processes of then do now cannot be asked."""
    with mock.patch.object(clock, "boot_id", return_value="another boot"):
        leases._here.cache_clear()
        try:
            yield
        finally:
            leases._here.cache_clear()


def findings(
    url: str, promises: Promises, *, script: list[Part], booted: bool = False, seed: int = 0
) -> list[str]:
    """What is wrong with the store; empty if it keeps every promise and the runs can go on."""
    if not booted:
        return _findings(url, promises, script)
    with another_boot():
        return _findings(url, promises, script)


def _findings(url: str, promises: Promises, script: list[Part]) -> list[str]:
    book = copy.deepcopy(promises)
    found, book.wrong, book.errors = book.wrong, [], []
    try:
        with holdfast.open(url) as store:
            found += _journals(store, book, {part.session for part in script})
            found += _checkpoints(store, book)
            if not found and not store.verify(read_data=True).ok:
                found.append("verify reports damage")
        if found:
            return found
        Runner(url, book.add, by="heir", patience=1).run(script)
        found += [*book.wrong, *[f"resuming fails: {error}" for error in book.errors]]
        with holdfast.open(url) as store:
            found += _ends(store, book, script)
            if not store.verify(read_data=True).ok:
                found.append("verify reports damage after resuming")
    except Exception as error:
        found.append(f"not to be used: {named(error)}")
    return found


def _journals(store: holdfast.Store, book: Promises, sessions: Iterable[str]) -> Iterator[str]:
    runs = {id: run for run, id in book.runs.items()}
    there: dict[Where, Call] = {}
    streamed: dict[Where, list[Any]] = {}
    for name in sessions:
        session = store.session(name)
        if not session.exists():
            continue
        for each in session.pending():
            if each.state == "running":
                yield f"{each.key!r} of {name!r} is said to be running"
        with store._repository.reader() as reader:
            entries = list(journals.read(reader, session._number(reader)))
        for call in journals.all_calls(entries).all.values():
            run = runs.get(call.run)
            if run is None or (*run, call.turn, call.key) not in book.tried:
                yield f"wrong state: a call that nobody has made: {call.id}"
            else:
                where = *run, call.turn, call.key
                there[where], streamed[where] = call, _streamed(entries, call)
    for where in book.entered | book.results.keys():
        if where not in there:
            yield f"lost: {where} had begun"
        else:
            yield from _call(where, there[where], book, streamed[where])


def _streamed(entries: list[journals.Entry], call: Call) -> list[Any]:
    """What an attempt at a call has streamed last."""
    chunks: dict[int, list[Any]] = {}
    for n, facts in entries:
        if facts["what"] == "stream" and facts["of"] == call.number:
            chunks = {n: []}
        elif facts["what"] == "chunks" and facts["of"] in chunks:
            chunks[facts["of"]] += facts["chunks"]
    return [chunk for each in chunks.values() for chunk in each]


def _call(where: Where, call: Call, book: Promises, streamed: list[Any]) -> Iterator[str]:
    if where in book.results:
        failure = call.failure if call.status == "failed" else None
        result = call.result if failure is None else {"failed": failure["error"]}
        if call.status not in ("done", "failed"):
            yield f"lost: {where} had returned, and is {call.status}"
        elif result != book.results[where]:
            yield f"wrong state: {where} has another result"
    elif where in book.tools and call.status == "rerun" and where not in book.again:
        yield f"lost: {where} would be made again"
    chunks = book.chunks.get(where, [])
    if streamed[: len(chunks)] != chunks:
        yield f"lost: what {where} had streamed"


def _checkpoints(store: holdfast.Store, book: Promises) -> Iterator[str]:
    for id, (session, expected) in book.saved.items():
        yield from load_findings(store.session(session), id, expected)
    for session, n in book.ended:
        if n not in store.session(session).load()["runs"]:
            yield f"lost: run {n} of {session!r} had ended"


def _ends(store: holdfast.Store, book: Promises, script: list[Part]) -> Iterator[str]:
    """Everything is done, and the state is that of runs that nothing has interrupted."""
    for name in {part.session for part in script}:
        session = store.session(name)
        parts = [part for part in script if part.session == name]
        if session.head is None or session.head.status != "completed":
            yield f"{name!r} is not completed"
            continue
        wanted = [where for part in parts for where in part.results()]
        expected = {
            "runs": [part.n for part in parts],
            "results": [book.results.get(where) for where in wanted],
        }
        if digest(session.load()) != digest(expected):
            yield f"wrong state: {name!r} has ended in another"
        if session.pending():
            yield f"{name!r} has left something open"
