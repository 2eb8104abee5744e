"""The journal of a session: a durable log of the steps and tool calls that its runs make.

An entry is written before a call is made, and another one when it ends. After a crash, a call with
a start and no end is in doubt: only the outside world knows whether it had its effect.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holdfast.errors import Corrupt, Fenced, HoldfastError, NotSerializable, SessionNotFound
from holdfast.format import records as format_records
from holdfast.format import values
from holdfast.history import lineage
from holdfast.model import Usage
from holdfast.storage.changes import JournalAppend
from holdfast.storage.contract import StaleHead
from holdfast.storage.group_commit import Group, Member
from holdfast.storage.reader import open_reader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader


NOTE = "note"
"""The kind of the entries that hold a note; see Notes."""
WAIT = "wait:"
"""The prefix of the keys of questions, which wait for an answer."""
LOST = "lost"
"""The kind of the entries that repair writes in place of lost ones."""
STREAM, CHUNKS = "stream", "chunks"
"""The kinds of the entries that begin a stream, and that hold chunks of it."""

Kind = Literal["step", "tool", "wait"]
CallStatus = Literal["started", "done", "failed", "skipped", "rerun"]
CallId = tuple[str, int, str]
"""Run, turn and key of a call."""


@dataclass(slots=True)
class Call:
    """A step, a tool call or a question, as the journal records it."""

    number: int
    """The number of the entry that began it."""
    kind: Kind
    run: str
    turn: int
    key: str
    name: str
    digest: str
    """The digest of its arguments."""
    arguments: Any
    idempotency_key: str
    started_us: int
    attempts: int = 1
    status: CallStatus = "started"
    result: Any = None
    failure: dict[str, Any] | None = None
    """The facts of the entry that ended it with a failure."""
    ended_us: int | None = None
    usage: Usage = field(default_factory=Usage)
    """Its usage; zero until it returns or raises."""

    @property
    def id(self) -> CallId:
        return self.run, self.turn, self.key

    @property
    def error(self) -> str | None:
        """The type and the message of the error that it raised, such as "ValueError: no seat"."""
        if self.failure is None:
            return None
        kind, words = self.failure["type"], self.failure["error"]
        return f"{kind}: {words}" if words else kind

    def end(self, facts: dict[str, Any]) -> None:
        """Apply an entry that ends this call.

        Only the first end counts, except that "rerun" may follow a failure: the call is tried
        again.
        """
        what = facts["what"]
        if self.status == "failed" and what == "rerun":
            self.status = what
        elif self.status == "started":
            self.status, self.ended_us = what, facts["at"]
            self.result, self.failure = facts.get("result"), facts if what == "failed" else None
            self.usage = format_records.read_usage(facts.get("usage", ()))


def encoded(value: Any, what: str) -> bytes:
    """Return arguments or a result as encoded bytes.

    Raises NotSerializable with the path of the value inside `what`.
    """
    try:
        return values.encode_exact(value, 1)
    except NotSerializable:
        values.check(value, what)
        raise


def fresh(value: Any) -> Any:
    """Return a deep copy, which the caller may change."""
    return values.decode(values.encode_exact(value))


def idempotency_key(run: str, turn: int, key: str) -> str:
    """Return the key of a call. All attempts by all workers share it; a fork gets another one."""
    return sha256(f"{run}\0{turn}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def now_us() -> int:
    return time.time_ns() // 1000


# -- entries ---------------------------------------------------------------------------------------


def started(kind: Kind, id: CallId, name: str, digest: str, arguments: Any) -> dict[str, Any]:
    run, turn, key = id
    return {
        "what": "started", "kind": kind, "run": run, "turn": turn, "key": key, "name": name,
        "digest": digest, "idempotency_key": idempotency_key(run, turn, key), "at": now_us(),
        "arguments": arguments,
    }  # fmt: skip


def ended(call: int, status: CallStatus, at: int, **more: Any) -> dict[str, Any]:
    return {"what": status, "of": call, "at": at, **more}


def spent(usage: Usage) -> dict[str, Any]:
    """Return the usage as a fact of an entry; an empty dict if it is zero."""
    return {} if usage == Usage() else {"usage": format_records.usage_fields(usage)}


def _encode_with(facts: dict[str, Any], name: str, encoded: bytes) -> bytes:
    """Encode an entry whose last fact, `name`, is already encoded."""
    return values.encode({**facts, name: None})[:-1] + encoded  # replaces None, which is one byte


def _encode(facts: dict[str, Any]) -> bytes:
    try:
        return values.encode_exact(facts)
    except NotSerializable:
        for name, value in facts.items():
            values.check(value, name)
        raise


def stream_begun(call: int, key: str) -> dict[str, Any]:
    return {"what": STREAM, "of": call, "key": key}


def stream_chunks(stream: int, chunks: list[Any], *, closed: bool) -> dict[str, Any]:
    """Return an entry with chunks. `stream` is the number of the entry that began the stream."""
    return {"what": CHUNKS, "of": stream, "chunks": chunks, "closed": closed}


class Calls:
    """The calls that the entries of a journal describe. A repeated call is listed once."""

    def __init__(self) -> None:
        self.all: dict[CallId, Call] = {}
        self.lost: list[int] = []
        """The numbers of lost entries."""
        self._numbers: dict[int, Call] = {}
        self.streams: dict[tuple[int, str], int] = {}
        """The number of the entry that began a stream last, by number of the call and key."""

    def apply(self, n: int, facts: dict[str, Any]) -> None:
        try:
            if facts["what"] == "started":
                self._start(n, facts)
            elif facts["what"] == NOTE:
                return  # belongs to no call
            elif facts["what"] == LOST:
                self.lost.append(n)
            elif facts["what"] == STREAM:
                self.streams[facts["of"], facts["key"]] = n
            elif facts["what"] == CHUNKS:
                return  # only StreamReader reads them
            elif facts["of"] in self._numbers:  # else gc has freed the entry that began it
                self._numbers[facts["of"]].end(facts)
        except (LookupError, TypeError, AttributeError) as e:
            raise Corrupt(f"entry {n} of the journal does not make sense") from e

    def _start(self, n: int, facts: dict[str, Any]) -> None:
        id = run, turn, key = facts["run"], facts["turn"], facts["key"]
        call = Call(
            n, facts["kind"], run, turn, key, facts["name"], facts["digest"], facts["arguments"],
            facts["idempotency_key"], facts["at"],
        )  # fmt: skip
        before = self.all.get(id)
        if before is not None:
            call.attempts = before.attempts + 1
        self.all[id] = self._numbers[n] = call

    def attempts(self) -> Iterable[Call]:
        """Return every attempt at every call, in the order of the journal."""
        return self._numbers.values()

    def open(self) -> list[Call]:
        """Return the calls that have no end."""
        return [call for call in self.all.values() if call.status == "started"]


class Entry(NamedTuple):
    number: int
    facts: dict[str, Any]


class _NewEntry(NamedTuple):
    facts: dict[str, Any]
    encoded: bytes


def read(
    reader: Reader, session: int, first: int = 1, end: int = format_records.MAX_SEQ
) -> Iterator[Entry]:
    """Yield the entries [first, end). Raises Corrupt if one is damaged or missing."""
    expected: int | None = None
    for n, body in lineage.journal_rows(reader, session, first, end):
        if expected is not None and n != expected:
            raise Corrupt(f"entry {expected} of the journal is missing")
        expected = n + 1
        yield Entry(n, format_records.unseal_entry(session, n, body))


class Journal:
    """Writes a session's journal, and keeps the calls in it up to date. Safe for threads.

    Threads that write at the same time share one commit.
    """

    def __init__(self, backend: Backend, session: int, token: bytes | None) -> None:
        self._backend, self.session, self._token = backend, session, token
        self.calls = Calls()
        self.next = 1
        self._group: Group[_NewEntry] = Group(self._write, self._write_one)

    def catch_up(self, reader: Reader, first: int | None = None) -> None:
        """Read the entries that are new since the last time, or all from `first` on."""
        if first is not None:
            self.next = first
        for n, facts in read(reader, self.session, self.next):
            self.calls.apply(n, facts)
            self.next = n + 1

    def refresh(self) -> None:
        """Read the entries of other writers: answers, and decisions on calls in doubt."""
        with self._group.lock, open_reader(self._backend) as reader:
            self.catch_up(reader)
        self._group.wake()

    def append(self, facts: dict[str, Any], encoded: bytes | None = None) -> None:
        """Append an entry. It is durable when this returns.

        `encoded` is the encoded form of `facts`, if the caller has it. Raises Fenced if another
        worker took over the lease.
        """
        self._group.join(_NewEntry(facts, _encode(facts) if encoded is None else encoded))

    def begin(
        self, kind: Kind, id: CallId, name: str, digest: str, arguments: Any, encoded: bytes
    ) -> Call:
        """Append the start of a call. `encoded` is the encoded form of its arguments."""
        facts = started(kind, id, name, digest, arguments)
        self.append(facts, _encode_with(facts, "arguments", encoded))
        return self.calls.all[id]

    def end(self, call: Call, result: Any) -> Any:
        """Append the end of a call with its result.

        Returns a copy of the result that is equal to the one a resumed run will read.
        """
        stored = encoded(result, "result")
        more = spent(call.usage) | {"result": values.decode(stored)}
        facts = ended(call.number, "done", now_us(), **more)
        self.append(facts, _encode_with(facts, "result", stored))
        return values.decode(stored)

    def _write_one(self, entry: _NewEntry) -> None:
        self._put([entry])

    def _write(self, members: list[Member[_NewEntry]]) -> None:
        try:
            self._put([member.change for member in members])
        except HoldfastError as e:
            for member in members:
                member.finish(e)
        else:
            for member in members:
                member.finish()

    def offer(self, facts: dict[str, Any], token: bytes | None) -> None:
        """Append an entry only if no other entry came since the last read.

        Raises StaleHead if one did. With a token it also raises StaleHead if the lease of the
        session has another token.
        """
        self._append([_NewEntry(facts, _encode(facts))], token)

    def _put(self, entries: list[_NewEntry]) -> None:
        while True:
            try:
                self._append(entries, self._token)
            except StaleHead:
                self._read_others()
            else:
                return

    def _append(self, entries: list[_NewEntry], token: bytes | None) -> None:
        first = self.next
        rows = [
            format_records.seal_entry(self.session, n, encoded)
            for n, (_, encoded) in enumerate(entries, first)
        ]
        self._backend.commit(JournalAppend(self.session, token, first, rows).batch())
        for n, (facts, _) in enumerate(entries, first):
            self.calls.apply(n, facts)
        self.next = first + len(entries)

    def _read_others(self) -> None:
        """Read the entries of another writer, which appended first.

        Raises Fenced if it took over the lease. Raises Corrupt if there is no new entry: then the
        journal has lost some.
        """
        with open_reader(self._backend) as reader:
            lease = reader.lease(self.session)
            if self._token is not None and (lease is None or lease.token != self._token):
                raise Fenced("this run was taken over by another worker")
            if reader.head(self.session) is None:
                raise SessionNotFound("the session is not there any more")
            before = self.next
            self.catch_up(reader)
        if self.next == before:
            raise Corrupt(f"entry {before} is not the next one of the journal: some are missing")


def all_calls(entries: Iterable[Entry]) -> Calls:
    calls = Calls()
    for n, facts in entries:
        calls.apply(n, facts)
    return calls
