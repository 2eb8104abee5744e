"""Take back a prune of the whole store: the operations that it left in many sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import UNREADABLE, Conflict, InvalidRequest, NotFound
from holdfast.format import records
from holdfast.history import lineage
from holdfast.history.oplog import OPERATION, Operator
from holdfast.history.writer import Writer
from holdfast.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.model import Operation
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository
    from holdfast.storage.rows import SessionRow

_REFUSALS = (*UNREADABLE, Conflict, InvalidRequest, NotFound)
"""The errors that concern one session, so that the others are still restored."""


class UndoPruneResult(NamedTuple):
    """The result of undoing a prune of the whole store."""

    operations: tuple[Operation, ...]
    """The new operations: an undo in each session that got its checkpoints back."""
    skipped: tuple[tuple[str, str], ...]
    """Names of the sessions that could not be restored, each with the reason."""


class _Part(NamedTuple):
    """An operation of a prune of the store that is not undone: the part in one session."""

    batch: str
    session: str
    number: int
    operation: int


def undo_prune(repository: Repository) -> UndoPruneResult:
    """Undo the newest prune of the whole store; see Store.undo_prune."""
    with repository.reader() as reader:
        parts = list(_parts(reader))
    if not parts:
        raise InvalidRequest("there is no prune of the whole store to undo")
    newest = max(part.batch for part in parts)
    done: list[Operation] = []
    skipped: list[tuple[str, str]] = []
    for part in parts:
        if part.batch != newest:
            continue
        try:
            operator = Operator(Writer(repository, part.session))
            done.append(operator.undo_deletion(part.number, part.operation))
        except _REFUSALS as e:
            skipped.append((part.session, e.message))
    return UndoPruneResult(tuple(done), tuple(skipped))


def _parts(reader: Reader) -> Iterator[_Part]:
    for row in lineage.all_sessions(reader):
        try:
            yield from _parts_of(reader, row)
        except UNREADABLE as e:
            name = records.shown_name(row.plain_name)
            logger.warning("the operations of session %r are unknown: %s", name, e.message)


def _parts_of(reader: Reader, row: SessionRow) -> Iterator[_Part]:
    head = lineage.read_head(reader, row.number)[1]
    name = records.shown_name(row.plain_name)
    pruned: dict[int, str] = {}
    undone: set[int] = set()
    for operation in lineage.operations(reader, row.number, name, head.operations):
        details = operation.details
        if "batch" in details:
            pruned[operation.number] = str(details["batch"])
        where, number = details.get("undid") or details.get("redid") or ("", 0)
        if where == OPERATION:
            (undone.add if operation.kind == "undo" else undone.discard)(int(number))
    for number in pruned.keys() - undone:
        yield _Part(pruned[number], name, row.number, number)
