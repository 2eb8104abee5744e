"""Prune: delete the checkpoints that a retention rule does not keep."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast import clock
from holdfast.errors import UNREADABLE, SessionBusy, SessionNotFound
from holdfast.history.operation_effects import apply
from holdfast.history.oplog import Operator
from holdfast.history.writer import Writer
from holdfast.log import logger
from holdfast.maintenance import retention

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from holdfast.history.operation_effects import OpContext, Outcome
    from holdfast.maintenance.retention import Plan, Retention
    from holdfast.storage.repository import Repository


def prune(
    operator: Operator, rule: Retention, *, dry_run: bool = False, logged: bool = True
) -> Plan:
    """Delete the checkpoints of a session that a rule does not keep.

    Return the plan: each checkpoint, whether it is kept, and the reason. With `dry_run` nothing is
    deleted. If not `logged`, undo() skips the operation; deleting a whole session is always logged.
    """
    retention.check(rule)
    plans: list[Plan] = []

    def decide(context: OpContext) -> Outcome | None:
        plan = retention.plan(context.reader, context.number, operator.name, context.head, rule)
        plans.append(plan)
        nothing = plan.whole is None and not plan.removed
        return None if dry_run or nothing else _removal(context, plan)

    operator.attempt("prune", decide, logged=logged)
    return plans[-1]


def prune_store(
    repository: Repository, sessions: Iterable[str], rule: Retention, *, dry_run: bool = False
) -> list[Plan]:
    """Prune several sessions, including the rule `store_bytes`, which concerns them together.

    Sessions that are damaged, busy or deleted in the meantime are skipped with a warning.
    """
    retention.check(rule)
    operators: list[Operator] = []
    plans: list[Plan] = []
    for name in sessions:
        with _leaving_alone(name):
            operator = Operator(Writer(repository, name))
            plans.append(prune(operator, rule, dry_run=True))
            operators.append(operator)
    if rule.store_bytes is not None:
        plans = retention.within_store(plans, rule.store_bytes)
    if dry_run:
        return plans
    done: list[Plan] = []
    for operator, plan in zip(operators, plans, strict=True):
        with _leaving_alone(plan.session):
            if plan.whole is not None or plan.removed:
                carry_out(operator, plan, rule)
            done.append(plan)
    return done


def carry_out(operator: Operator, plan: Plan, rule: Retention) -> None:
    """Delete the checkpoints that a plan removes, by an operation that undo() can take back.

    Checkpoints that have become protected since are kept. A whole session is deleted only if the
    rule still says so.
    """
    chosen = {v.checkpoint.seq for v in plan.removed}

    def decide(context: OpContext) -> Outcome | None:
        now = retention.plan(context.reader, context.number, operator.name, context.head, rule)
        if plan.whole is not None:
            return None if now.whole is None else _removal(context, now)
        verdicts = [
            v if v.protected else v._replace(keep=v.checkpoint.seq not in chosen)
            for v in now.verdicts
        ]
        now = now._replace(verdicts=tuple(verdicts), whole=None)
        return _removal(context, now) if now.removed else None

    operator.attempt("prune", decide)


def _removal(context: OpContext, plan: Plan) -> Outcome:
    if plan.whole is None:
        return apply(context, "prune", retention.runs(plan))
    outcome = apply(context, "delete", {"session": True, "hold": [*clock.uptime()]})
    outcome.kind = "delete"
    return outcome


@contextmanager
def _leaving_alone(session: str) -> Iterator[None]:
    """Log a warning and skip a session that is damaged, busy or deleted."""
    try:
        yield
    except (*UNREADABLE, SessionBusy, SessionNotFound) as e:
        logger.warning("session %r is not pruned: %s", session, e.message)
