"""A store: opens a storage, gives out its sessions, and maintains the whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from holdfast.errors import InvalidRequest
from holdfast.history import leases, lineage
from holdfast.history.checkpoint import Checkpoint, SessionInfo
from holdfast.history.damage import Neighbours, neighbours
from holdfast.history.revisions import find_in_store, id_length
from holdfast.history.sessions import deleted, recent, sessions
from holdfast.history.watch import Watcher
from holdfast.log import logger
from holdfast.session import Session
from holdfast.storage.repository import Repository
from holdfast.storage.url import address, open_backend

# The methods below import maintenance, runs, transfer, diff and search when they need them. At the
# top, these would take a third of the time of `holdfast log`.

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Unpack

    from holdfast.errors import HoldfastError
    from holdfast.history.diff import Comparison
    from holdfast.history.filters import Filters
    from holdfast.history.search import SearchHit
    from holdfast.history.search_index import IndexResult
    from holdfast.maintenance.autoprune import AutoPruner
    from holdfast.maintenance.gc import GcProgress, GcResult
    from holdfast.maintenance.prune_undo import UndoPruneResult
    from holdfast.maintenance.repair import RepairResult
    from holdfast.maintenance.retention import Plan, Retention
    from holdfast.maintenance.stats import Stats
    from holdfast.maintenance.verify import VerifyResult
    from holdfast.model import Operation, Usage
    from holdfast.runs.abandoned import Abandoned
    from holdfast.runs.pending import Pending
    from holdfast.runs.run import Run
    from holdfast.storage.contract import Backend
    from holdfast.transfer.copy import CopyResult

CONCURRENCY = 20
"""Default of resume_all(). aopen() has more workers, so that others can work, too."""


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
    """Open a store, and create it if it does not exist.

    The address is a path (SQLite), "files:folder", "postgresql://…" or "memory:". A path that
    begins with ~ is refused. "sqlite:///agent.db" is a relative path, and "sqlite:////data/agent.db"
    an absolute one, as in SQLAlchemy.

    `create=True` also creates missing parent folders. `create=False` raises StoreNotFound if the
    store is missing. PostgreSQL creates a store only with create=True. If open() raises, it leaves
    nothing behind. `read_only=True` never creates a store, and writes to it raise Unavailable.

    With durability="full", a checkpoint is on disk when save() returns. With "normal", it survives
    a crash of the process, but a power loss may lose the newest checkpoints.

    `cache_bytes` bounds the memory for recent states. `timeout` bounds the wait for a commit of
    another process, in seconds. With `retention`, each save prunes its session by that rule, and a
    background thread frees the deleted data. `schema` (default "holdfast") and `pool_size` (default
    8 connections) are for PostgreSQL only.
    """
    if not isinstance(url, str | os.PathLike):
        raise InvalidRequest(f"not a store's address: {url!r}", hint='such as "agent.db"')
    _check_cache(cache_bytes)
    _check_retention(retention)
    backend = open_backend(
        url, create=create, read_only=read_only, durability=durability, timeout=timeout,
        schema=schema, pool_size=pool_size,
    )  # fmt: skip
    return Store(backend, cache_bytes=cache_bytes, retention=retention)


def _check_cache(size: Any) -> None:
    """Raise InvalidRequest if `size` is not a number of bytes.

    Otherwise the first save would raise, after its checkpoint became durable.
    """
    if not isinstance(size, int) or size < 0:
        raise InvalidRequest(
            f"cache_bytes must be a number of bytes, not {size!r}", hint="0 keeps nothing in memory"
        )


def _check_retention(rule: Retention | None) -> None:
    """Raise InvalidRequest for a bad rule, or one with `store_bytes`: a save prunes one session."""
    if rule is None:
        return
    from holdfast.maintenance.retention import check

    check(rule)
    if rule.store_bytes is not None:
        raise InvalidRequest("store_bytes is a rule for store.prune()", hint="max_bytes=…")


def _log_damage(session: str, error: HoldfastError) -> None:
    logger.warning("the open calls of session %r are unknown: %s", session, error.message)


class Store:
    """The sessions of one storage. Made by open(); `with` closes it at the end.

    `Store(backend)` opens a store on a backend of your own.

    A store is safe to use from many threads, and in the child after os.fork().
    """

    def __init__(
        self,
        backend: Backend,
        *,
        cache_bytes: int = 64 << 20,
        retention: Retention | None = None,
    ) -> None:
        _check_cache(cache_bytes)
        self._repository = Repository(backend, cache_bytes=cache_bytes)
        self._pruner: AutoPruner | None = None
        self.retention = retention

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        backend = self._repository.backend
        return f"<Store {backend.name} {getattr(backend, 'path', '')}>"

    def close(self) -> None:
        """Close the store. Further use of it or its sessions raises InvalidRequest. Idempotent."""
        self._repository.close()

    @property
    def kind(self) -> str:
        """The kind of storage: "sqlite", "files", "postgresql", "memory", or that of your own."""
        return self._repository.backend.name

    @property
    def address(self) -> str | None:
        """The address that opens this store from any folder, without a password.

        None for a store in memory, or on a backend of your own.
        """
        return address(self._repository.backend)

    @property
    def read_only(self) -> bool:
        """Whether the store was opened for reading only. Writes raise Unavailable then."""
        return self._repository.backend.read_only

    @property
    def retention(self) -> Retention | None:
        """The rule that prunes a session on each save, or None. It can be set at any time."""
        return None if self._pruner is None else self._pruner.rule

    @retention.setter
    def retention(self, rule: Retention | None) -> None:
        _check_retention(rule)
        others = [each for each in self._repository.observers if each is not self._pruner]
        if self._pruner is not None:
            self._pruner.close()
        self._pruner = None
        if rule is not None:
            from holdfast.maintenance.autoprune import AutoPruner

            self._pruner = AutoPruner(self._repository, rule)
            others.append(self._pruner)
        self._repository.observers = tuple(others)

    def session(
        self, name: str, *, agent: str | None = None, parent: str | Session | None = None
    ) -> Session:
        """Return a handle on the session of this name. Nothing is written before the first save.

        `agent` is stored with the session. `parent` is the session that this one works for: the
        usage of this session counts for its parent, too.
        """
        return Session(self._repository, name, agent, parent=_name(parent))

    def get(self, id: str) -> Checkpoint:
        """Return a checkpoint of any session, by its id or an unambiguous prefix of the id.

        Raises CheckpointNotFound or AmbiguousRevision if the id names none or several.
        """
        with self._repository.reader() as reader:
            place = find_in_store(reader, id)
            return lineage.to_checkpoint(reader, place, lineage.read_row(reader, place).record)

    def sessions(
        self,
        *,
        agent: str | None = None,
        after: str | None = None,
        **filters: Unpack[Filters],
    ) -> Iterator[SessionInfo]:
        """Yield the sessions with their heads, ordered by name.

        `agent` is compared with the session; the other filters of checkpoints() with its head. A
        damaged session is listed with a description of the damage, and a filter on a part that
        cannot be read counts as a match. `after` starts behind the session of that name.
        """
        from holdfast.history.filters import Query

        return sessions(self._repository, Query.of(filters, agent=agent), after)

    def recent(self, checkpoints: int = 200) -> list[SessionInfo]:
        """Return the sessions that the newest checkpoints belong to, newest first.

        `checkpoints` is how many checkpoints are looked at.
        """
        with self._repository.reader() as reader:
            return recent(reader, checkpoints)

    def deleted(self) -> Iterator[SessionInfo]:
        """Yield the sessions that are deleted and not freed yet: undo() brings them back."""
        return deleted(self._repository)

    def running(self) -> list[str]:
        """Return the names of the sessions that a process runs now."""
        with self._repository.reader() as reader:
            numbers = leases.running(reader)
            return sorted(lineage.session_name(reader, number) for number in numbers)

    def checkpoints(
        self,
        *,
        session: str | Session | None = None,
        agent: str | None = None,
        before: str | Checkpoint | None = None,
        limit: int | None = None,
        summary: bool = False,
        **filters: Unpack[Filters],
    ) -> Iterator[Checkpoint]:
        """Yield the checkpoints that match all filters, newest first.

        The filters are `session`, `agent`, `status`, `trigger`, `tag`, `label`, `meta` (a dict
        whose entries the meta must have), `since` and `until` (datetimes with a zone).

        If `agent` is given without label, tag, trigger and status, the order is session by session,
        each with its newest checkpoint first. `before` is the last checkpoint of the page before,
        or its id. `limit` bounds the number of results. With `summary`, each has a `summary`: one
        line on what it changed.
        """
        from holdfast.history.filters import Query, checkpoints
        from holdfast.history.summary import with_summaries

        query = Query.of(filters, agent=agent)
        found = checkpoints(self._repository.backend, query, before, limit, _name(session))
        return with_summaries(self._repository, found) if summary else found

    def search(
        self,
        text: str,
        *,
        session: str | Session | None = None,
        agent: str | None = None,
        case_sensitive: bool = False,
        before: str | Checkpoint | SearchHit | None = None,
        limit: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
        summary: bool = False,
        **filters: Unpack[Filters],
    ) -> Iterator[SearchHit]:
        """Yield the checkpoints in which a text came into the state, newest first.

        `text` is searched in all strings of a state, dict keys included; case does not matter,
        unless `case_sensitive` is True. A checkpoint is a hit if its state has the text where the
        state of its nearest ancestor has not. So the checkpoints after it are no hits. Bytes never
        match, also not as base64.

        `session` searches one session, on all branches. `agent` and the other filters are those of
        checkpoints(). Without `session` and `before`, up to ten sessions whose names have the text
        come first, if they match the filters as in sessions(); `limit` bounds only the other hits.
        `before` is the last hit of the page before, or the id of its checkpoint. `stopped` is
        called during the search, which ends early once it returns True. With `summary`, each
        checkpoint has a `summary`: one line on what it changed.

        Without an index, the states are read. index() makes searches fast in big stores.

        Example: `[hit.snippet for hit in store.search("Lisbon", limit=5)]`
        """
        from holdfast.history.filters import Query
        from holdfast.history.search import search

        return search(
            self._repository, text, Query.of(filters, agent=agent), case_sensitive=case_sensitive,
            before=before, limit=limit, session=_name(session), stopped=stopped, summary=summary,
        )  # fmt: skip

    def index(self, progress: Callable[[int, int], None] | None = None) -> IndexResult:
        """Build the search index, or bring it up to date. Return what was done.

        It makes search() fast, and no save waits for it. Each later search updates it for at most
        half a second, unless the store is read-only, and gc() removes from it what it frees. A
        search reads what the index does not have yet, so its hits are complete. Copies, exports and
        backups leave the index out. A damaged index, or one of another store, is replaced.

        A store in SQLite has it in the file "<store>-search", a store of plain files beside its
        folder, PostgreSQL in tables of its own. `progress` is called with the number of sessions
        done, and their total. Raises InvalidRequest for a store in memory.
        """
        from holdfast.history.search_index import build

        return build(self._repository.backend, progress)

    def drop_index(self) -> bool:
        """Remove the search index. Return whether there was one."""
        from holdfast.history.search_index import drop

        return drop(self._repository.backend)

    def usage(
        self,
        by: Literal["session", "agent", "model", "day"] = "session",
        *,
        session: str | None = None,
        agent: str | None = None,
        **filters: Unpack[Filters],
    ) -> dict[str | None, Usage]:
        """Return tokens and cost by session, agent, model or day (UTC), ordered by that.

        Each call counts once, and abandoned branches count, too. The key None is the unknown model,
        or the sessions without an agent. `since` and `until` limit the time at which the usage was
        recorded. `session` limits it to one session. The other filters choose sessions, as those of
        sessions() do.

            sum(store.usage(by="model", since=today).values(), Usage())

        All records of these sessions are read. Rows that cannot be read are left out. Raises
        SessionNotFound for an unknown `session`, and InvalidRequest for an invalid filter.
        """
        from holdfast.history.filters import Query
        from holdfast.history.usage_sums import usage_sums

        return usage_sums(self._repository, by, session, Query.of(filters, agent=agent))

    def compare(self, a: str | Checkpoint, b: str | Checkpoint) -> Comparison:
        """Return the changes from `a` to `b`, and the way to each from their common ancestor.

        Both are checkpoints of any session, or their ids. Only data that differs is read.
        """
        from holdfast.history.diff import compare

        left, right = (c if isinstance(c, Checkpoint) else self.get(c) for c in (a, b))
        return compare(self._repository, left, right)

    def neighbours(
        self, checkpoint: str | Checkpoint | tuple[str, int], *, limit: int = 12
    ) -> Neighbours:
        """Return what is known about a checkpoint whose record is damaged.

        Its child and its ancestors are read instead of its record. `checkpoint` is a Checkpoint
        that history() or tree() lists as damaged, the whole id of a checkpoint, or the name of its
        session and its seq. `limit` bounds the number of ancestors.

        Raises CheckpointNotFound or SessionNotFound if there is no such checkpoint.
        """
        with self._repository.reader() as reader:
            return neighbours(reader, checkpoint, limit)

    def id_length(self, checkpoints: Iterable[Checkpoint]) -> int:
        """Return how many characters of an id are enough to name each of these in the store."""
        with self._repository.reader() as reader:
            return id_length(reader, checkpoints)

    # -- runs ----------------------------------------------------------------------------------

    def pending(
        self, *, on_damage: Callable[[str, HoldfastError], object] = _log_damage
    ) -> list[Pending]:
        """Return calls that have not ended and questions that runs wait for, of all sessions.

        A session whose journal is damaged is left out. `on_damage` is then called with its name and
        the error; by default, a warning is logged.
        """
        from holdfast.runs.pending import all_pending

        out: list[Pending] = []
        with self._repository.reader() as reader:
            for name, found in all_pending(reader):
                if isinstance(found, list):
                    out += found
                else:
                    on_damage(name, found)
        return out

    def abandoned(self, *, halted: bool = False) -> list[Abandoned]:
        """Return the runs whose process died.

        With `halted`, return every run that can be resumed: also those that failed or halted.
        """
        from holdfast.runs.abandoned import abandoned

        with self._repository.reader() as reader:
            return [*abandoned(reader, halted=halted)]

    def ready(self) -> list[Abandoned]:
        """Return the runs that halted at a question or a call in doubt that is decided now.

        resume_all() resumes these, and those whose process died.
        """
        return [run for run in self.abandoned(halted=True) if run.state == "ready"]

    def resume_all(
        self, fn: Callable[[Run], Any], *, concurrency: int = CONCURRENCY, **options: Any
    ) -> list[str]:
        """Resume the runs of abandoned() and ready(), and those that SIGTERM stopped, by `fn(run)`.

        Returns the names of their sessions, in order.

        At most `concurrency` runs are resumed at once, each in a thread; with 1, all run in the
        thread of the caller. Runs that another worker takes first are skipped. An error in one run
        is logged and recorded as the failure of that run; the others are still resumed. `options`
        are those of Session.run().
        """
        from holdfast.runs.abandoned import check_resume, resumable, resume_all

        check_resume(fn, concurrency, options)

        def start(name: str) -> Run:
            return self.session(name).run(resume=True, **options)

        return resume_all(resumable(self.abandoned(halted=True)), start, fn, concurrency)

    # -- the store as a whole ------------------------------------------------------------------

    def verify(
        self, *, read_data: bool = True, sessions: Iterable[str] | None = None
    ) -> VerifyResult:
        """Check records, hashes and indexes, and return a report. Damage does not raise.

        With `read_data`, every stored byte of data is read and checked as well. `sessions` limits
        the check to the sessions of these names.
        """
        from holdfast.maintenance.verify import verify

        return verify(self._repository.backend, read_data=read_data, sessions=sessions)

    def watch(
        self, *, interval: float = 0.1, patience: float | None = None
    ) -> Iterator[Checkpoint | Operation]:
        """Yield the events of Session.watch() for all sessions, including later ones."""
        return Watcher(self._repository.backend).follow(interval, patience)

    def watcher(self) -> Watcher:
        """Return a Watcher, whose poll() returns the events since its last call. It never waits."""
        return Watcher(self._repository.backend)

    def gc(self, progress: GcProgress | None = None, *, erase: bool = False) -> GcResult:
        """Free deleted checkpoints and unused data, and return the space to the system.

        Other processes can save at the same time. Checkpoints that were pruned by their age are
        freed only one day after that. With `erase`, they are freed at once, and all remaining data
        is rewritten. After that, the files of the store hold nothing of the deleted data. This
        takes as long as a backup, and saves wait for it.

        `progress` is called with a phase ("checkpoints", "reading", "data", "space"), the amount
        done, and the total amount.
        """
        from holdfast.maintenance.gc import collect

        return collect(self._repository.backend, progress, erase=erase)

    def prune(
        self, rule: Retention, *, agent: str | None = None, dry_run: bool = False
    ) -> list[Plan]:
        """Apply Session.prune() to every session, and return the plans.

            deleted = sum(plan.deleted for plan in store.prune(Retention(keep_last=100)))

        With `agent`, only the sessions of that agent are pruned. The rule may also limit the size
        of all these sessions together (`store_bytes`). Two kinds of sessions are skipped with a
        warning in the log, and have no plan: a session too damaged to apply the rule, and a session
        that would be deleted as a whole while a run has it.
        """
        from holdfast.maintenance.retention import prune_store

        names = lineage.session_names(self._repository)
        if agent is not None:  # a session whose agent cannot be read is left alone
            names = (info.name for info in self.sessions(agent=agent) if info.agent == agent)
        return prune_store(self._repository, names, rule, dry_run=dry_run)

    def undo_prune(self) -> UndoPruneResult:
        """Undo the newest prune() of this store that is not undone yet, in all its sessions.

        Later changes to these sessions stay. A session that cannot get its checkpoints back is
        skipped, for example because gc() has freed some of them. The result lists it with the
        reason. Raises InvalidRequest if there is nothing to undo.
        """
        from holdfast.maintenance.prune_undo import undo_prune

        return undo_prune(self._repository)

    def repair(self) -> RepairResult:
        """Move heads away from damaged checkpoints, and rebuild indexes.

        The result lists what was repaired, what was lost, and the damage that
        `verify(read_data=True)` still finds. Moving a head is an operation, which undo() reverts. A
        checkpoint whose record is missing is reported once; from then on it counts as freed.
        """
        from holdfast.maintenance.repair import repair

        return repair(self._repository.backend)

    def stats(self, *, largest: int = 10) -> Stats:
        """Return counts of sessions and checkpoints, bytes by kind, and the largest sessions."""
        from holdfast.maintenance.stats import stats

        return stats(self._repository.backend, largest)

    def backup(self, path: str | os.PathLike[str], *, keep: int | None = None) -> VerifyResult:
        """Copy the store to `path`, as it is at one moment, and verify the copy. Return the report.

        Others can write at the same time. The report lists the damage that the store itself has,
        because the copy has it too. If the copy has any other damage, it is removed and Corrupt is
        raised.

        If `path` is an existing folder that is no store, the copy is made in it, under the name of
        the store. With `keep`, older copies are kept as path.1, path.2 and so on, at most `keep`
        copies in total: the oldest one is removed. No old copy is touched before the new one is
        verified.
        """
        from holdfast.maintenance.backup import backup

        return backup(self._repository.backend, Path(os.fspath(path)), keep)

    def copy(
        self,
        other: Store,
        *,
        sessions: Iterable[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> CopyResult:
        """Copy sessions to another store, together with the sessions that they were forked from.

        Ids, hashes, labels, operations and deletions stay the same, and shared data stays shared. A
        second call copies only what is new, so an interrupted copy can be repeated. A session that
        is damaged, or that differs in the other store, is skipped; the result lists it with the
        reason. `progress` is called with the number of sessions done, and their total.
        """
        from holdfast.transfer.copy import transfer

        return transfer(self._repository, other._repository, sessions, progress)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        sessions: Iterable[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> CopyResult:
        """Copy sessions, as copy() does, to a portable file or to a folder of readable JSON.

        A name that ends in .jsonl makes a file, and .jsonl.zst makes a compressed file. Any other
        name makes a folder, which is a store as well: open it with "files:…".
        """
        from holdfast.transfer.export import export

        return export(self._repository, Path(os.fspath(path)), sessions, progress)

    def import_exported(
        self,
        path: str | os.PathLike[str],
        *,
        sessions: Iterable[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> CopyResult:
        """Copy sessions, as copy() does, from a file or folder that export() has made.

        Damaged sessions are skipped; the result lists them. Raises TooBig if a line needs too much
        memory; memory_limit() raises the limit.
        """
        from holdfast.transfer.export import import_

        return import_(self._repository, Path(os.fspath(path)), sessions, progress)


def _name(session: str | Session | None) -> str | None:
    return session.name if isinstance(session, Session) else session


def repository_of(store: Store) -> Repository:
    """Return the repository of a store, for other modules of this package."""
    return store._repository  # noqa: SLF001
