"""Mutants of reading, naming, searching, writing and undo."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import holdfast
from holdfast.errors import CheckpointNotFound, Corrupt, NotFound, SessionExists, Unavailable
from holdfast.format import records, values
from holdfast.history import lineage
from holdfast.history.checkpoint_fields import Details
from holdfast.storage import rows
from holdfast.storage.contract import Batch, Delete
from holdfast.storage.reader import open_reader
from tests.mutants import Mutant, entry, mutant

# -- order ---------------------------------------------------------------------------------------


@mutant(".ids:new_id")
def ids_by_the_clock(real: Any) -> Any:
    """An id is greater than that of its parent, whatever the clock says."""
    return lambda parent=None: real()


def _newest_by_id(reader: Any, place: Any, _: Any) -> Any:
    listed = reader.checkpoints(place.session, 1, 1 << 31, 1 << 31)
    found = {row.seq: row.id for row in listed}
    older = [(c, s) for s, c in found.items() if c < found[place.seq]]  # so every line ends
    return rows.Address(place.session, max(older)[1]) if older else None


parents_by_id = Mutant(
    "parents_by_id",
    "A parent is found by its number, not by the order of ids.",
    {**ids_by_the_clock.changes, ".history.lineage:parent_of": lambda _: _newest_by_id},
)


@mutant(".history.writer:time.time_ns")
def time_in_seconds(real: Any) -> Any:
    """Times are kept to the microsecond."""
    return lambda: real() // 10**9 * 10**9


@mutant(".history.writer:Parent.read")
def steps_begin_again(real: Any) -> Any:
    """Steps are counted across restarts."""
    return lambda *args: real(*args)._replace(step=0)


@mutant(".history.adopt:Adoption._add")
def adopted_checkpoints_keep_their_stream(real: Any) -> Any:
    """A session does not append to the stream of a fork that it has adopted."""

    def add(self: Any, place: Any, *more: Any) -> Any:
        self._stream = lineage.read_row(self._reader, place).line
        return real(self, place, *more)

    return add


@mutant(".history.lineage:hash_prefix")
def hashes_cover_the_new_name(_: Any) -> Any:
    """The hashes of a renamed session cover its first name."""
    return lambda row: records.hash_prefix(row.plain_name)


@mutant(".history.writer:Writer._commit_state")
def a_branch_takes_a_used_number(real: Any) -> Any:
    """A branch takes a number that no checkpoint has."""

    def commit_state(self: Any, draft: Any) -> Any:
        parent = draft.parent
        self.head = self.head._replace(last=0 if parent is None else parent.place.seq)
        return real(self, draft)

    return commit_state


# -- saves, forks and rewinds --------------------------------------------------------------------


@mutant(".session:Session.save")
def equal_states_are_not_saved(real: Any) -> Any:
    """A save makes a checkpoint, whatever the state is."""

    def save(self: Any, state: Any, **more: Any) -> Any:
        return self.head if self.exists() and self.load() == state else real(self, state, **more)

    return save


@mutant(".history.writer:lay_out")
def every_save_writes_everything(real: Any) -> Any:
    """A save writes only what changed."""
    return lambda state, old, out: real(state, None, out)


@mutant(".history.checkpoint_fields:check")
def fields_are_dropped(real: Any) -> Any:
    """Every field of a save is stored."""

    def check(given: Any) -> Any:
        details = real(given)
        details.extra.pop("meta", None)
        return details._replace(tags=())

    return check


@mutant("tests.history.test_concurrent_writers:WRITER")
def processes_ignore_each_other(real: Any) -> Any:
    """A save builds on what other processes have saved."""
    blind = """
import holdfast
known = {}
def append(self, path, item):
    state = known.setdefault(self.name, {path: []})
    state[path].append(item)
    self.refresh()
    return self.save(state)
holdfast.Session.append = append
"""
    return blind + real


@mutant(".session:Session.refresh")
def an_unreadable_parent_is_none(real: Any) -> Any:
    """An error while reading the head is raised."""

    def refresh(self: Any) -> None:
        with suppress(Unavailable):
            real(self)

    return refresh


@mutant(".session:Session.rewind")
def rewind_destroys(real: Any) -> Any:
    """A rewind keeps later checkpoints."""

    def rewind(self: Any, revision: Any) -> Any:
        target = real(self, revision)
        backend = self._repository.backend
        number = self._writer.number
        for pos, _, _ in [*backend.tables["checkpoints"].rows.values()]:
            if number << 32 | target.seq < pos < number + 1 << 32:
                backend._apply({("checkpoints", (pos,)): None})
        return target

    return rewind


@mutant(".history.writer:Writer.fork")
def forks_without_origin(real: Any) -> Any:
    """A fork names its origin."""
    return lambda self, parent, *_: real(self, parent, Details({}))


@mutant(".session:Session.fork")
def forks_are_never_refused(real: Any) -> Any:
    """A fork does not replace a session."""

    def fork(self: Any, name: str, at: Any = None) -> Any:
        with suppress(SessionExists):
            return real(self, name, at)
        return holdfast.Session(self._repository, name)

    return fork


@mutant(".session:Session.fork")
def forks_copy(real: Any) -> Any:
    """A fork is refused where a session exists, and copies no data."""

    def fork(self: Any, name: str, at: Any = None) -> Any:
        other = holdfast.Session(self._repository, name)
        other.save(self.load(at))
        return other

    return fork


@mutant(".history.lineage:origin")
def origins_by_name(real: Any) -> Any:
    """A fork knows its origin, not another session of that name."""

    def origin(reader: Any, place: Any, record: Any) -> Any:
        named = reader.session(record.extra["origin"].encode())
        return rows.Address(named.number, record.parent_seq) if named else None

    return origin


# -- reading -------------------------------------------------------------------------------------


@mutant(".format.load:load")
def nan_does_not_load(real: Any) -> Any:
    """A state with NaN in it loads."""

    def load(*args: Any) -> Any:
        state = real(*args)
        if state.get("loss") != state.get("loss"):
            raise Corrupt("not a number")
        return state

    return load


@mutant(".session:Session.load")
def missing_is_none(real: Any) -> Any:
    """Loading what does not exist is an error."""

    def load(self: Any, *args: Any, **more: Any) -> Any:
        with suppress(NotFound):
            return real(self, *args, **more)

    return load


@mutant(".session:Session.delete")
def deleting_what_is_missing_succeeds(real: Any) -> Any:
    """Deleting what does not exist is an error."""

    def delete(self: Any, revision: Any = None) -> Any:
        with suppress(NotFound):
            return real(self, revision)

    return delete


@mutant(".history.revisions:Resolver._line")
def the_oldest_label_wins(real: Any) -> Any:
    """A repeated label means the newest checkpoint."""
    return lambda self: reversed(list(real(self)))


@mutant(".history.revisions:is_checkpoint_deleted")
def deleted_checkpoints_load(real: Any) -> Any:
    """A deleted checkpoint is not found."""
    return lambda *args: False


@mutant(".format.records:former_name")
def deleted_sessions_are_listed(real: Any) -> Any:
    """A deleted session is not listed."""
    return lambda *args: None


@mutant(".history.lineage:page")
def pages_begin_without_a_parent(real: Any) -> Any:
    """A page of the history begins with the parent of the page before."""

    def page(reader: Any, start: Any, parent: Any = None, limit: int = lineage.HISTORY_PAGE) -> Any:
        return real(reader, start, None, limit)

    return page


# -- damage --------------------------------------------------------------------------------------


def _damage_stops(address: str) -> Mutant:
    """Return a mutant in which one module does not tolerate damage."""
    name = f"damage_stops_{address.rpartition('.')[2]}"
    guard = f"{address[1:]} continues beside damage."
    return entry(name, guard, f"{address}:UNREADABLE", ())


damage_stops_lineage = _damage_stops(".history.lineage")
damage_stops_filters = _damage_stops(".history.filters")
damage_stops_watch = _damage_stops(".history.watch")
damage_stops_sessions = _damage_stops(".history.sessions")
damage_stops_gc = _damage_stops(".maintenance.gc")
damage_stops_repair = _damage_stops(".maintenance.repair")


@mutant(".history.lineage:listing")
def damaged_checkpoints_are_not_listed(real: Any) -> Any:
    """A damaged checkpoint stays in lists."""

    def listing(*args: Any) -> Any:
        page, after = real(*args)
        return [c for c in page if not c.damaged], after

    return listing


@mutant(".history.lineage:read_head")
def a_lost_head_is_a_beginning(real: Any) -> Any:
    """A session whose head row is damaged is not taken for a new one."""

    def read_head(reader: Any, session: int) -> Any:
        with suppress(Corrupt):
            return real(reader, session)
        return reader.head(session) or b"", records.Head(0, 0, 0, None)

    return read_head


@mutant(".history.lineage:read_row", ".history.revisions:read_row")
def a_missing_row_is_not_found(real: Any) -> Any:
    """A missing row is damage."""

    def read_row(reader: Any, place: Any) -> Any:
        if reader.checkpoint(*place) is None:
            raise CheckpointNotFound("none")
        return real(reader, place)

    return read_row


@mutant(".history.lineage:read_operation")
def operations_must_be_sound(real: Any) -> Any:
    """A damaged operation is listed as damaged."""

    def read(session: int, name: str, number: int, body: bytes) -> Any:
        kind, created, last, details = records.unseal_operation(session, number, body)
        return last, holdfast.Operation(name, number, kind, created, details)

    return read


names_must_be_sound = entry(
    "names_must_be_sound", "A damaged name is shown.",
    ".format.records:shown_name", records.decode_name,
)  # fmt: skip


# -- searches ------------------------------------------------------------------------------------


def _search(name: str, match: Callable[[str, str], bool]) -> Mutant:
    """Return a mutant whose index and filters accept more than equal values."""

    def terms(self: Any, kind: int, value: bytes, low: bytes, high: bytes, n: int) -> Any:
        held = [row[2] for row in self.view.tables["facets"].rows.values() if row[0] == kind]
        return sorted({id for id in held if low <= id < high}, reverse=True)[:n]

    def matches(self: Any, c: Any) -> bool:
        pairs = [(getattr(self, n), getattr(c, n)) for n in ("agent", "trigger", "label")]
        pairs += [(self.tag, tag) for tag in c.tags or [None]]
        return all(a is None or (b is not None and match(b, a)) for a, b in pairs)

    return Mutant(
        name,
        "A search compares whole values.",
        {
            ".storage.reader:Reader.find_terms": lambda _: terms,
            ".history.filters:Query.matches": lambda _: matches,
        },
    )


searches_by_prefix = _search("searches_by_prefix", str.startswith)


def _fnmatch(value: str, pattern: str) -> bool:
    import fnmatch

    return fnmatch.fnmatch(value, pattern)


searches_by_pattern = _search("searches_by_pattern", _fnmatch)


@mutant(".history.filters:Query.matches")
def searches_trust_the_index(real: Any) -> Any:
    """A search compares each hit of the index with its record."""
    return lambda self, c: True


@mutant(".history.filters:Query.may_match")
def damaged_marks_do_not_match(real: Any) -> Any:
    """A search lists a checkpoint whose marks are damaged."""
    return lambda self, c: False


@mutant(".history.sessions:may_match")
def damaged_sessions_do_not_match(real: Any) -> Any:
    """A filtered list has sessions whose head is damaged."""
    return lambda info, *more: not info.damaged and real(info, *more)


# -- undo ----------------------------------------------------------------------------------------


@mutant(".history.oplog:OperationLog.redoable")
def redo_never_ends(real: Any) -> Any:
    """A save ends redo."""

    def redoable(self: Any, ref: Any) -> int | None:
        rows = self._reader.operations(self._number, 1, 1 << 31)
        return rows[-1][0] if rows else None

    return redoable


@mutant(".history.oplog:_deletes")
def deletions_by_the_clock(real: Any) -> Any:
    """Undo takes the newest deletion of a name, whatever the clock said."""
    return lambda *args: False


@mutant(".history.oplog:_deletion")
def deletions_by_number(real: Any) -> Any:
    """Undo takes the newest deletion of a name, not the one of the greatest number."""
    return lambda reader, number: (number, 0)


# -- the store against its model -----------------------------------------------------------------


@mutant(".history.oplog:OperationLog.head_after")
def undo_loses_the_head(real: Any) -> Any:
    """Undo moves the head to where it was."""
    return lambda self, ref: ref[1] if ref else 0


@mutant(".storage.memory:MemoryBackend.commit")
def tombstones_stay(real: Any) -> Any:
    """Undo of a deletion removes its tombstones."""

    def commit(self: Any, batch: Batch) -> None:
        kept = [w for w in batch.writes if not (isinstance(w, Delete) and w.table == "tombs")]
        real(self, replace(batch, writes=kept))

    return commit


@mutant(".history.lineage:is_checkpoint_deleted", ".history.revisions:is_checkpoint_deleted")
def deleted_checkpoints_are_seen(real: Any) -> Any:
    """A deleted checkpoint is neither found nor listed."""
    return lambda reader, place: False


@mutant(".history.lineage:is_checkpoint_deleted")
def deleted_checkpoints_are_listed(real: Any) -> Any:
    """A deleted checkpoint is not listed."""
    return lambda reader, place: False


@mutant(".storage.repository:Repository.new_stream")
def one_stream_for_all(real: Any) -> Any:
    """Sessions and branches write to streams of their own."""
    return lambda self: 1


@mutant(".format.list_encodings:ImageCache.get")
def images_of_other_sessions(real: Any) -> Any:
    """A state is compared with the image of its own parent."""

    def get(self: Any, key: bytes) -> Any:
        return next(reversed(self._held.values()))[0] if self._held else None

    return get


@mutant(".history.fast_append:Growth.added")
def only_new_items_are_looked_at(real: Any) -> Any:
    """A list that grew is compared as a whole."""

    def added(self: Any, state: Any, image: Any) -> list[bytes] | None:
        grown = state.get(self.names[self.at]) if type(state) is dict else None
        if type(grown) is not list or len(grown) <= self.count or [*state] != self.names:
            return None
        return [values.encode_exact(item, 2) for item in grown[self.count :]]

    return added


@mutant(".storage.memory:MemoryBackend.commit")
def the_last_commit_wins(real: Any) -> Any:
    """A commit compares the head, and does not take it from the store."""

    def commit(self: Any, batch: Batch) -> None:
        if batch.swap is not None:
            with open_reader(self) as reader:
                expect = reader.head(batch.swap.session) or b""
            batch = replace(batch, swap=batch.swap._replace(expect=expect))
        real(self, batch)

    return commit


# -- searches, prefixes, diffs -------------------------------------------------------------------


@mutant(".history.revisions:_beginning")
def prefixes_read_one_page(real: Any) -> Any:
    """A prefix is compared with all ids that share it."""
    return lambda *of: itertools.islice(real(*of), 3)


@mutant(".history.filters:Query.terms")
def searches_use_no_index(real: Any) -> Any:
    """A search for a tag reads the index of tags."""
    return lambda self: []


searches_use_any_index = entry(
    "searches_use_any_index", "A search uses the index that finds least.",
    ".history.filters:PROBE", 1,
)  # fmt: skip


@mutant(".history.filters:_same")
def searches_ignore_types(real: Any) -> Any:
    """Values of another type do not match."""
    return lambda a, b: a == b


@mutant(".history.filters:Scan._cursor")
def searches_forget_the_cursor(real: Any) -> Any:
    """A page begins behind the page before."""
    return lambda self, before: None


@mutant(".history.diff:_items")
def diffs_read_the_first_extent(real: Any) -> Any:
    """A diff reads all extents that differ."""
    return lambda extents, source: real(extents[:1], source)


@mutant(".history.diff:item_streams")
def diffs_read_one_extent_of_the_older(real: Any) -> Any:
    """A diff reads all extents of the older list."""

    class Streams:
        pieces = real.pieces
        calls = itertools.count()

        @classmethod
        def cut(cls, *of: Any) -> Any:
            return real.cut(*of)[: 1 if next(cls.calls) % 4 == 2 else None]

    return Streams


@mutant(".history.diff:mirrored")
def diffs_cut_one_end_wrongly(real: Any) -> Any:
    """A diff cuts equal items from both ends of a list."""
    return lambda extents: [(s, -f, n) for s, f, n in reversed(extents)]


@mutant(".history.diff:_order")
def diffs_ignore_the_order_of_keys(real: Any) -> Any:
    """Another order of keys is a change."""
    return lambda *_: iter(())


# -- many states in a row ------------------------------------------------------------------------


@mutant(".format.load:Run.then")
def items_are_kept_beside_their_place(real: Any) -> Any:
    """Runs of known items keep the number of their first item."""

    def then(run: Any, other: Any) -> Any:
        return type(run)(other.first, *[a + b for a, b in zip(run[1:], other[1:], strict=True)])

    return then


@mutant(".format.load:_Loader._read")
def known_items_expand_for_free(real: Any) -> Any:
    """Known items count as the memory that they expand to."""

    def free(*args: Any) -> Any:
        run = real(*args)
        return run._replace(spent=[min(spent, 1) for spent in run.spent])

    return free


# -- search ----------------------------------------------------------------------------------------


@mutant(".history.search_index:_digest")
def indexes_ignore_deletions(real: Any) -> Any:
    """An index notices that checkpoints were deleted."""
    return lambda gone: b"always the same"


@mutant(".history.search_index:_is_at")
def indexes_are_of_any_store(real: Any) -> Any:
    """The index of another store is not used."""
    return lambda *_: True


@mutant(".history.search:new_texts")
def every_state_is_new(real: Any) -> Any:
    """A search leaves out text that the ancestor has."""
    return lambda new, old, *more: real(new, None, *more)


@mutant(".history.new_text:_outside")
def searches_read_all_items(real: Any) -> Any:
    """A search reads only the items that the ancestor has not."""
    return lambda extents, others: real(extents, ())
