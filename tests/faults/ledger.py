"""What a writer announced and what was acknowledged to it, line by line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


def digest(state: Any) -> str:
    """A fingerprint of plain data that tells types and the order of keys apart."""
    return hashlib.sha256(repr(state).encode("utf-8", "surrogatepass")).hexdigest()


@dataclass
class Ledger:
    """The promises at one moment of a writer's life.

    A writer announces each operation (`begin`, with the digest of the state that the session's head
    will have) before it starts, and then reports `ack` with the head's id, or `error`. From that
    follows what may be found later: every acknowledged checkpoint, exactly; and as head of a
    session what was acknowledged last, or what was attempted since. What an operation deletes is
    announced with it: that may be there or not, until the acknowledgement says what is gone. A
    writer that goes on where another was stopped reports as `found` what it starts from, which
    settles that question.
    """

    saved: dict[str, tuple[str, str]] = field(default_factory=dict)  # id -> session, digest
    doomed: dict[str, tuple[str, str]] = field(default_factory=dict)  # may be there, or not
    gone: dict[str, tuple[str, str]] = field(default_factory=dict)  # must not be there
    heads: dict[str, set[str]] = field(default_factory=dict)  # session -> digests its head may have
    may_be_missing: set[str] = field(
        default_factory=set
    )  # sessions of which nothing was acknowledged
    acknowledged: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(
        default_factory=list
    )  # what the writer itself saw and should not have seen
    _open: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    _going: dict[int, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Iterable[bytes]) -> Ledger:
        ledger = cls()
        for line in lines:
            ledger.add(line)
        return ledger

    def add(self, line: bytes) -> None:
        entry = json.loads(line)
        if entry["is"] == "begin":
            session, state = entry["session"], entry["digest"]
            self._open[entry["n"]] = (session, state)
            if not self.heads.get(session) or state is None:
                self.may_be_missing.add(session)
            self.heads.setdefault(session, set())
            if state is not None:
                self.heads[session].add(state)
            self._condemn(entry["n"], session, entry["deletes"])
        elif entry["is"] == "ack":
            session, state = self._open[entry["n"]]
            self.acknowledged += 1
            for id_ in self._going.pop(entry["n"], ()):
                deleted = state is None or id_ in entry["deleted"]
                (self.gone if deleted else self.saved)[id_] = self.doomed.pop(id_)
            if state is None:  # the session itself
                self.heads[session] = set()
                return
            if entry["id"] is not None:
                self.saved[entry["id"]] = (session, state)
            self.heads[session] = {state}
            self.may_be_missing.discard(session)
        elif entry["is"] == "found":
            session, state = entry["session"], entry["digest"]
            if state not in self.heads.get(session, set()):
                self.wrong.append(f"the head of {session!r} was neither acknowledged nor attempted")
            self.heads[session] = {state}
            self.may_be_missing.discard(session)
        elif entry["is"] == "error":
            self.errors.append(entry["what"])
        elif entry["is"] == "wrong":
            self.wrong.append(entry["what"])

    def _condemn(self, n: int, session: str, ids: Sequence[str]) -> None:
        if self._open[n][1] is None:
            ids = [id_ for id_, (name, _) in self.saved.items() if name == session]
        self._going[n] = [id_ for id_ in ids if id_ in self.saved]
        for id_ in self._going[n]:
            self.doomed[id_] = self.saved.pop(id_)


def begin_line(n: int, session: str, state: str | None, deletes: Sequence[str] = ()) -> bytes:
    """`deletes` are those that may go; `state` is None when the whole session is to go."""
    entry = {"is": "begin", "n": n, "session": session, "digest": state, "deletes": [*deletes]}
    return _line(entry)


def ack_line(n: int, checkpoint_id: str | None, deleted: Sequence[str] = ()) -> bytes:
    return _line({"is": "ack", "n": n, "id": checkpoint_id, "deleted": [*deleted]})


def found_line(session: str, state: str) -> bytes:
    return _line({"is": "found", "session": session, "digest": state})


def error_line(n: int, what: str) -> bytes:
    return _line({"is": "error", "n": n, "what": what})


def wrong_line(n: int, what: str) -> bytes:
    return _line({"is": "wrong", "n": n, "what": what})


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def complete_lines(data: bytes) -> list[bytes]:
    """The lines of `data` that were written whole; a killed writer may leave a torn one."""
    return data.split(b"\n")[:-1]
