"""Mutants of runs, their journal and their leases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast import HoldfastError
from holdfast.aio.run import AsyncRun
from holdfast.history.journal import Call, Journal
from holdfast.history.writer import Writer
from holdfast.model import Usage
from holdfast.runs import pending
from holdfast.runs.run_core import RunCore, Write
from holdfast.runs.streams import StreamReader
from holdfast.storage.files.backend import FilesBackend
from holdfast.storage.sqlite.backend import SqliteBackend
from tests.mutants import Mutant, entry, mutant, nothing

Entries = list[tuple[dict[str, Any], bytes]]

# -- resuming ------------------------------------------------------------------------------------


@mutant(".history.journal:Journal.catch_up")
def calls_what_is_in_doubt(real: Any) -> Any:
    """A call with a first entry and no second one is in doubt."""

    def read(self: Journal, *args: Any) -> None:
        real(self, *args)
        for call in self.calls.open():
            del self.calls.all[call.id]

    return read


@mutant(".runs.resume:Opened.state_at")
def goes_on_from_the_head(real: Any) -> Any:
    """A turn that starts again has its state from before the turn."""
    return lambda self, _: self.target.session.load()


leaves_a_run_open = entry(
    "leaves_a_run_open", "What moves the head ends the run that was there.",
    ".history.leases:closed", nothing,
)  # fmt: skip


@mutant(".history.journal:idempotency_key")
def keys_calls_by_their_place(real: Any) -> Any:
    """Each run has its own idempotency keys."""
    return lambda _, turn, of: real("", turn, of)


@mutant(".runs.run_core:RunCore.open")
def goes_on_at_the_head(real: Any) -> Any:
    """The saves of a turn that was interrupted stay on a branch."""

    def open_(self: RunCore) -> None:
        real(self)
        self._parent_seq = None

    return open_


@mutant(".runs.run_core:RunCore._end")
def takes_at_once_what_is_due(real: Any) -> Any:
    """A checkpoint after a call is taken when the call has returned."""

    def end(self: RunCore, call: Any) -> None:
        real(self, call)
        self._take_owed()

    return end


@mutant(".runs.resume:_attempts")
def looks_at_no_earlier_attempt(real: Any) -> Any:
    """A worker takes no checkpoint that an earlier one has taken."""
    return lambda *_: ({}, None)


# -- usage ---------------------------------------------------------------------------------------

counts_every_attempt = entry(
    "counts_every_attempt", "The usage of a turn that starts again counts once.",
    ".history.token_usage:most", Usage.__add__,
)  # fmt: skip


@mutant(".history.token_usage:_journaled")
def counts_checkpoints_alone(real: Any) -> Any:
    """Usage counts though its worker is gone before the next checkpoint."""
    return lambda *_: {}


# -- leases --------------------------------------------------------------------------------------


@mutant(".history.journal:Journal.__init__")
def compares_no_tokens(real: Any) -> Any:
    """A worker that has lost its lease cannot write entries."""
    return lambda self, backend, number, _: real(self, backend, number, None)


@mutant(".history.writer:Writer._catch_up")
def ignores_a_takeover(real: Any) -> Any:
    """A worker that has lost its lease cannot save."""

    def catch_up(self: Writer) -> None:
        with self.repository.reader() as reader:
            self.read_head(reader)
        self.lease = self.head.lease

    return catch_up


leases_hold_nobody_off = entry(
    "leases_hold_nobody_off", "One worker at a time runs a session.",
    ".history.leases:holder", nothing,
)  # fmt: skip

# -- answers -------------------------------------------------------------------------------------


@mutant(".history.journal:Journal.offer")
def answers_blindly(real: Any) -> Any:
    """A question is answered once."""
    return lambda self, facts, _: self.append(facts)


def _end(self: Call, facts: dict[str, Any]) -> None:
    self.status, self.ended_us = facts["what"], facts["at"]
    self.result = facts.get("result")


last_answer_stands = Mutant(
    "last_answer_stands",
    "An answer cannot be changed after a run has read it.",
    {
        **answers_blindly.changes,
        ".history.journal:Call.end": lambda _: _end,
        ".runs.pending:_check_open": lambda _: nothing,
    },
)


@mutant(".runs.pending:_find")
def decides_by_key(real: Any) -> Any:
    """A decision is for one attempt, not for the newest one of its key."""

    def found(journal: Journal, kind: Any, wanted: Any, otherwise: str) -> Call:
        call: Call = real(journal, kind, pending._key(wanted), otherwise)
        return call

    return found


def _begin_without_digest(real: Any) -> Any:
    def begin(self: Journal, kind: Any, where: Any, name: str, digest: str, *more: Any) -> Call:
        call: Call = real(self, kind, where, name, "" if kind == "wait" else digest, *more)
        return call

    return begin


answers_all_of_a_name = Mutant(
    "answers_all_of_a_name",
    "Questions of one name are counted, and their prompts are compared.",
    {
        ".history.journal:Journal.begin": _begin_without_digest,
        ".runs.run_core:RunCore._question": lambda _: lambda self, name: f"wait:{name}",
    },
)

denied_calls_are_made = entry(
    "denied_calls_are_made", "A call that a person has denied is not made.",
    ".runs.run_core:RunCore._deny", nothing,
)  # fmt: skip


@mutant(".runs.run_core:RunCore.approve")
def every_answer_approves(real: Any) -> Any:
    """Only the answer True approves a call."""
    return lambda self, call, _: bool(self.wait(call["id"], None))


halts_are_ready = entry(
    "halts_are_ready", "A run that waits for nothing that was decided is not ready.",
    ".runs.abandoned:halt_reason", lambda _: "enough for today",
)  # fmt: skip

# -- streams -------------------------------------------------------------------------------------


@mutant(".runs.streams:StreamReader._restart")
def mixes_attempts(real: Any) -> Any:
    """A reader is told that another attempt has begun."""

    def restart(self: StreamReader, n: int, call: int) -> None:
        self._shown = 0
        real(self, n, call)

    return restart


@mutant(".runs.streams:StreamReader._apply")
def ends_with_the_stream(real: Any) -> Any:
    """A reader comes to the end when the step has returned, and not before."""

    def apply(self: StreamReader, n: int, facts: dict[str, Any]) -> None:
        real(self, n, facts)
        self._outcome = "done" if self._closed else self._outcome

    return apply


@mutant(".history.journal:stream_chunks")
def chunks_are_of_any_attempt(real: Any) -> Any:
    """Chunks belong to the attempt that has written them."""
    return lambda _, chunks, *, closed: real(2, chunks, closed=closed)


@mutant(".runs.streams:StreamBuffer.flush")
def flushes_nothing(real: Any) -> Any:
    """What was flushed is durable."""
    return lambda self, *, close=False: real(self, close=close) if close else None


# -- what is written, and when -------------------------------------------------------------------


@contextmanager
def unsynced(backend: Any) -> Iterator[None]:
    """Write without syncs inside the block."""
    if isinstance(backend, SqliteBackend):
        _set_synchronous(backend, "NORMAL")
        try:
            yield
        finally:
            _set_synchronous(backend, "FULL")
    else:
        assert isinstance(backend, FilesBackend)
        backend._home.durable = False
        try:
            yield
        finally:
            backend._home.durable = True


def _set_synchronous(backend: SqliteBackend, to: str) -> None:
    """Wait until no other thread uses the connection: leases are renewed at any moment."""
    with backend._alone():
        backend._writing().execute(f"PRAGMA synchronous={to}")


@mutant(".history.journal:Journal._put")
def syncs_no_entries(real: Any) -> Any:
    """Entries of the journal are synced."""

    def hastily(self: Journal, entries: Entries) -> None:
        with unsynced(self._backend):
            real(self, entries)

    return hastily


@mutant(".history.journal:Journal._put")
def syncs_no_ends(real: Any) -> Any:
    """The entry with a result is synced before the result is returned."""

    def hastily(self: Journal, entries: Entries) -> None:
        if entries[0][0]["what"] == "started":
            real(self, entries)
        else:
            with unsynced(self._backend):
                real(self, entries)

    return hastily


@mutant(".history.journal:Journal._put")
def notes_beginnings_late(real: Any) -> Any:
    """That a call begins is written before it is called."""
    held: Entries = []

    def late(self: Journal, entries: Entries) -> None:
        if entries[0][0]["what"] == "started" and entries[0][0]["kind"] != "wait":
            for n, (facts, _) in enumerate(entries, self.next + len(held)):
                self.calls.apply(n, facts)
            held.extend(entries)
        else:
            real(self, [*held, *entries])
            held.clear()

    return late


@mutant(".history.journal:Journal._put")
def notes_no_ends(real: Any) -> Any:
    """The entry with a result is written."""

    def forgetful(self: Journal, entries: Entries) -> None:
        if entries[0][0]["what"] == "done":
            self.calls.apply(0, entries[0][0])
        else:
            real(self, entries)

    return forgetful


@mutant(".history.journal:Journal._put")
def notes_ends_later(real: Any) -> Any:
    """The entry with a result is written before the result is returned."""
    held: Entries = []

    def lazy(self: Journal, entries: Entries) -> None:
        held.extend(entries)
        if entries[0][0]["what"] == "done":
            self.calls.apply(0, entries[0][0])
        else:
            real(self, held)
            held.clear()

    return lazy


@mutant(".aio.run:AsyncRun._answer")
def awaits_no_ends(real: Any) -> Any:
    """The entry with a result is awaited before the result is returned."""
    written = set()

    async def hasty(self: AsyncRun, request: Any) -> Any:
        if isinstance(request, Write) and request.fn == self._core.succeed:
            written.add(asyncio.ensure_future(real(self, request)))
            return request.args[1]
        return await real(self, request)

    return hasty


@mutant(".history.journal:Journal._put")
def takes_failures_for_success(real: Any) -> Any:
    """An entry that could not be written is an error."""

    def blindly(self: Journal, entries: Entries) -> None:
        try:
            real(self, entries)
        except HoldfastError:
            for n, (facts, _) in enumerate(entries, self.next):
                self.calls.apply(n, facts)

    return blindly
