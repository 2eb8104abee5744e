"""The journal of a session: what its runs have begun, what came of it, and what nobody knows.

A call is noted before it is made and after it has returned. One that was begun and has no end is in
doubt: whether it had its effect, only the world outside can tell.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holdfast.backends.base import Jot, Moved
from holdfast.backends.group import Group, Member
from holdfast.codec import records, values
from holdfast.errors import Corrupt, Fenced, HoldfastError, NotSerializable, SessionNotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from holdfast.backends.base import Backend, Reader

_PAGE = 500
NOTE = "note"

Kind = Literal["step", "tool", "wait"]
Outcome = Literal["started", "done", "failed", "skipped", "rerun"]
Where = tuple[str, int, str]
"""Run, turn and key."""
_Note = tuple[dict[str, Any], bytes]
"""What an entry says, and the same encoded."""


@dataclass(slots=True)
class Call:
    """A step or a tool call, or something that is waited for, as the journal knows it."""

    number: int
    """Of the entry that began it."""
    kind: Kind
    run: str
    turn: int
    key: str
    name: str
    digest: str
    """Of its arguments."""
    arguments: Any
    idempotency_key: str
    started_us: int
    attempts: int = 1
    outcome: Outcome = "started"
    result: Any = None
    error: str | None = None
    ended_us: int | None = None
    partial: list[Any] = field(default_factory=list)
    """What was streamed of its result before it ended, or was interrupted."""

    @property
    def where(self) -> Where:
        return self.run, self.turn, self.key


def encoded(value: Any, what: str) -> bytes:
    """Arguments or a result as an entry holds them; NotSerializable names the path in `what`."""
    try:
        return values.encode_exact(value, 1)
    except NotSerializable:
        values.check(value, what)
        raise


def fresh(value: Any) -> Any:
    """The same as a value of its own: whoever gets it may change it."""
    return values.decode(values.encode_exact(value))


def idempotency_key(run: str, turn: int, key: str) -> str:
    """The same for every attempt of every worker, and another one in a fork."""
    return sha256(f"{run}\0{turn}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def now_us() -> int:
    return time.time_ns() // 1000


# -- entries ---------------------------------------------------------------------------------------


def started(kind: Kind, where: Where, name: str, digest: str, arguments: Any) -> dict[str, Any]:
    run, turn, key = where
    return {
        "what": "started", "kind": kind, "run": run, "turn": turn, "key": key, "name": name,
        "digest": digest, "idempotency_key": idempotency_key(run, turn, key), "at": now_us(),
        "arguments": arguments,
    }  # fmt: skip


def ended(call: int, outcome: Outcome, at: int, **more: Any) -> dict[str, Any]:
    return {"what": outcome, "of": call, "at": at, **more}


def _ending_with(facts: dict[str, Any], name: str, encoded: bytes) -> bytes:
    """An entry whose last fact is encoded already."""
    return values.encode({**facts, name: None})[:-1] + encoded  # None is one byte


def _whole(facts: dict[str, Any]) -> bytes:
    try:
        return values.encode_exact(facts)
    except NotSerializable:
        for name, value in facts.items():
            values.check(value, name)
        raise


def streamed(call: int, chunk: Any) -> dict[str, Any]:
    return {"what": "partial", "of": call, "chunk": chunk}


class Calls:
    """What entries say, each call once, however often it was begun."""

    def __init__(self) -> None:
        self.all: dict[Where, Call] = {}
        self._numbers: dict[int, Call] = {}

    def apply(self, n: int, facts: dict[str, Any]) -> None:
        try:
            if facts["what"] == "started":
                self._start(n, facts)
            elif facts["what"] == NOTE:
                return  # of no call
            elif facts["of"] in self._numbers:  # else what began it was freed
                call = self._numbers[facts["of"]]
                if facts["what"] == "partial":
                    call.partial.append(facts["chunk"])
                    return
                call.outcome, call.ended_us = facts["what"], facts["at"]
                call.result, call.error = facts.get("result"), facts.get("error")
        except (LookupError, TypeError, AttributeError) as e:
            raise Corrupt(f"entry {n} of the journal does not make sense") from e

    def _start(self, n: int, facts: dict[str, Any]) -> None:
        where = run, turn, key = facts["run"], facts["turn"], facts["key"]
        call = Call(
            n, facts["kind"], run, turn, key, facts["name"], facts["digest"], facts["arguments"],
            facts["idempotency_key"], facts["at"],
        )  # fmt: skip
        before = self.all.get(where)
        if before is not None:
            call.attempts = before.attempts + 1
        self.all[where] = self._numbers[n] = call

    def open(self) -> list[Call]:
        """Those that have no end."""
        return [call for call in self.all.values() if call.outcome == "started"]


class Entry(NamedTuple):
    number: int
    facts: dict[str, Any]


def read(
    reader: Reader, session: int, first: int = 1, end: int = records.MAX_SEQ
) -> Iterator[Entry]:
    """All entries from a number on, up to another; Corrupt if one is damaged or missing."""
    expected: int | None = None
    while first < end and (page := reader.journal(session, first, min(_PAGE, end - first))):
        for n, row in page:
            if expected is not None and n != expected:
                raise Corrupt(f"entry {expected} of the journal is missing")
            if n >= end:
                return
            expected = n + 1
            yield Entry(n, records.unseal_entry(session, n, row))
        first = page[-1][0] + 1


class Journal:
    """Writes to a session's journal, and knows what is in it. Safe for threads.

    Those that write at the same time share one write.
    """

    def __init__(self, backend: Backend, session: int, token: bytes | None) -> None:
        self._backend, self.session, self._token = backend, session, token
        self.calls = Calls()
        self.next = 1
        self._group: Group[_Note] = Group(self._write, self._write_one)

    def catch_up(self, reader: Reader, first: int | None = None) -> None:
        """Read what is there, and was not read yet."""
        if first is not None:
            self.next = first
        for n, facts in read(reader, self.session, self.next):
            self.calls.apply(n, facts)
            self.next = n + 1

    def refresh(self) -> None:
        """Learn what others have written: answers, and verdicts on what was in doubt."""
        with self._group.lock, self._backend.reader() as reader:
            self.catch_up(reader)
        self._group.wake()

    def note(self, facts: dict[str, Any], entry: bytes | None = None) -> None:
        """Durable when this returns. `entry` is the same encoded, where that is known."""
        self._group.join((facts, _whole(facts) if entry is None else entry))

    def begin(
        self, kind: Kind, where: Where, name: str, digest: str, arguments: Any, encoded: bytes
    ) -> Call:
        """Note that a call is made. Its arguments are encoded already."""
        facts = started(kind, where, name, digest, arguments)
        self.note(facts, _ending_with(facts, "arguments", encoded))
        return self.calls.all[where]

    def end(self, call: Call, result: Any) -> Any:
        """Note what a call has returned; gives it as it would be read again, and nobody else's."""
        as_kept = encoded(result, "result")
        facts = ended(call.number, "done", now_us(), result=values.decode(as_kept))
        self.note(facts, _ending_with(facts, "result", as_kept))
        return values.decode(as_kept)

    def _write_one(self, note: _Note) -> None:
        self._put([note])

    def _write(self, members: list[Member[_Note]]) -> None:
        try:
            self._put([member.change for member in members])
        except HoldfastError as e:
            for member in members:
                member.finish(e)
        else:
            for member in members:
                member.finish()

    def _put(self, notes: list[_Note]) -> None:
        while True:
            first = self.next
            rows = [
                records.seal_entry(self.session, n, encoded)
                for n, (_, encoded) in enumerate(notes, first)
            ]
            try:
                self._backend.jot(Jot(self.session, self._token, first, rows))
            except Moved:
                self._look_again()
            else:
                for n, (facts, _) in enumerate(notes, first):
                    self.calls.apply(n, facts)
                self.next = first + len(notes)
                return

    def _look_again(self) -> None:
        """Somebody else has written: to answer something, or because the lease is his by now."""
        with self._backend.reader() as reader:
            lease = reader.lease(self.session)
            if self._token is not None and (lease is None or lease.token != self._token):
                raise Fenced("this run was taken over by another worker")
            if reader.head(self.session) is None:
                raise SessionNotFound("the session is not there any more")
            self.catch_up(reader)


def all_calls(entries: Iterable[Entry]) -> Calls:
    calls = Calls()
    for n, facts in entries:
        calls.apply(n, facts)
    return calls
