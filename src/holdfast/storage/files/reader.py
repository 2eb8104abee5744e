"""Read a store of files. A view sees each session as it was at its first read."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from holdfast.errors import Corrupt, Unavailable
from holdfast.format.item_streams import MAX_ITEMS, STREAM_BITS
from holdfast.format.records import COPIED, FREED, MAX_SEQ, SEQ_BITS, deleted_name
from holdfast.storage import fs
from holdfast.storage.contract import View
from holdfast.storage.files import item_files, journal, row_json, store_folder
from holdfast.storage.files.log import identity_of
from holdfast.storage.files.session_folders import BLOBS as BLOB_FOLDER
from holdfast.storage.files.session_folders import blob_path, record_path
from holdfast.storage.memory_tables import OrderedRows, looked_up
from holdfast.storage.tables import (
    BLOB_USES,
    BLOBS,
    CHECKPOINTS,
    CHECKPOINTS_BY_ID,
    COUNTERS,
    FORKS,
    GRAFTS_BY_ANCESTOR,
    ITEM_SIZES,
    ITEMS,
    LEASES,
    MARKS,
    MARKS_BY_VALUE,
    MEASURED,
    SESSIONS_BY_NAME,
    SPANS,
    TABLES,
    TERMS,
    Index,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.storage.contract import Key
    from holdfast.storage.files.log import SessionLog
    from holdfast.storage.files.store_folder import StoreFolder
    from holdfast.storage.tables import Row

LEFT = b"left"
"""Marks the first bytes of an item that no commit has acknowledged."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


def left_from(home: StoreFolder, stream: int, path: Path) -> int:
    """Return the number of the first uncommitted item of a stream.

    If the caller holds the lock of its session, these items were left by a crash; otherwise a
    commit may follow. For a damaged log, all items count as committed.
    """
    number = home.catalog.number_of(path.parent.parent.name)
    ledger = None if number is None else home.current(number)
    return MAX_ITEMS if ledger is None or ledger.damaged else ledger.ends.get(stream, 0)


_MERGED = {
    CHECKPOINTS_BY_ID: ("id", "pos"),  # folders that a user copied may have the same ids
    TERMS: TERMS.by,
    FORKS: FORKS.by,
    GRAFTS_BY_ANCESTOR: GRAFTS_BY_ANCESTOR.by,
}
"""The indexes over all sessions, and the columns that order them."""


class FilesView(View):
    tallied = False

    def __init__(self, home: StoreFolder) -> None:
        self._home = home
        self._root, self._catalog, self._streams = home.root, home.catalog, home.streams
        self._pinned: dict[int, SessionLog | None] = {}
        self._numbers: list[int] | None = None
        self._blobs: list[tuple[bytes, os.stat_result]] | None = None
        self._merged: dict[Index, OrderedRows] = {}
        self._grafts: dict[int, tuple[object, OrderedRows]] = {}
        self._listed: list[tuple[bytes, int]] | None = None
        self._journal: tuple[int, journal.Seen] | None = None

    def close(self) -> None:
        with self._catalog.lock:
            for ledger in self._pinned.values():
                if ledger is not None:
                    ledger.pins -= 1
        self._pinned.clear()
        self._numbers = self._listed = self._journal = None
        self._merged.clear()
        self._grafts.clear()

    def ledger(self, session: int) -> SessionLog | None:
        """Return the ledger of an existing session; the same one at each call."""
        if session not in self._pinned:
            with self._catalog.lock:
                found = self._catalog.ledger(session)
                ledger = found if found is not None and found.there else None
                if ledger is not None:
                    ledger.pins += 1
                self._pinned[session] = ledger
        return self._pinned[session]

    def _ledgers(self) -> list[SessionLog]:
        """Return the ledgers of all sessions; the same ones at each call.

        A session that is forked later may come from a checkpoint that this reader does not see.
        """
        return [*self._ledgers_from(0)]

    def _ledgers_from(self, first: int, last: int | None = None) -> Iterator[SessionLog]:
        """Yield the ledgers of the sessions from a number on, in order."""
        if first == last:
            ledger = self.ledger(first)
            yield from () if ledger is None else (ledger,)
            return
        if self._numbers is None:
            self._numbers = [folder.identity.number for folder in self._catalog.folders()]
        numbers = self._numbers
        for i in range(bisect_left(numbers, first), len(numbers)):
            if last is not None and numbers[i] > last:
                break
            ledger = self.ledger(numbers[i])
            if ledger is not None:
                yield ledger

    # -- look-ups ------------------------------------------------------------------------------

    def get(self, index: Index, *key: Any) -> Row | None:
        if index is BLOBS:
            return self._blob(*key)
        if index is SESSIONS_BY_NAME:
            return self._session(*key)
        if index is COUNTERS:
            number = self._home.turns.read(key[0]) if key[0] in (FREED, COPIED) else None
            return None if number is None else (key[0], number)
        if index is CHECKPOINTS_BY_ID:
            rows = self.scan(index, key[0], key[0] + b"\0", limit=1)
            return rows[0] if rows else None
        by_session = index.by[0] != "pos"
        ledger = self.ledger(key[0] if by_session else key[0] >> SEQ_BITS)
        if ledger is None:
            return None
        if index is SPANS:
            seen = self._look(ledger)
            return key[0], max(1, seen.first), seen.last + 1
        return self._row(index, ledger, key)

    def scan(
        self,
        index: Index,
        low: Any = None,
        high: Any = None,
        *,
        prefix: tuple[Any, ...] = (),
        limit: int | None = None,
        reverse: bool = False,
        floor: Any = None,  # noqa: ARG002 - each item has a row of its own
    ) -> list[Row]:
        if index is ITEMS:
            return self._items(low, high)
        if index is ITEM_SIZES:
            return self._item_sizes(low, limit)
        if index is BLOB_USES:
            return self._blob_uses(low, limit)
        if index is SESSIONS_BY_NAME:
            return self._sessions(low, limit)
        if index is COUNTERS:
            return []
        if index is MARKS_BY_VALUE:
            rows = [row for row in self.scan(MARKS, low, high) if row[1:3] == prefix]
            return [(pos, body) for pos, _, _, body in (rows[::-1] if reverse else rows)]
        if index in _MERGED:
            order = self._merge(index)
            rows = order.scan(low, high, prefix=prefix, limit=limit, reverse=reverse)
            return [looked_up(index, row) for row in rows]
        found: list[Row] = []
        for ledger, key in self._keys(index, low, high, reverse=reverse):
            row = self._row(index, ledger, key)
            if row is not None:
                found.append(row)
                if len(found) == limit:
                    break
        return found

    def _keys(
        self, index: Index, low: int | None, high: int | None, *, reverse: bool
    ) -> Iterator[tuple[SessionLog, Key]]:
        """Yield the keys of a range, each with the log of its session."""
        shift = SEQ_BITS if index.by[0] == "pos" else 0
        first, last = (low or 0) >> shift, None if high is None else high - 1 >> shift
        ledgers = self._ledgers_from(first, last)
        for ledger in reversed([*ledgers]) if reverse else ledgers:
            if shift == 0:
                yield ledger, (ledger.number,)
                continue
            order = self._table(index.table, ledger)
            keys = order.between(low, high)
            yield from [(ledger, key) for key in (reversed(keys) if reverse else keys)]

    def _table(self, table: str, ledger: SessionLog) -> OrderedRows:
        """Return the rows that a session has in a table."""
        if table == "journal":
            return self._look(ledger).entries
        return self._valid_grafts(ledger) if table == "gaps" else ledger.tables[table]

    def _row(self, index: Index, ledger: SessionLog, key: Key) -> Row | None:
        """Return the row of a session that a look-up finds."""
        if index is LEASES:
            return journal.lease_of(ledger)
        if index.table == "sessions":
            return looked_up(index, self.called(ledger))
        row = self._table(index.table, ledger).rows.get(key)
        if row is not None and index is CHECKPOINTS:
            body = self._body(ledger, key)
            return None if body is None else (*row, body)
        return None if row is None else looked_up(index, row)

    def _merge(self, index: Index) -> OrderedRows:
        """Return the rows of all sessions in the order of an index."""
        if index in self._merged:
            return self._merged[index]
        ledgers = self._ledgers()
        state = tuple([(ledger.number, ledger.inode, ledger.entries) for ledger in ledgers])
        known, indexes = self._catalog.merged
        if known != state:
            indexes = {}
            self._catalog.merged = state, indexes
        order = indexes.get(index)
        if order is None:
            order = OrderedRows(TABLES[index.table].columns, _MERGED[index], index.only)
            tables = [self._table(index.table, ledger) for ledger in ledgers]
            order.fill([row for table in tables for row in table.rows.values()])
            if index.table != "gaps":  # logs that are newer than these may have more
                indexes[index] = order
        self._merged[index] = order
        return order

    # -- sessions ------------------------------------------------------------------------------

    def _session(self, name: bytes) -> Row | None:
        found = [ledger for n in self._catalog.named(name) if (ledger := self.ledger(n))]
        found = [ledger for ledger in found if self.called(ledger)[1] == name]
        if len(found) > 1:  # they had the name one after the other; ask who has it now
            now = self._catalog.holder(name)
            found = [ledger for ledger in found if ledger.number == now] or found
        if found:
            return looked_up(SESSIONS_BY_NAME, self.called(found[0]))
        self._catalog.refuse_lost(name)
        return None

    def called(self, ledger: SessionLog) -> Row:
        """Return the session's row. It lost a name in doubt if another session surely has it."""
        if ledger.doubtful:
            for number in self._catalog.named(ledger.name):
                other = self.ledger(number)
                if other is not None and not other.doubtful and other.name == ledger.name:
                    return ledger.renamed(deleted_name(ledger.number, ledger.name))
        return ledger.row("sessions") or (ledger.number, b"", None, b"")

    def _sessions(self, low: bytes | None, limit: int | None) -> list[Row]:
        if self._listed is None:
            self._listed = self._catalog.listed()
        start = 0 if low is None else bisect_left(self._listed, (low,))
        found: list[Row] = []
        for i in range(start, len(self._listed)):
            if len(found) == limit:
                break
            name, number = self._listed[i]
            ledger = self.ledger(number)
            row = None if ledger is None else self.called(ledger)
            if row is not None and row[1] == name:
                found.append(looked_up(SESSIONS_BY_NAME, row))
        return found

    # -- rows that are not in the log alone ----------------------------------------------------

    def _body(self, ledger: SessionLog, key: Key) -> bytes | None:
        """Return the body of a checkpoint's row; None if its file is missing."""
        path = record_path(ledger.folder, key[0] & MAX_SEQ)
        try:
            return row_json.hide_checkpoint(fs.read(path))
        except FileNotFoundError:
            now = self._catalog.ledger(ledger.number)
            if now is None or key not in now.tables["checkpoints"].rows:
                raise Unavailable(
                    f"{path} was freed by gc while it was read", hint="nothing is lost; try again"
                ) from None
            return None

    def _look(self, ledger: SessionLog) -> journal.Seen:
        """Return a session's journal. It is read once for all of its pages."""
        if self._journal is None or self._journal[0] != ledger.number:
            self._journal = ledger.number, journal.look(ledger)
        return self._journal[1]

    def _valid_grafts(self, ledger: SessionLog) -> OrderedRows:
        """Return the newest valid graft of each checkpoint.

        One that another session's gc wrote is valid if that gc finished. Those in newer lines count
        as well: the reader may see that such a gc has freed checkpoints.
        """
        now = ledger if ledger.origin is None else self._catalog.ledger(ledger.number) or ledger
        state = now.inode, now.entries
        known = self._grafts.get(ledger.number)
        if known is not None and known[0] == state:
            return known[1]
        found = {pos: [*grafts] for pos, grafts in ledger.grafts.items()}
        for pos, grafts in () if now is ledger else now.grafts.items():
            older = found.setdefault(pos, [])
            older += [graft for graft in grafts if graft.condition and graft not in older]
        order = OrderedRows(TABLES["gaps"].columns, ("pos",))
        for pos, grafts in found.items():
            for graft in reversed(grafts):
                if graft.condition is None or self._was_swept(*graft.condition):
                    order.put((pos, graft.ancestor, graft.body))
                    break
        self._grafts[ledger.number] = state, order
        return order

    def _was_swept(self, session: int, mark: str) -> bool:
        ledger = self.ledger(session)
        return ledger is None or mark in ledger.sweeps

    # -- data ----------------------------------------------------------------------------------

    def _items(self, low: int, high: int) -> list[Row]:
        stream = low >> STREAM_BITS
        base = stream << STREAM_BITS
        path = self._catalog.stream(stream)
        rows = () if path is None else self._streams.read(path, low - base, high - base)
        return [(base + n, row) for n, row in rows]

    def _snapshot(self) -> list[tuple[bytes, os.stat_result]]:
        """Take a consistent snapshot for gc.

        Blobs are listed first, while no save refers to one. Then all logs are read, while no
        session is created and no data is freed.
        """
        if self._blobs is None:
            self.close()  # earlier reads may lack newer references
            with self._home.names():
                for link in self._home.links():
                    raise link
                self._catalog.refresh(force=True)
                for name in self._catalog.unknown():
                    raise Corrupt(
                        f"what the folder {name} needs is unknown, so no data is freed",
                        hint="verify() shows more; move folders away that are no sessions",
                    )
                for problem in self._catalog.clashes():
                    raise problem
                with self._home.blobs(shared=False):
                    self._blobs = self.blob_files()
                self._ledgers()
        return self._blobs

    def _committed(self, stream: int, path: Path) -> int:
        """Return the number of committed items of a stream, in this snapshot."""
        folder = path.parent.parent.name
        if self._catalog.is_over(folder):
            return MAX_ITEMS
        number = self._catalog.number_of(folder)
        if number is None or number not in self._pinned:
            return 0  # a session that was created later is not in this snapshot
        ledger = self.ledger(number)
        if ledger is not None:
            return ledger.ends.get(stream, 0)
        now = self._catalog.ledger(number)
        return MAX_ITEMS if now is not None and now.removed else 0

    def _item_sizes(self, first: int, limit: int | None) -> list[Row]:
        self._snapshot()
        left = MAX_SEQ if limit is None else limit
        out: list[Row] = []
        for stream, path in self._catalog.streams():
            base = stream << STREAM_BITS
            low = max(first - base, 0)
            if low >= MAX_ITEMS:
                continue
            # All items: a log with lost lines does not show which are committed, and gc must follow
            # every reference. Uncommitted ones are marked, and removed only if they still are.
            high = self._committed(stream, path)
            for n, text in self._streams.lines(path, low, left - len(out)):
                line = item_files.hide(text)
                begin = line.row[:9] if line is not None else b""
                begin += LEFT if n >= high else b""
                out.append((base | n, len(text), begin))
            if len(out) >= left:
                break
        return out

    def _blob(self, digest: bytes) -> Row | None:
        try:
            return digest, item_files.hide_blob(fs.read(blob_path(self._root, digest)))
        except FileNotFoundError:
            return None

    def blob_files(self) -> list[tuple[bytes, os.stat_result]]:
        for folder in (self._root / BLOB_FOLDER).iterdir():
            fs.refuse_link(folder)
        found = sorted((self._root / BLOB_FOLDER).glob("??/*.json"))
        sound = [path for path in found if _DIGEST.fullmatch(path.stem)]
        return [(bytes.fromhex(path.stem), path.lstat()) for path in sound]

    def _blob_uses(self, first: int, limit: int | None) -> list[Row]:
        """Return the blobs. Each has the number of its place in the snapshot, from 1 on."""
        found = self._snapshot()
        stop = len(found) if limit is None else first - 1 + limit
        return [
            (n, digest, status.st_size, status.st_mtime_ns)
            for n, (digest, status) in enumerate(found[first - 1 : stop], start=first)
        ]

    # -- the store -----------------------------------------------------------------------------

    def count(self, table: str) -> int:
        return sum([len(ledger.tables[table].keys) for ledger in self._ledgers()])

    def sizes(self) -> dict[str, tuple[int, int]]:
        sizes: dict[str, list[int]] = {name: [] for name in MEASURED}
        for _, path in self._catalog.streams():
            sizes["items"] += [len(text) for _, text in self._streams.lines(path, 0, MAX_ITEMS)]
        sizes["blobs"] = [status.st_size for _, status in self.blob_files()]
        for ledger in self._ledgers():
            paths = [record_path(ledger.folder, seq) for seq in ledger.seqs()]
            sizes["checkpoints"] += [path.stat().st_size for path in paths if path.exists()]
            for name in sizes.keys() - {"items", "blobs", "checkpoints"}:
                sizes[name] += [len(row[-1]) for row in self._table(name, ledger).rows.values()]
        return {name: (len(each), sum(each)) for name, each in sizes.items()}

    def problems(self, session: int | None = None) -> Iterator[str]:
        """Yield the lost lines of a session's log. They may have had labels or deletions.

        Without a session, check all files. They are read again, because the memory may be right
        when they are not.
        """
        if session is not None:
            ledger = self.ledger(session)
            yield from () if ledger is None else _lost_lines(ledger)
            return
        self.close()
        links = [link.message for link in self._home.links()]
        yield from links
        if links:
            return  # sessions with links cannot be read
        self._catalog.reload()
        for name in self._catalog.unknown():
            yield f"the folder {name} belongs to no known session"
        for problem in [*self._catalog.clashes(), *self._catalog.twins()]:
            yield problem.message
        try:
            store_folder.read(self._root)
        except Corrupt as e:
            yield e.message
        for ledger in self._ledgers():
            if identity_of(ledger.folder) is None:
                yield f"{ledger.folder.name}/session.json is damaged or missing"
            yield from _lost_lines(ledger)


class GuardView(FilesView):
    """A view for the guards of a batch. It reads nothing but logs."""

    def get(self, index: Index, *key: Any) -> Row | None:
        if index is not LEASES:
            return super().get(index, *key)
        ledger = self.ledger(key[0])
        lease = None if ledger is None else ledger.row("leases")
        return None if lease is None else (*lease, 0.0)

    def _body(self, ledger: SessionLog, key: Key) -> bytes | None:  # noqa: ARG002
        return b""


def _lost_lines(ledger: SessionLog) -> Iterator[str]:
    for low, end in ledger.damaged:
        lines = f"line {low}" if end == low + 1 else f"lines {low} to {end - 1}"
        yield f"{lines} of {ledger.folder.name}/log.jsonl: damaged or missing"
