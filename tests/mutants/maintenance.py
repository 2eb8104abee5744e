"""Mutants of retention, gc, verify and repair."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import compress
from typing import Any

import holdfast
from holdfast import Retention
from holdfast.errors import Unavailable
from holdfast.maintenance.repair import RepairResult
from holdfast.storage.changes import Sweep, Trim
from holdfast.storage.contract import Batch, Delete
from holdfast.storage.sqlite import writer as sqlite_writer
from holdfast.storage.sqlite.backend import SqliteBackend
from holdfast.storage.tables import BLOB_VERSIONS
from tests.mutants import Mutant, entry, mutant, nothing

# -- retention -----------------------------------------------------------------------------------


@mutant(".maintenance.retention:_all")
def the_oldest_is_kept(real: Any) -> Any:
    """Rules keep the newest checkpoints."""
    return lambda *args: reversed(list(real(*args)))


@mutant(".maintenance.retention:_protection")
def marks_protect_nothing(real: Any) -> Any:
    """Tagged and labelled checkpoints are kept."""
    return lambda c, *args: real(holdfast.Checkpoint(c.session, c._record, None, ()), *args)


@mutant(".maintenance.retention:_protection")
def marks_always_protect(real: Any) -> Any:
    """A rule can say that tagged and labelled checkpoints are not kept."""
    return lambda c, *args: real(c, *args) or ("it has a mark" if c.tags or c.label else None)


def _plan_without_rules(real: Any) -> Any:
    def plan(reader: Any, session: int, name: str, head: Any, rule: Any) -> Any:
        return real(reader, session, name, head, Retention(keep_last=1 << 20))

    return plan


rules_are_not_read = Mutant(
    "rules_are_not_read",
    "Every rule of a Retention is applied.",
    {
        ".maintenance.retention:plan": _plan_without_rules,
        ".maintenance.retention:within_store": lambda _: lambda plans, limit: plans,
    },
)


@mutant(".maintenance.retention:_every")
def every_step_is_kept(real: Any) -> Any:
    """keep_every keeps one of several steps."""
    return lambda found, every: {c.seq: "all" for c in found}


@mutant(".maintenance.retention:_in_order")
def store_bytes_by_the_clock(real: Any) -> Any:
    """store_bytes removes in the order of saves, whatever the clock said."""
    return lambda verdicts: [(v.checkpoint.created_us, v) for v in verdicts]


@mutant(".maintenance.autoprune:AutoPruner.committed")
def pruning_is_part_of_the_save(real: Any) -> Any:
    """A failed automatic prune fails no save."""

    def committed(self: Any, session: str, checkpoint: Any) -> None:
        self.prune(session)
        self._collect()

    return committed


prune_stops_at_damage = entry(
    "prune_stops_at_damage", "Prune continues with the sessions beside a damaged one.",
    ".maintenance.retention:_leaving_alone", nullcontext,
)  # fmt: skip


# -- gc ------------------------------------------------------------------------------------------

everything_is_garbage = entry(
    "everything_is_garbage", "gc keeps the data that checkpoints refer to.",
    ".maintenance.reachability:Reachable.mark", nothing,
)  # fmt: skip
no_grafts = entry(
    "no_grafts", "Checkpoints know their ancestor after gc has removed those between.",
    ".maintenance.gc:FreePlanner._new_graft", nothing,
)  # fmt: skip


@mutant(".maintenance.gc:collect")
def gc_errors_are_swallowed(real: Any) -> Any:
    """A gc that fails raises."""

    def swallow(*args: Any, **more: Any) -> Any:
        with suppress(Unavailable):
            return real(*args, **more)

    return swallow


@mutant(".maintenance.reachability:_flags")
def flags_of_rows_are_not_checked(real: Any) -> Any:
    """gc notices rows whose flags are damaged."""
    return lambda begin: begin[8]


@mutant(".storage.changes:Trim.batches")
def drops_shared_blobs(real: Any) -> Any:
    """gc keeps a blob that a save has come to share since it was found to be garbage."""

    def blindly(trim: Trim) -> Any:
        for batch in real(trim):
            if batch.writes[0].by is BLOB_VERSIONS:
                batch.writes = [Delete("blobs", write.key) for write in batch.writes]
            yield batch

    return blindly


@mutant(".storage.changes:Sweep._guards")
def frees_without_looking(real: Any) -> Any:
    """gc keeps the checkpoints of a session that has moved since they were found to be deleted."""
    return lambda self, low, high: iter(())


@mutant(".storage.changes:sweep")
def sweeps_in_two_halves(real: Any) -> Any:
    """gc frees checkpoints and updates their children in one transaction."""

    def by_halves(backend: SqliteBackend, sweeps: Sequence[Sweep]) -> list[bool]:
        done: list[bool] = real(backend, [replace(sweep, grafts=[]) for sweep in sweeps])
        time.sleep(0.01)  # so that other processes see the first half
        with backend._transaction() as connection:
            connection.execute("BEGIN")
            for sweep in compress(sweeps, done):
                rest = replace(sweep, checkpoints=[], keys=[], terms=[], remove=None)
                batch = Batch(writes=rest.batch().writes)
                sqlite_writer.write_within(connection, backend._cursor, batch)
            connection.execute("COMMIT")
        return done

    return by_halves


# -- verify and repair ---------------------------------------------------------------------------

problems_are_not_reported = entry(
    "problems_are_not_reported", "verify reports what it finds.",
    ".maintenance.verify:_Audit._note", nothing,
)  # fmt: skip
data_is_not_checked = entry(
    "data_is_not_checked", "verify reads the data of states.",
    ".maintenance.verify:DataCheck.check", nothing,
)  # fmt: skip


@mutant(".maintenance.backup:verify")
def backups_are_not_verified(real: Any) -> Any:
    """A backup is verified before it gets its name."""
    return lambda *args, **more: holdfast.VerifyResult((), 0, 0, 0)


@mutant(".maintenance.repair:repair")
def no_repair(real: Any) -> Any:
    """repair() repairs."""
    return lambda backend: RepairResult((), holdfast.VerifyResult((), 0, 0, 0))


nothing_is_given_up = entry(
    "nothing_is_given_up", "repair() deletes the checkpoints that are lost.",
    ".maintenance.repair:_give_up", nothing,
)  # fmt: skip


@mutant(".maintenance.repair:_is_stuck")
def undo_stays_stuck(real: Any) -> Any:
    """repair() lets undo continue after a damaged operation."""
    return lambda *args: False


# -- when gc and repair act ----------------------------------------------------------------------


@mutant(".maintenance.gc:is_due")
def expired_sessions_are_freed_at_once(real: Any) -> Any:
    """gc frees an expired session only after a while, in case the clock jumped."""
    return lambda tomb: True


@mutant(".maintenance.gc:is_due")
def expiry_trusts_the_wall_clock(real: Any) -> Any:
    """How long something is expired is measured without the wall clock."""

    def due(tomb: Any) -> bool:
        return not tomb.held or time.time_ns() // 1000 - tomb.created_us >= 86_400 * 1_000_000

    return due


@mutant(".storage.reader:Reader.forks")
def fork_points_are_not_kept(real: Any) -> Any:
    """Retention keeps checkpoints that forks come from."""
    return lambda *args: []


@mutant(".maintenance.autoprune:AutoPruner.committed")
def pruning_fails_the_save(real: Any) -> Any:
    """A save does not wait for automatic retention."""

    def committed(self: Any, session: str, checkpoint: Any) -> None:
        self.prune(session)

    return committed


automatic_retention_frees_nothing = entry(
    "automatic_retention_frees_nothing", "Automatic retention runs gc.",
    ".maintenance.autoprune:collect", nothing,
)  # fmt: skip


@mutant(".storage.reader:Reader.tombstones")
def repair_raises_the_dead(real: Any) -> Any:
    """A deleted checkpoint does not become the head."""
    return lambda *args: []


drafts_of_backups_stay = entry(
    "drafts_of_backups_stay", "A backup that fails leaves nothing.",
    ".storage.sqlite.schema:_discard", nothing,
)  # fmt: skip
operations_behind_the_head_are_not_checked = entry(
    "operations_behind_the_head_are_not_checked", "verify notices a head that was set back.",
    ".maintenance.verify:_Audit._operations", nothing,
)  # fmt: skip


@mutant(".storage.tally:Span.whole")
def lost_journal_entries_are_not_noticed(real: Any) -> Any:
    """The first and the last number of a journal show entries that a disk lost."""
    return lambda _, rows, *__: rows
