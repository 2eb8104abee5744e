"""A store: where sessions live."""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from holdfast import archive, lineage
from holdfast.backends.opening import open_backend
from holdfast.cache import Images
from holdfast.checkpoint import Checkpoint, SessionInfo
from holdfast.codec import records
from holdfast.collect import Collected, collect
from holdfast.errors import UNREADABLE, Corrupt, InvalidRequest, SessionBusy, SessionNotFound
from holdfast.finding import Query, find
from holdfast.logs import logger
from holdfast.operations import Operator
from holdfast.repair import Repaired, repair
from holdfast.retention import Plan, Retention, within_store
from holdfast.retention import check as check_rule
from holdfast.revisions import find_in_store
from holdfast.runs.handles import Overseeing
from holdfast.session import Session
from holdfast.stats import Stats, stats
from holdfast.tidying import Tidier
from holdfast.transfer import Transferred, transfer
from holdfast.verify import Report, verify
from holdfast.watching import Watcher
from holdfast.writing import Writer

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import TracebackType

    from holdfast.backends.base import Backend, Reader
    from holdfast.collect import Progress
    from holdfast.model import Operation, Status


_PAGE = 200
_BLOCKS = {"session": 16, "stream": 256}


def open(
    url: str | os.PathLike[str],
    *,
    create: bool | None = None,
    read_only: bool = False,
    durability: Literal["full", "normal"] = "full",
    cache_bytes: int = 64 << 20,
    timeout: float = 30.0,
    retention: Retention | None = None,
    schema: str | None = None,
    pool_size: int | None = None,
) -> Store:
    """Open a store: a path (SQLite), "files:folder", "postgresql://…" or "memory:".

    `create=False` refuses to make a missing one. With durability="full" a checkpoint is on the disk
    when save() returns; "normal" survives a crash of the process, but a power loss may take the
    newest checkpoints. `timeout` bounds the wait for another process's commit, in seconds. With
    `retention` sessions are pruned as they are saved to, and a thread frees what that leaves.
    PostgreSQL alone knows `schema` ("holdfast") and `pool_size` (8 connections), and wants
    create=True to make a store.
    """
    if not isinstance(url, str | os.PathLike):
        raise InvalidRequest(f"not a store's address: {url!r}", hint='such as "agent.db"')
    _check_cache(cache_bytes)
    _check_own(retention)
    backend = open_backend(
        url, create=create, read_only=read_only, durability=durability, timeout=timeout,
        schema=schema, pool_size=pool_size,
    )  # fmt: skip
    return Store(backend, cache_bytes=cache_bytes, retention=retention)


def _check_cache(size: Any) -> None:
    """Later is too late: images are kept when a checkpoint is durable already."""
    if not isinstance(size, int) or size < 0:
        raise InvalidRequest(
            f"cache_bytes must be a number of bytes, not {size!r}", hint="0 keeps nothing in memory"
        )


def _check_own(rule: Retention | None) -> None:
    """By itself a store looks at one session at a time."""
    if rule is None:
        return
    check_rule(rule)
    if rule.store_bytes is not None:
        raise InvalidRequest("store_bytes is a rule for store.prune()", hint="max_bytes=…")


class Store(Overseeing):
    """Sessions over a backend. A context manager; safe for threads, and after os.fork()."""

    def __init__(
        self,
        backend: Backend,
        *,
        cache_bytes: int = 64 << 20,
        retention: Retention | None = None,
    ) -> None:
        _check_cache(cache_bytes)
        self.backend = backend
        self.tidier: Tidier | None = None
        self.retention = retention
        self.session_type = Session
        self.images = Images(cache_bytes)
        self._lock = threading.Lock()
        self._numbers: dict[str, tuple[int, int]] = {}
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        _stores.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.backend.name} {getattr(self.backend, 'path', '')}>"

    def close(self) -> None:
        """Idempotent. Handles of a closed store raise InvalidRequest."""
        if self.tidier is not None:
            self.tidier.wait()
        self.backend.close()

    @property
    def retention(self) -> Retention | None:
        """The rule by which sessions are pruned as they are saved to."""
        return None if self.tidier is None else self.tidier.rule

    @retention.setter
    def retention(self, rule: Retention | None) -> None:
        _check_own(rule)
        if self.tidier is not None:
            self.tidier.wait()
        self.tidier = None if rule is None else Tidier(self, rule)

    def session(
        self, name: str, *, agent: str | None = None, parent: str | Session | None = None
    ) -> Session:
        """A handle on the session of this name. Nothing is written until the first save.

        What a session costs counts for its `parent`, too: the one that it works for.
        """
        above = parent.name if isinstance(parent, Session) else parent
        return self.session_type(self, name, agent, parent=above)

    def keep(self, session: Session) -> None:
        """Remember a handle, for as long as it lives."""
        self._sessions.add(session)

    def get(self, id: str) -> Checkpoint:
        """A checkpoint of any session, by its id or an unambiguous prefix."""
        with self.backend.reader() as reader:
            place = find_in_store(reader, id)
            return lineage.dress(reader, place, lineage.read_row(reader, place).record)

    def sessions(
        self,
        *,
        agent: str | None = None,
        status: Status | None = None,
        trigger: str | None = None,
        tag: str | None = None,
        label: str | None = None,
        meta: Mapping[str, Any] | None = None,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        after: str | None = None,
    ) -> Iterator[SessionInfo]:
        """Sessions by name, with their heads. A damaged one is listed and says so.

        `agent` is the session's; the other filters are held against its head. What of them cannot
        be read counts as a match. `after` goes on behind the session of that name.
        """
        Query(agent).check()
        query = Query(None, status, trigger, tag, label, meta, since, until)
        query.check()
        if after is not None and not isinstance(after, str):
            raise InvalidRequest(f"after must be the name of a session, not {after!r}")
        at = None if after is None else records.encode_name(after)
        while True:
            with self.backend.reader() as reader:
                rows = reader.sessions(at, _PAGE)
                page = [self._info(reader, *row) for row in rows]
            if not rows:
                return
            for info in page:
                if info is not None and _may_match(info, agent, query):
                    yield info
            at = rows[-1][1]

    def find(
        self,
        *,
        agent: str | None = None,
        status: Status | None = None,
        trigger: str | None = None,
        tag: str | None = None,
        label: str | None = None,
        meta: Mapping[str, Any] | None = None,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        text: str | None = None,
        before: str | Checkpoint | None = None,
        limit: int | None = None,
    ) -> Iterator[Checkpoint]:
        """Checkpoints of all sessions that match all that is given, the newest first.

        With `agent` and nothing else to go by: session by session. `text` is looked for in every
        string of a state. `before` goes on behind that checkpoint, or the one of that id.
        """
        query = Query(agent, status, trigger, tag, label, meta, since, until, text)
        id = before.id if isinstance(before, Checkpoint) else before
        return find(self.backend, query, id, limit)

    @staticmethod
    def _info(reader: Reader, number: int, raw: bytes, body: bytes) -> SessionInfo | None:
        """A line of the list; None for a session that is deleted."""
        if records.former_name(number, raw) is not None:
            return None
        name, agent, head, count = records.shown_name(raw), None, None, 0
        damage: list[str] = []
        with _noted(damage):
            name = records.decode_name(raw)
            agent = records.unseal_session(number, raw, body).agent
        with _noted(damage):
            count = lineage.count(reader, number)
        with _noted(damage):
            _, at = lineage.read_head(reader, number)
            place = lineage.Place(number, at.seq)
            if at.seq:
                head = lineage.dress(reader, place, lineage.read_row(reader, place).record)
        return SessionInfo(name, agent, head, count, damage[0] if damage else None)

    def verify(self, *, read_data: bool = True, sessions: Iterable[str] | None = None) -> Report:
        """Check records, hashes and indexes; with `read_data` also every stored byte of data."""
        return verify(self.backend, read_data=read_data, sessions=sessions)

    def watch(
        self, *, interval: float = 0.1, patience: float | None = None
    ) -> Iterator[Checkpoint | Operation]:
        """session.watch() for all sessions, those to come included."""
        return Watcher(self.backend).follow(interval, patience)

    def gc(self, progress: Progress | None = None) -> Collected:
        """Free what was deleted, and give the space back. Safe beside saves of other processes.

        `progress` is called with a phase ("checkpoints", "reading", "data", "space"), how much of
        it is done, and of how much.
        """
        return collect(self.backend, progress)

    def prune(self, rule: Retention, *, dry_run: bool = False) -> list[Plan]:
        """session.prune() for every session, with the rules that are about all of them.

        A session that is damaged so much that no rule can be applied is kept, and so is one that
        should go as a whole while it is run; this is logged, and they are not among the plans.
        """
        check_rule(rule)
        operators: list[Operator] = []
        plans: list[Plan] = []
        for info in self.sessions():
            with _leaving_alone(info.name):
                operator = Operator(Writer(self, info.name))
                plans.append(operator.prune(rule, dry_run=True))
                operators.append(operator)
        if rule.store_bytes is not None:
            plans = within_store(plans, rule.store_bytes)
        if dry_run:
            return plans
        done: list[Plan] = []
        for operator, plan in zip(operators, plans, strict=True):
            with _leaving_alone(plan.session):
                if plan.whole is not None or plan.removed:
                    operator.carry_out(plan, rule)
                done.append(plan)
        return done

    def repair(self) -> list[Repaired]:
        """Move heads off damaged checkpoints, rebuild indexes, and tell what is lost.

        A head that moves is an operation, which undo() takes back. Checkpoints whose records are
        missing are told of once: from then on they count as freed.
        """
        return repair(self.backend)

    def stats(self, *, largest: int = 10) -> Stats:
        """Sessions, checkpoints, bytes by kind, and the largest sessions."""
        return stats(self.backend, largest)

    def backup(self, path: str | os.PathLike[str]) -> Report:
        """A copy of the store as of one moment, verified, while others go on writing.

        The report tells of damage that the store itself has: the copy has it too. Raises Corrupt,
        and leaves no copy, if there is any other.
        """
        target = Path(os.fspath(path))
        self.backend.backup(target)
        kind = "files:" if self.backend.name == "files" else ""
        try:
            with open(f"{kind}{target}", read_only=True) as copy:
                report = copy.verify(read_data=True)
            if not report.ok:
                known = self.verify(read_data=True).problems
                for problem in report.problems:
                    if problem not in known:
                        raise Corrupt(f"the backup does not verify: {problem}", hint="try again")
        except BaseException:
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
            raise
        finally:  # what reading it has left beside it, where nothing was
            for suffix in ("-wal", "-shm"):
                Path(f"{target}{suffix}").unlink(missing_ok=True)
        return report

    def copy(
        self,
        other: Store,
        *,
        sessions: Iterable[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Transferred:
        """Copy sessions to another store, with those that they were forked from.

        Ids, hashes, labels, operations and what is deleted stay as they are; what sessions share
        stays shared. Again it copies what is new, and goes on where it was interrupted. A session
        that is damaged, or differs in the other store, is left alone: the result tells of it.
        `progress` is told how many sessions are done, and of how many.
        """
        return transfer(self.backend, other, sessions, progress)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        sessions: Iterable[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Transferred:
        """copy() to a portable file, or to a folder of readable JSON.

        A name that ends in .jsonl makes a file, one in .jsonl.zst a compressed one, any other a
        folder, which is a store as well: open it with "files:…".
        """
        return archive.export(self, Path(os.fspath(path)), sessions, progress, Store)

    def import_(
        self,
        path: str | os.PathLike[str],
        *,
        sessions: Iterable[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Transferred:
        """copy() from what export() has made. What is damaged there is skipped, and told of."""
        return archive.import_(self, Path(os.fspath(path)), sessions, progress, Store)

    def new_session(self) -> int:
        return self._number("session")

    def new_stream(self) -> int:
        return self._number("stream")

    def _number(self, space: Literal["session", "stream"]) -> int:
        """The next of a block of numbers reserved for this process."""
        with self._lock:
            first, left = self._numbers.get(space, (0, 0))
            if not left:
                left = _BLOCKS[space]
                first = self.backend.reserve(space, left)
            self._numbers[space] = (first + 1, left - 1)
            return first


def _may_match(info: SessionInfo, agent: str | None, query: Query) -> bool:
    """Whether a session is what is asked for, as far as it can be read."""
    unknown = info.damaged is not None
    if agent not in (None, info.agent) and not (unknown and info.agent is None):
        return False
    if info.head is None:
        return unknown or query == Query()
    return query.may_match(info.head)


@contextmanager
def _noted(damage: list[str]) -> Iterator[None]:
    """What cannot be read is told of, and does not hide what can."""
    try:
        yield
    except UNREADABLE as e:
        damage.append(e.message)


@contextmanager
def _leaving_alone(session: str) -> Iterator[None]:
    """What is damaged, is run, or was deleted meanwhile, is left as it is."""
    try:
        yield
    except (*UNREADABLE, SessionBusy, SessionNotFound) as e:
        logger.warning("session %r is not pruned: %s", session, e.message)


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Locks that other threads held are nobody's now, and the parent goes on with its numbers."""
    for store in list(_stores):
        store._lock = threading.Lock()
        store._numbers.clear()
        store.images.reset_lock()
        if store.tidier is not None:
            store.tidier.reset_lock()
        store.backend.reset_lock()
        for session in list(store._sessions):
            session.reset_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
