"""Find interrupted runs, and resume all of them."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holdfast.errors import UNREADABLE, Conflict, InvalidRequest, NotFound, require_count
from holdfast.format import records
from holdfast.history import journal as journals
from holdfast.history import leases, lineage
from holdfast.history.leases import LeaseRecord
from holdfast.log import logger
from holdfast.runs.budget import BudgetSpent
from holdfast.runs.pending import STOPPED, halt_reason
from holdfast.runs.resume import interrupted
from holdfast.storage.rows import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.errors import HoldfastError
    from holdfast.runs.run import Run
    from holdfast.storage.reader import Reader
    from holdfast.storage.tally import Lease

NOT_RESUMED = (Conflict, InvalidRequest, NotFound, *UNREADABLE)
"""Errors for which an abandoned run is skipped: another worker has it, or it is damaged."""


AbandonedState = Literal[
    "died", "failed", "in doubt", "waiting", "ready", "over budget", "stopped", "halted"
]  # fmt: skip


class Abandoned(NamedTuple):
    """A run that can be resumed: it has not completed, and no process runs it."""

    session: str
    """The name of the session."""
    run: str
    """The id of the run."""
    name: str | None
    """The name that run(name=…) has given to the run."""
    host: str
    """The machine of the worker that had the run last."""
    pid: int
    """The process id of that worker."""
    attempt: int
    """How often the run was started or resumed."""
    state: AbandonedState
    """Why the run is not active: its process "died", an error ended it ("failed"), it stopped at a
    call "in doubt" or at a question without an answer ("waiting"), it stopped at one of these that
    is decided since ("ready"), its budget is spent ("over budget"), SIGTERM "stopped" it, or it was
    "halted" for another reason."""
    reason: str | None
    """The error of a failed run, or the reason of a halted one. None if the process died."""
    over_budget: BudgetSpent | None = None
    """The limit that is spent, if the run is over budget."""


def abandoned(reader: Reader, *, halted: bool) -> Iterator[Abandoned]:
    """Yield the runs that died. With `halted`, add those that failed or halted."""
    for lease in leases.all_leases(reader):
        if (lease.token or halted) and (found := _abandoned(reader, lease)) is not None:
            yield found


def abandoned_run(reader: Reader, session: int) -> Abandoned | None:
    """Return the interrupted run of one session, or None. It may have died, failed or halted."""
    lease = reader.lease(session)
    return None if lease is None else _abandoned(reader, lease)


def _abandoned(reader: Reader, lease: Lease) -> Abandoned | None:
    """Return the interrupted run of a lease.

    Returns None if the run is over or alive, or if the head was moved since.
    """
    try:
        record, found = LeaseRecord.read(lease), reader.session_by_number(lease.session)
        if not record.open or found is None or leases.is_alive(lease, record):
            return None
        if found.is_deleted:
            return None
        _, head = lineage.read_head(reader, lease.session)
        tip = lineage.read_row(reader, Address(lease.session, head.seq))
        if interrupted(reader, lease.session, head, tip) is None:  # the head was moved since
            return None
        extra: dict[str, Any] = {} if lease.token else tip.record.extra
        state, over_budget = _why_abandoned(reader, lease, record, extra), BudgetSpent.read(extra)
        return Abandoned(
            records.decode_name(found.name), record.run, record.name, record.owner.host,
            record.owner.pid, record.attempt, state, extra.get("reason"),
            over_budget,
        )  # fmt: skip
    except UNREADABLE as e:
        logger.warning("a lease cannot be read: %s", e.message)
        return None


def _why_abandoned(
    reader: Reader, lease: Lease, record: LeaseRecord, extra: dict[str, Any]
) -> AbandonedState:
    """Return why a run is not active. `extra` are the fields of its last checkpoint."""
    if lease.token:  # the lease was never released
        return "died"
    if extra.get("status") == "failed":
        return "failed"
    if extra.get("reason") == STOPPED:  # if a call is in doubt, the resumed run says so
        return "stopped"
    calls = journals.all_calls(journals.read(reader, lease.session, record.first))
    own = [call for call in calls.attempts() if call.run == record.run]
    halted_at = [call for call in own if halt_reason(call) == extra.get("reason")][-1:]
    if halted_at and halted_at[0].status != "started":
        return "ready"
    kinds = {call.kind for call in calls.open() if call.run == record.run}
    if kinds:
        return "in doubt" if kinds - {"wait"} else "waiting"
    return "halted" if BudgetSpent.read(extra) is None else "over budget"


def resumable(runs: list[Abandoned]) -> list[Abandoned]:
    """Return the runs that need no decision of a person."""
    return [run for run in runs if run.state in ("died", "ready", "stopped")]


def resume_all(
    runs: list[Abandoned], start: Callable[[str], Run], fn: Callable[[Run], Any], concurrency: int
) -> list[str]:
    """Resume runs by `fn(run)`. `start` makes a run from a session's name. See Store.resume_all."""

    def resume(each: Abandoned) -> bool:
        stack = ExitStack()
        try:
            run = stack.enter_context(start(each.session))
        except NOT_RESUMED as e:
            log_not_resumed(each, e)
            return False
        try:
            with stack:
                fn(run)
        except Exception:  # noqa: BLE001 - the others are still resumed
            log_failed(each)
        return True

    if concurrency == 1:
        taken = [resume(each) for each in runs]
    else:
        from concurrent.futures import ThreadPoolExecutor  # slow to import

        contexts = [copy_context() for _ in runs]
        with ThreadPoolExecutor(concurrency, thread_name_prefix="holdfast resume") as pool:
            taken = [*pool.map(lambda context, each: context.run(resume, each), contexts, runs)]
    return [each.session for each, was in zip(runs, taken, strict=True) if was]


def check_resume(fn: Any, concurrency: Any, options: dict[str, Any]) -> None:
    """Raise InvalidRequest for a coroutine function or options that do not fit."""
    if inspect.iscoroutinefunction(fn):
        raise InvalidRequest(
            "resume_all() does not await", hint="aopen() gives a store whose resume_all() does"
        )
    check_concurrency(concurrency, options)


def check_concurrency(concurrency: Any, options: dict[str, Any]) -> None:
    """Raise InvalidRequest for a bad `concurrency`, or for SIGTERM with several runs."""
    require_count("concurrency", concurrency)
    if options.get("sigterm") and concurrency > 1:
        raise InvalidRequest("SIGTERM halts one run, not several at once", hint="concurrency=1")


def log_not_resumed(each: Abandoned, error: HoldfastError) -> None:
    """Log why a run is not resumed: another worker has it, or it cannot be read."""
    logger.warning("session %r is not resumed here: %s", each.session, error.message)


def log_failed(each: Abandoned) -> None:
    """Log the error of a resumed run."""
    logger.exception("resuming session %r failed", each.session)
