"""What sessions and stores can do with runs."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import leases, lineage
from holdfast.codec import records, values
from holdfast.errors import UNREADABLE, Conflict, InvalidRequest, NotFound, NotSerializable
from holdfast.leases import Held
from holdfast.lineage import Place
from holdfast.logs import logger
from holdfast.runs import pending as pendings
from holdfast.runs.conversation import Conversation, estimate
from holdfast.runs.opening import interrupted
from holdfast.runs.pending import NOTHING
from holdfast.runs.sync import Run
from holdfast.runs.usage import Totals, totals
from holdfast.writing import Tip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.backends.base import Reader
    from holdfast.checkpoint import Checkpoint
    from holdfast.errors import HoldfastError
    from holdfast.fields import Fields
    from holdfast.model import RunMark
    from holdfast.runs.pending import MadeCall, Pending
    from holdfast.runs.policy import Policy
    from holdfast.store import Store

_PAGE = 500
NOT_RESUMED = (Conflict, InvalidRequest, NotFound, *UNREADABLE)
"""Why a run that was abandoned is left to others: it is theirs by now, or damaged."""


class Running:
    """The part of a Session that is about runs."""

    name: str
    store: Store

    def run(
        self,
        *,
        policy: Policy | None = None,
        name: str | None = None,
        state: Any = None,
        takeover: bool = False,
        resume: bool | None = None,
        sigterm: bool = False,
    ) -> Run:
        """Run the session: `with session.run() as run`. A run that was interrupted is resumed.

        `state` is what a session that has none yet starts with. `resume=True` resumes or raises;
        given a `name`, it resumes none but the run of that name. `resume=False` begins a new run
        in any case. `takeover` takes the session even from a worker that seems to be alive.
        `sigterm` halts the run on SIGTERM, in the main thread.
        """
        return Run(
            self, policy=policy, name=name, state=state, takeover=takeover, resume=resume,
            sigterm=sigterm,
        )  # fmt: skip

    def lease_event(self, event: str) -> None:
        """Told when a run takes, loses or gives back the session, or does not get it."""
        logger.debug("session %r: its lease was %s", self.name, event)

    def save_of_run(
        self: Any, state: Any, mark: RunMark, parent: int | None, fields: Fields
    ) -> Checkpoint:
        """What a run saves: as a child of another checkpoint than the head, if that is given."""
        try:
            label, tags, extra = self._fields(fields)
            extra["run"] = [*mark]
            tip = None
            with self._lock:
                if parent is not None:
                    with self.store.backend.reader() as reader:
                        tip = Tip.read(reader, Place(self._writer.number, parent))
                saved: Checkpoint = self._save(state, tip, label, tags, extra)
                return saved
        except NotSerializable:
            values.check(state, "state")  # raises again, with the whole path
            values.check(fields, "fields")
            raise

    def pending(self) -> list[Pending]:
        """Calls that have no end, and what runs wait for."""
        with self.store.backend.reader() as reader:
            return pendings.of_session(reader, self._number(reader), self.name)

    def calls(self) -> list[MadeCall]:
        """All that this session's runs have called or waited for, in the order of first times."""
        with self.store.backend.reader() as reader:
            return [*pendings.made(reader, self._number(reader), self.name)]

    def tool_calls(self) -> list[MadeCall]:
        """Of these, the calls of tools."""
        return [call for call in self.calls() if call.kind == "tool"]

    def resolve(
        self, key: str, *, result: Any = NOTHING, rerun: bool = False, skip: bool = False
    ) -> None:
        """Say what became of a call in doubt: its result, or that it is to be made or left out."""
        how = pendings.Verdict(result, rerun=rerun, skip=skip)
        with self.store.backend.reader() as reader:
            number = self._number(reader)
        pendings.resolve(self.store.backend, number, self.name, key, how)

    def answer(self, name: str, value: Any) -> None:
        """Answer what a run waits for; resumed, it goes on with that."""
        with self.store.backend.reader() as reader:
            number = self._number(reader)
        pendings.answer(self.store.backend, number, self.name, name, value)

    def usage(self) -> Totals:
        """What the session has cost: it alone, what it inherited, and the sessions below it."""
        with self.store.backend.reader() as reader:
            return totals(reader, self._number(reader), self.name)

    def conversation(
        self,
        *,
        system: str | None = None,
        budget: float | None = None,
        count: Callable[[dict[str, Any]], float] = estimate,
        key: str = "messages",
    ) -> Conversation:
        """The conversation in the session's state, or a new one; see Conversation."""
        return Conversation(self, system=system, budget=budget, count=count, key=key)  # type: ignore[arg-type]

    def _number(self, reader: Reader) -> int:
        return lineage.find_session(reader, self.name)


class Abandoned(NamedTuple):
    """A session whose run was interrupted, and has not been taken up again."""

    session: str
    run: str
    name: str | None
    host: str
    pid: int
    attempt: int
    halted: bool
    """It was left on purpose: by halt(), by a failure, or to wait for an answer."""


def abandoned(reader: Reader, *, halted: bool) -> Iterator[Abandoned]:
    after = 0
    while page := reader.leases(after, _PAGE):
        for lease in page:
            try:
                held = Held.read(lease)
                found = reader.session_by_number(lease.session)
                if not held.open or found is None or leases.is_alive(lease, held):
                    continue
                if records.former_name(lease.session, found[0]) is not None:
                    continue
                if (lease.token or halted) and _can_be_resumed(reader, lease.session):
                    yield Abandoned(
                        records.decode_name(found[0]), held.run, held.name, held.owner.host,
                        held.owner.pid, held.attempt, not lease.token,
                    )  # fmt: skip
            except UNREADABLE as e:
                logger.warning("a lease cannot be read: %s", e.message)
        after = page[-1].session


def _can_be_resumed(reader: Reader, session: int) -> bool:
    """Whether the head is still where the run has left it."""
    _, head = lineage.read_head(reader, session)
    tip = lineage.read_row(reader, Place(session, head.seq))
    return interrupted(reader, session, head, tip) is not None


def all_pending(reader: Reader) -> Iterator[tuple[str, list[Pending] | HoldfastError]]:
    """What each session that was ever run has left open, or why that cannot be told."""
    after = 0
    while page := reader.leases(after, _PAGE):
        for lease in page:
            found = reader.session_by_number(lease.session)
            if found is None or records.former_name(lease.session, found[0]) is not None:
                continue
            name = records.decode_name(found[0])
            try:
                yield name, pendings.of_session(reader, lease.session, name)
            except UNREADABLE as e:
                yield name, e
        after = page[-1].session


class Overseeing:
    """The part of a Store that is about runs."""

    def pending(self: Any) -> list[Pending]:
        """Of all sessions: calls that have no end, and what runs wait for.

        A session whose journal is damaged is logged, and does not hide the others.
        """
        out: list[Pending] = []
        with self.backend.reader() as reader:
            for name, found in all_pending(reader):
                if isinstance(found, list):
                    out += found
                else:
                    logger.warning("what session %r waits for is unknown: %s", name, found.message)
        return out

    def abandoned(self: Any, *, halted: bool = False) -> list[Abandoned]:
        """Sessions whose run died; with `halted` also those whose run was left on purpose."""
        with self.backend.reader() as reader:
            return [*abandoned(reader, halted=halted)]

    def resume_all(self: Any, fn: Callable[[Run], Any], **options: Any) -> list[str]:
        """Resume each abandoned run by `fn(run)`; returns the names of their sessions.

        One that another worker has taken meanwhile is his. An error in one is logged, noted as
        that run's failure, and does not keep the others from being resumed; nor does damage.
        """
        if inspect.iscoroutinefunction(fn):
            raise InvalidRequest(
                "resume_all() does not await", hint="aopen() gives a store whose resume_all() does"
            )
        done = []
        for each in self.abandoned():
            run = self.session(each.session).run(resume=True, **options)
            stack = ExitStack()
            try:
                stack.enter_context(run)
            except NOT_RESUMED as e:
                logger.warning("session %r is not resumed here: %s", each.session, e.message)
                continue
            try:
                with stack:
                    fn(run)
            except Exception:  # noqa: BLE001 - the others are to be resumed all the same
                logger.exception("resuming session %r failed", each.session)
            done.append(each.session)
        return done
