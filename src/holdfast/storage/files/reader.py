"""Read a store of files. A view sees each session as it was at its first read."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import Corrupt, Unavailable
from holdfast.format.item_streams import MAX_ITEMS, STREAM_BITS
from holdfast.format.records import (
    COPIED,
    FREED,
    MAX_SEQ,
    SEQ_BITS,
    deleted_name,
    position,
    seal_counter,
)
from holdfast.storage import fs
from holdfast.storage.contract import View
from holdfast.storage.files import item_files, log, row_json, store_folder
from holdfast.storage.files.log import identity_of
from holdfast.storage.files.session_folders import BLOBS as BLOB_FOLDER
from holdfast.storage.files.session_folders import blob_path, record_path
from holdfast.storage.tables import (
    BLOB_USES,
    BLOBS,
    CHECKPOINTS,
    CHECKPOINTS_BY_ID,
    COUNTERS,
    FORKS,
    GRAFTS_BY_ANCESTOR,
    HEADS,
    ITEM_SIZES,
    ITEMS,
    JOURNAL,
    KEYS,
    LEASES,
    MARKS,
    MARKS_BY_VALUE,
    MEASURED,
    OPERATIONS,
    SESSIONS_BY_NAME,
    SPANS,
    TERMS,
    TOMBSTONES,
    Index,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from holdfast.storage.files.log import GraftEntry, SessionLog
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


class Everything(NamedTuple):
    """The indexes over all sessions, each in order."""

    ids: list[tuple[bytes, int]]
    """id and position of each checkpoint."""
    terms: Mapping[tuple[Any, ...], list[tuple[bytes]]]
    """The ids with an index term, by its kind and value."""


class FilesView(View):
    tallied = False

    def __init__(self, home: StoreFolder) -> None:
        self._home = home
        self._root, self._catalog, self._streams = home.root, home.catalog, home.streams
        self._pinned: dict[int, SessionLog | None] = {}
        self._numbers: list[int] | None = None
        self._blobs: list[tuple[bytes, os.stat_result]] | None = None
        self._everything: Everything | None = None
        self._listed: list[tuple[bytes, int]] | None = None
        self._journal: tuple[int, log.Seen] | None = None

    def close(self) -> None:
        with self._catalog.lock:
            for ledger in self._pinned.values():
                if ledger is not None:
                    ledger.pins -= 1
        self._pinned.clear()
        self._numbers = self._everything = self._listed = self._journal = None

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
            return self._turnover().get(key[0])
        by_session = index in (HEADS, KEYS, LEASES, SPANS) or index.by == ("num",)
        session, seq = (key[0], 0) if by_session else (key[0] >> SEQ_BITS, key[0] & MAX_SEQ)
        ledger = self.ledger(session)
        if ledger is None:
            return None
        if index is KEYS:
            seq = ledger.keys.get(key[1])
            return None if seq is None else (session, seq)
        if index is HEADS:
            return None if ledger.head is None else (session, ledger.head)
        if index is LEASES:
            return log.lease_of(ledger)
        if index is SPANS:
            seen = self._look(ledger)
            return session, max(1, seen.first), seen.last + 1
        if by_session:
            return self.called(ledger)
        return self._row(index, ledger, seq)

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
        if index is CHECKPOINTS_BY_ID:
            return _part(self._all().ids, low, high, limit, reverse=reverse)
        if index is TERMS:
            return _part(self._all().terms.get(prefix, ()), low, high, limit, reverse=reverse)
        if index is COUNTERS:
            return []
        found: list[Row]
        if index is FORKS:
            found = [
                (position(*ledger.origin), ledger.number)
                for ledger in self._ledgers()
                if ledger.origin is not None
            ]
            return _part(sorted(found), low, high, limit, reverse=reverse)
        if index is GRAFTS_BY_ANCESTOR:
            return _part(sorted(self._ancestors()), low, high, limit, reverse=reverse)
        if index is MARKS_BY_VALUE:
            rows = [row for row in self._marks(low, high) if row[1:3] == prefix]
            return [(pos, body) for pos, _, _, body in (rows[::-1] if reverse else rows)]
        if index is MARKS:
            return self._marks(low, high)
        if index is LEASES:
            return self._leases(low, limit)
        return self._numbered(index, low, high, limit, reverse=reverse)

    def _numbered(
        self, index: Index, low: int, high: int | None, limit: int | None, *, reverse: bool
    ) -> list[Row]:
        """Return the rows of sessions that have a number in the session: checkpoints and others."""
        last = None if high is None else high - 1 >> SEQ_BITS
        found: list[Row] = []
        for ledger in self._ledgers_from(low >> SEQ_BITS, last):
            base = position(ledger.number, 0)
            stop = MAX_SEQ + 1 if high is None else min(high - base, MAX_SEQ + 1)
            numbers = _between(self._numbers_of(index, ledger), max(low - base, 0), stop)
            for number in numbers[::-1] if reverse else numbers:
                row = self._row(index, ledger, number)
                if row is not None:
                    found.append(row)
                    if len(found) == limit:
                        return found
        return found

    def _numbers_of(self, index: Index, ledger: SessionLog) -> Sequence[int] | Mapping[int, Any]:
        """Return the numbers of a session's rows."""
        if index is CHECKPOINTS:
            return ledger.order
        if index is JOURNAL:
            return self._look(ledger).order
        if index is OPERATIONS:
            return ledger.operations
        return ledger.tombstones if index is TOMBSTONES else self._grafts(ledger)

    def _row(self, index: Index, ledger: SessionLog, number: int) -> Row | None:
        """Return a row of a session, by its number in the session."""
        body: bytes | None
        pos = position(ledger.number, number)
        if index is CHECKPOINTS:
            text = self._checkpoint(ledger, number)
            return None if text is None else (pos, ledger.ids[number], text)
        if index is JOURNAL:
            body = self._look(ledger).rows.get(number)
        elif index is OPERATIONS:
            body = ledger.operations.get(number)
        elif index is TOMBSTONES:
            body = ledger.tombstones.get(number)
        else:
            held = self._grafts(ledger) if number else ledger.grafts
            graft = self._graft(held.get(number, ()))
            body = None if graft is None else graft.body
        return None if body is None else (pos, body)

    # -- sessions ------------------------------------------------------------------------------

    def _session(self, name: bytes) -> Row | None:
        found = [ledger for n in self._catalog.named(name) if (ledger := self.ledger(n))]
        found = [ledger for ledger in found if self.called(ledger)[1] == name]
        if len(found) > 1:  # they had the name one after the other; ask who has it now
            now = self._catalog.holder(name)
            found = [ledger for ledger in found if ledger.number == now] or found
        if found:
            return self.called(found[0])
        self._catalog.refuse_lost(name)
        return None

    def called(self, ledger: SessionLog) -> tuple[int, bytes, bytes]:
        """Return the session's row. It lost a name in doubt if another session surely has it."""
        if ledger.doubtful:
            for number in self._catalog.named(ledger.name):
                other = self.ledger(number)
                if other is not None and not other.doubtful and other.name == ledger.name:
                    name = deleted_name(ledger.number, ledger.name)
                    return ledger.number, name, ledger.row_for(name)
        return ledger.number, ledger.name, ledger.row

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
                found.append(row)
        return found

    def _leases(self, low: int, limit: int | None) -> list[Row]:
        found: list[Row] = []
        for ledger in self._ledgers_from(low):
            lease = log.lease_of(ledger)
            if lease is not None:
                found.append(lease)
                if len(found) == limit:
                    break
        return found

    # -- checkpoints ---------------------------------------------------------------------------

    def _checkpoint(self, ledger: SessionLog, seq: int) -> bytes | None:
        """Return the row of a checkpoint; None if its file is missing."""
        if seq not in ledger.ids:
            return None
        path = record_path(ledger.folder, seq)
        try:
            text = fs.read(path)
        except FileNotFoundError:
            now = self._catalog.ledger(ledger.number)
            if now is None or seq not in now.ids:
                raise Unavailable(
                    f"{path} was freed by gc while it was read", hint="nothing is lost; try again"
                ) from None
            return None
        return row_json.hide_checkpoint(text)

    def _all(self) -> Everything:
        if self._everything is None:
            ledgers = self._ledgers()
            key = tuple([(ledger.number, ledger.inode, ledger.entries) for ledger in ledgers])
            known = self._catalog.everything
            if known is not None and known[0] == key:
                found: Everything = known[1]
                self._everything = found
                return found
            ids: list[tuple[bytes, int]] = []
            terms: dict[tuple[int, bytes], list[tuple[bytes]]] = {}
            for ledger in ledgers:
                ids += [(id, position(ledger.number, seq)) for seq, id in ledger.ids.items()]
                for kind, value, id in ledger.terms:
                    terms.setdefault((kind, value), []).append((id,))
            for same in terms.values():
                same.sort()
            self._everything = Everything(sorted(ids), terms)
            self._catalog.everything = (key, self._everything)
        return self._everything

    # -- what else a session has ---------------------------------------------------------------

    def _marks(self, low: int, high: int) -> list[Row]:
        ledger = self.ledger(low >> SEQ_BITS)
        if ledger is None:
            return []
        base = position(ledger.number, 0)
        rows = sorted(ledger.marks.values())
        return [(base | seq, *rest) for seq, *rest in rows if low <= base | seq < high]

    def _look(self, ledger: SessionLog) -> log.Seen:
        """Return a session's journal. It is read once for all of its pages."""
        if self._journal is None or self._journal[0] != ledger.number:
            self._journal = ledger.number, log.look(ledger)
        return self._journal[1]

    def _grafts(self, ledger: SessionLog) -> dict[int, list[GraftEntry]]:
        """Return all grafts, also newer ones written by gc of other sessions.

        The reader may see that such a gc has freed checkpoints.
        """
        now = None if ledger.origin is None else self._catalog.ledger(ledger.number)
        if now is None or now is ledger:
            return ledger.grafts
        found = {seq: list(grafts) for seq, grafts in ledger.grafts.items()}
        for seq, grafts in now.grafts.items():
            known = found.setdefault(seq, [])
            known += [graft for graft in grafts if graft.condition and graft not in known]
        return found

    def _graft(self, grafts: Iterable[GraftEntry]) -> GraftEntry | None:
        """Return the newest valid graft.

        One that another session's gc wrote is valid if that gc finished.
        """
        for graft in reversed([*grafts]):
            if graft.condition is None or self._was_swept(*graft.condition):
                return graft
        return None

    def _was_swept(self, session: int, mark: str) -> bool:
        ledger = self.ledger(session)
        return ledger is None or mark in ledger.sweeps

    def _ancestors(self) -> Iterator[Row]:
        """Yield the ancestor and the position of all grafts."""
        for ledger in self._ledgers():
            for seq, grafts in self._grafts(ledger).items():
                graft = self._graft(grafts)
                if graft is not None and graft.ancestor is not None:
                    yield graft.ancestor, position(ledger.number, seq)

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

    def _turnover(self) -> dict[str, Row]:
        """Return the counters of gc and of copies, unless there was none yet."""
        found = zip((FREED, COPIED), self._home.turns.read(), strict=True)
        return {space: (space, seal_counter(space, number)) for space, number in found if number}

    def count(self, table: str) -> int:
        counted = {"checkpoints": "ids", "tombs": "tombstones"}
        return sum([len(getattr(ledger, counted[table])) for ledger in self._ledgers()])

    def sizes(self) -> dict[str, tuple[int, int]]:
        counted: dict[str, list[int]] = {}
        for _, path in self._catalog.streams():
            lines = self._streams.lines(path, 0, MAX_ITEMS)
            counted.setdefault("items", []).extend([len(text) for _, text in lines])
        counted["blobs"] = [status.st_size for _, status in self.blob_files()]
        for ledger in self._ledgers():
            rows = {
                "sessions": [ledger.row],
                "operations": ledger.operations.values(),
                "marks": [mark.body for mark in ledger.marks.values()],
                "tombs": ledger.tombstones.values(),
                "gaps": [
                    graft.body for held in ledger.grafts.values() if (graft := self._graft(held))
                ],
                "journal": self._look(ledger).rows.values(),
            }
            for kind, bodies in rows.items():
                counted.setdefault(kind, []).extend([len(body) for body in bodies])
            for seq in ledger.order:
                path = record_path(ledger.folder, seq)
                if path.exists():
                    counted.setdefault("checkpoints", []).append(path.stat().st_size)
        return {k: (len(counted.get(k, [])), sum(counted.get(k, []))) for k in MEASURED}

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
        return None if ledger is None or ledger.lease is None else (key[0], *ledger.lease, 0.0)

    def _checkpoint(self, ledger: SessionLog, seq: int) -> bytes | None:
        return b"" if seq in ledger.ids else None


def _between(numbers: Sequence[int] | Mapping[int, Any], low: int, high: int) -> list[int]:
    """Return the numbers from low to high, in order. Lists are in order already."""
    if isinstance(numbers, list):
        return numbers[bisect_left(numbers, low) : bisect_left(numbers, high)]
    if high - low < len(numbers):
        return [n for n in range(low, high) if n in numbers]
    return sorted([n for n in numbers if low <= n < high])


def _part(
    rows: Sequence[Any], low: Any, high: Any, limit: int | None, *, reverse: bool
) -> list[Row]:
    """Return the rows whose first column is in a range."""
    start = 0 if low is None else bisect_left(rows, (low,))
    stop = len(rows) if high is None else bisect_left(rows, (high,))
    if reverse:
        return list(rows[start if limit is None else max(start, stop - limit) : stop][::-1])
    return list(rows[start : stop if limit is None else min(stop, start + limit)])


def _lost_lines(ledger: SessionLog) -> Iterator[str]:
    for low, end in ledger.damaged:
        lines = f"line {low}" if end == low + 1 else f"lines {low} to {end - 1}"
        yield f"{lines} of {ledger.folder.name}/log.jsonl: damaged or missing"
