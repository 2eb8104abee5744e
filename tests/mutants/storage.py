"""Mutants of names, keys, rows and backends."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw

from holdfast.errors import Corrupt, Unavailable
from holdfast.format import records
from holdfast.storage.contract import Absent, Batch, DeleteRange, Insert, Put
from holdfast.storage.tables import KEYS, TERMS
from tests.mutants import Mutant, entry, mutant

# -- names ---------------------------------------------------------------------------------------


@mutant(".storage.files.session_folders:escape")
def names_are_paths(real: Any) -> Any:
    """A session's folder has an escaped name."""
    return os.fsdecode


@mutant(".format.records:encode_name")
def names_are_normalized(real: Any) -> Any:
    """Names that look alike are different names."""
    return lambda name: real(unicodedata.normalize("NFKC", name))


def _named(name: str, matches: Any) -> Mutant:
    """Return a mutant that finds a session whose name only matches."""

    def session(self: Any, wanted: bytes) -> Any:
        rows = self.sessions(None, 1_000)
        return next((row for row in rows if matches(row.name, wanted)), None)

    guard = "A session is found by its whole name."
    return entry(name, guard, ".storage.reader:Reader.session", session)


names_by_prefix = _named("names_by_prefix", bytes.startswith)
names_by_part = _named("names_by_part", bytes.__contains__)
names_by_pattern = _named(
    "names_by_pattern", lambda name, wanted: fnmatch.fnmatchcase(name.decode(), wanted.decode())
)


@mutant(".storage.reader:Reader.sessions")
def lists_without_latest(real: Any) -> Any:
    """A list of sessions has all of them."""

    def sessions(self: Any, after: bytes | None, limit: int) -> Any:
        return [row for row in real(self, after, limit) if b"latest" not in row[1]]

    return sessions


@mutant(".storage.changes:Sweep.batch")
def names_are_deleted_as_paths(real: Any) -> Any:
    """The name of a session that gc removes is not taken for a path."""

    def batch(what: Any) -> Any:
        named = Path(os.fsdecode((what.remove or b"")[9:]))
        if named.is_absolute():
            named.unlink(missing_ok=True)
        return real(what)

    return batch


# -- keys, heads, commits ------------------------------------------------------------------------


@mutant(".storage.changes:Change.batch")
def keys_can_be_taken(real: Any) -> Any:
    """A key is used once in a session."""

    def changed(change: Any) -> Any:
        batch = real(change)
        batch.writes = [
            Put(write.table, write.row) if write[0] == "keys" else write for write in batch.writes
        ]
        return batch

    return changed


@mutant(".storage.memory_tables:Plan.add")
def memory_refuses_no_row(real: Any) -> Any:
    """A backend refuses a new row if there is one with its key."""

    def add(self: Any, write: Any) -> None:
        real(self, Put(write.table, write.row) if isinstance(write, Insert) else write)

    return add


@mutant(".storage.changes:Change.batch")
def keys_of_all_sessions(real: Any) -> Any:
    """Each session has its own keys."""

    def changed(change: Any) -> Any:
        batch = real(change)
        new = [w for w in batch.writes if isinstance(w, Insert) and w.table == "keys"]
        for key, refusal in [(write.row[1], write.refusal) for write in new]:
            batch.guards += [Absent(KEYS, (number, key), refusal) for number in range(1, 9)]
        return batch

    return changed


@mutant(".storage.changes:Change.batch")
def no_compare_and_swap(real: Any) -> Any:
    """A commit is refused if the head is not the expected one."""

    def blindly(change: Any) -> Any:
        batch = real(dataclasses.replace(change, notes=None))
        writes = [
            Put(write.table, write.row) if isinstance(write, Insert) else write
            for write in batch.writes
        ]
        return Batch(writes=[Put("heads", (change.session, change.head)), *writes])

    return blindly


@mutant(".storage.memory:MemoryBackend.commit")
def errors_are_swallowed(real: Any) -> Any:
    """A commit that fails raises."""

    def commit(self: Any, batch: Any) -> None:
        with suppress(Unavailable):
            real(self, batch)

    return commit


def _marks_of_one_are_lost(real: Any, which: str) -> Any:
    """Remove all marks of the checkpoints that the change marks, or unmarks."""

    def changed(change: Any) -> Any:
        batch = real(change)
        for seq in {mark.seq for mark in getattr(change.notes, which, ())}:
            pos = records.position(change.session, seq)
            batch.writes.insert(0, DeleteRange("marks", pos, pos + 1))
        return batch

    return changed


@mutant(".storage.changes:Change.batch")
def a_mark_replaces_the_others(real: Any) -> Any:
    """A new tag or label leaves the other marks of its checkpoint."""
    return _marks_of_one_are_lost(real, "marks")


@mutant(".storage.changes:Change.batch")
def removing_a_mark_removes_all(real: Any) -> Any:
    """Removing a tag leaves the other marks of its checkpoint."""
    return _marks_of_one_are_lost(real, "removed_marks")


@mutant(".storage.memory:MemoryBackend.scan")
def searches_find_the_oldest_first(real: Any) -> Any:
    """A search returns the newest checkpoint first."""

    def scan(self: Any, index: Any, *bounds: Any, **options: Any) -> Any:
        found = real(self, index, *bounds, **options)
        return found[::-1] if index is TERMS else found

    return scan


no_compression = entry(
    "no_compression", "Big rows are compressed.", ".format.rows:_COMPRESS_FROM", 1 << 40
)


@mutant(".storage.reader:Reader.head")
def newest_file_is_the_head(real: Any) -> Any:
    """The head is what the log says, whatever the times of files are."""

    def head(self: Any, session: int) -> Any:
        files = (self.view.ledger(session).folder / "checkpoints").iterdir()
        newest = max(files, key=lambda path: path.stat().st_mtime_ns)
        found = records.unseal_head(session, real(self, session) or b"")
        return found._replace(seq=int(newest.stem), parent=None).seal(session)

    return head


@mutant(".storage.group_commit:Member.finish")
def members_of_a_group_get_no_errors(real: Any) -> Any:
    """Each save of a group commit gets its own outcome."""
    return lambda self, error=None: setattr(self, "done", True)


# -- files of SQLite -----------------------------------------------------------------------------


@mutant(".storage.sqlite.schema:check_schema")
def any_file_is_a_store(real: Any) -> Any:
    """A file of something else is refused."""
    from holdfast.storage.sqlite import schema

    return lambda *args: schema.FORMAT


@mutant(".storage.sqlite.schema:check_schema")
def indexes_must_be_sound(real: Any) -> Any:
    """A store with a damaged index opens."""

    def check(connection: Any, path: Any) -> int:
        if connection.pragma("integrity_check") != "ok":
            raise Corrupt(f"{path} does not open")
        return int(real(connection, path))

    return check


@mutant(".storage.sqlite.salvage:is_damaged")
def damaged_indexes_stay(real: Any) -> Any:
    """Repair rebuilds damaged indexes."""
    return lambda *args: False


@mutant(".storage.sqlite.schema:backup")
def backups_replace_files(real: Any) -> Any:
    """A backup never replaces a file."""

    def backup(open_: Any, path: Path) -> None:
        path.unlink(missing_ok=True)
        real(open_, path)

    return backup


@mutant(".storage.sqlite.schema:backup")
def backups_are_not_synced(real: Any) -> Any:
    """A backup is synced before it gets its name."""

    def backup(open_: Any, path: Path) -> None:
        source = open_()
        source.execute("VACUUM INTO ?", (str(path),))
        source.close()
        copy = apsw.Connection(str(path))
        copy.pragma("journal_mode", "wal")
        copy.close()

    return backup


@mutant("os:path.lexists")
def backups_look_at_their_own_name_only(real: Any) -> Any:
    """A backup is refused where a -wal or -shm file of its name lies."""
    return lambda path: False


# -- salvage of damaged pages --------------------------------------------------------------------


@mutant(".storage.sqlite.salvage:_put_in_place")
def salvage_forgets_what_others_write(real: Any) -> Any:
    """Salvage starts again if another process has written to the store."""
    return lambda new, connect, live, _: real(new, connect, live, live.pragma("data_version"))


@mutant(".storage.sqlite.salvage:_Rescue.check")
def salvage_does_not_check_the_new_file(real: Any) -> Any:
    """Salvage keeps the old file if the new one lacks a row."""
    return lambda _: None


@mutant(".storage.sqlite.salvage:sightings")
def salvage_sees_no_pages(real: Any) -> Any:
    """Salvage looks for rows in all pages of the file."""
    return lambda *_: iter(())


@mutant(".storage.sqlite.salvage:_Rescue._is_there")
def salvage_takes_removed_rows_of_trees(real: Any) -> Any:
    """Salvage leaves rows that gc has removed."""
    return lambda *_: True


@mutant(".storage.sqlite.salvage:_Rescue._is_left")
def salvage_takes_removed_rows_of_pages(real: Any) -> Any:
    """Salvage leaves rows of pages that SQLite has freed."""
    return lambda *_: True


@mutant(".storage.sqlite.salvage:_Rescue._may_be_one")
def salvage_takes_nonsense(real: Any) -> Any:
    """Salvage takes only what can be a row of its table."""
    return lambda *_: True


@mutant(".storage.sqlite.salvage:_Rescue._is_free")
def salvage_puts_items_beside_packs(real: Any) -> Any:
    """Salvage puts no item where a row with several items has it."""
    return lambda *_: True


@mutant(".storage.sqlite.salvage:_Rescue._set_aside")
def salvage_puts_items_as_they_come(real: Any) -> Any:
    """Salvage puts rows with most items first."""
    from holdfast.storage.sqlite import salvage

    return salvage._Rescue._put


@mutant(".storage.reader:Reader.check_tally")
def tallies_are_not_checked(real: Any) -> Any:
    """Sums over rows show rows that a disk lost."""
    return lambda *_: iter(())


tallies_are_not_written = entry(
    "tallies_are_not_written", "Each commit updates the sums over rows.",
    ".storage.sqlite.writer:_tallies", tuple,
)  # fmt: skip


@mutant(".storage.reader:_newest")
def old_leases_are_not_noticed(real: Any) -> Any:
    """A lease that a disk has set back is noticed."""
    return lambda _, found, __: found


# -- costs ---------------------------------------------------------------------------------------


@mutant(".format.ropes:reuse")
def nothing_is_matched_by_content(real: Any) -> Any:
    """Items that moved are found by their content."""
    return lambda _, fresh: [None] * len(fresh)


@mutant(".format.ropes:RopeBuilder.compact")
def fragments_stay(real: Any) -> Any:
    """A list of many fragments is compacted."""
    return lambda _, extents, *__: (extents, 0)
