"""Reading a store of files: each session as of the moment it was first looked at."""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from holdfast.backends import files_counters, files_journal, files_streams, files_text
from holdfast.backends.base import Lease, Reader, Turnover
from holdfast.backends.files_identity import identity_of
from holdfast.backends.files_names import BLOBS, blob_path, record_path
from holdfast.codec.records import MAX_SEQ, SEQ_BITS, deleted_name, position
from holdfast.codec.streams import MAX_ITEMS, STREAM_BITS
from holdfast.errors import Corrupt, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from holdfast.backends.files_home import Home
    from holdfast.backends.files_ledger import Gap, Ledger

LEFT = b"left"
"""Behind the first bytes of an item that no commit has acknowledged."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


def left_from(home: Home, stream: int, path: Path) -> int:
    """From which of its items on a stream is what somebody has left, or is about to commit.

    For who has the lock of its session it is not the latter. A damaged log does not tell.
    """
    number = home.catalog.number_of(path.parent.parent.name)
    ledger = None if number is None else home.current(number)
    return MAX_ITEMS if ledger is None or ledger.damaged else ledger.ends.get(stream, 0)


class Everything(NamedTuple):
    """What is looked up across sessions, in order."""

    ids: list[tuple[bytes, int, int]]
    facets: dict[tuple[int, bytes], list[bytes]]


class FilesReader(Reader):
    def __init__(self, home: Home) -> None:
        self._home = home
        self._root, self._catalog, self._streams = home.root, home.catalog, home.streams
        self._pinned: dict[int, Ledger | None] = {}
        self._numbers: list[int] | None = None
        self._blobs: list[tuple[bytes, os.stat_result]] | None = None
        self._everything: Everything | None = None

    def close(self) -> None:
        with self._catalog._lock:
            for ledger in self._pinned.values():
                if ledger is not None:
                    ledger.pins -= 1
        self._pinned.clear()
        self._numbers = self._everything = None

    def ledger(self, session: int) -> Ledger | None:
        """Of a session that is there; the same one at every look."""
        if session not in self._pinned:
            with self._catalog._lock:
                found = self._catalog.ledger(session)
                ledger = found if found is not None and found.there else None
                if ledger is not None:
                    ledger.pins += 1
                self._pinned[session] = ledger
        return self._pinned[session]

    def _ledgers(self) -> list[Ledger]:
        """Of all sessions; the same ones at every look.

        One that is forked later may come from a checkpoint that we do not see.
        """
        if self._numbers is None:
            self._numbers = [folder.identity.number for folder in self._catalog.folders()]
        found = [self.ledger(number) for number in self._numbers]
        return [ledger for ledger in found if ledger is not None]

    # -- sessions ------------------------------------------------------------------------------

    def session(self, name: bytes) -> tuple[int, bytes] | None:
        found = [ledger for n in self._catalog.named(name) if (ledger := self.ledger(n))]
        found = [ledger for ledger in found if self.called(ledger)[0] == name]
        if len(found) > 1:  # one after the other, as far as we have seen
            now = self._catalog.holder(name)
            found = [ledger for ledger in found if ledger.number == now] or found
        if found:
            return found[0].number, self.called(found[0])[1]
        self._catalog.refuse_lost(name)
        return None

    def called(self, ledger: Ledger) -> tuple[bytes, bytes]:
        """Name and row. A name that is in doubt was given up if another is sure to have it."""
        if ledger.doubtful:
            for number in self._catalog.named(ledger.name):
                other = self.ledger(number)
                if other is not None and not other.doubtful and other.name == ledger.name:
                    name = deleted_name(ledger.number, ledger.name)
                    return name, ledger.row_for(name)
        return ledger.name, ledger.row

    def session_by_number(self, session: int) -> tuple[bytes, bytes] | None:
        ledger = self.ledger(session)
        return None if ledger is None else self.called(ledger)

    def sessions(self, after: bytes | None, limit: int) -> list[tuple[int, bytes, bytes]]:
        all = [(ledger.number, *self.called(ledger)) for ledger in self._ledgers()]
        found = [each for each in all if after is None or each[1] > after]
        return sorted(found, key=lambda each: (each[1], each[0]))[:limit]

    def head(self, session: int) -> bytes | None:
        ledger = self.ledger(session)
        return None if ledger is None else ledger.head

    def forks(self, session: int, low: int, high: int) -> list[tuple[int, int]]:
        return sorted(
            (ledger.origin[1], ledger.number)
            for ledger in self._ledgers()
            if ledger.origin is not None
            and ledger.origin[0] == session
            and low <= ledger.origin[1] <= high
        )

    # -- checkpoints ---------------------------------------------------------------------------

    def checkpoint(self, session: int, seq: int) -> tuple[bytes, bytes] | None:
        ledger = self.ledger(session)
        if ledger is None or seq not in ledger.ids:
            return None
        path = record_path(ledger.folder, seq)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            now = self._catalog.ledger(session)
            if now is None or seq not in now.ids:
                raise Unavailable(
                    f"{path} was freed by gc while it was read", hint="nothing is lost; try again"
                ) from None
            return None
        return ledger.ids[seq], files_text.hide_checkpoint(text)

    def checkpoints(
        self, session: int, low: int, high: int, limit: int
    ) -> list[tuple[int, bytes, bytes]]:
        ledger = self.ledger(session)
        if ledger is None:
            return []
        out = []
        for seq in ledger.order[bisect_left(ledger.order, low) : bisect_right(ledger.order, high)]:
            found = self.checkpoint(session, seq)
            if found is not None:
                out.append((seq, *found))
                if len(out) == limit:
                    break
        return out

    def find_key(self, session: int, key: bytes) -> int | None:
        ledger = self.ledger(session)
        return None if ledger is None else ledger.keys.get(key)

    def count_checkpoints(self) -> int:
        return sum([len(ledger.ids) for ledger in self._ledgers()])

    # -- across sessions -----------------------------------------------------------------------

    def _all(self) -> Everything:
        if self._everything is None:
            ledgers = self._ledgers()
            key = tuple([(ledger.number, ledger.inode, ledger.entries) for ledger in ledgers])
            known = self._catalog.everything
            if known is not None and known[0] == key:
                found: Everything = known[1]
                self._everything = found
                return found
            ids: list[tuple[bytes, int, int]] = []
            facets: dict[tuple[int, bytes], list[bytes]] = {}
            for ledger in ledgers:
                ids += [(id, ledger.number, seq) for seq, id in ledger.ids.items()]
                for kind, value, id in ledger.facets:
                    facets.setdefault((kind, value), []).append(id)
            for same in facets.values():
                same.sort()
            self._everything = Everything(sorted(ids), facets)
            self._catalog.everything = (key, self._everything)
        return self._everything

    def find_ids(self, low: bytes, high: bytes, limit: int) -> list[tuple[int, int, bytes]]:
        found = self._all().ids
        start, stop = bisect_left(found, (low,)), bisect_right(found, (high, MAX_SEQ + 1))
        return [(s, seq, id) for id, s, seq in found[start : min(stop, start + limit)]]

    def newest_ids(self, low: bytes, high: bytes, limit: int) -> list[tuple[int, int, bytes]]:
        found = self._all().ids
        start, stop = bisect_left(found, (low,)), bisect_left(found, (high,))
        return [(s, seq, id) for id, s, seq in found[max(start, stop - limit) : stop][::-1]]

    def find_facets(
        self, kind: int, value: bytes, low: bytes, high: bytes, limit: int
    ) -> list[bytes]:
        found = self._all().facets.get((kind, value), [])
        start, stop = bisect_left(found, low), bisect_left(found, high)
        return found[max(start, stop - limit) : stop][::-1]

    def buried(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        found = sorted(
            (position(ledger.number, seq), row)
            for ledger in self._ledgers()
            for seq, row in ledger.tombs.items()
        )
        return [(pos, row) for pos, row in found if pos > after][:limit]

    def count_buried(self) -> int:
        return sum([len(ledger.tombs) for ledger in self._ledgers()])

    # -- what else a session has ---------------------------------------------------------------

    def marks(self, session: int, low: int, high: int) -> list[tuple[int, int, bytes, bytes]]:
        ledger = self.ledger(session)
        if ledger is None:
            return []
        return sorted((*at, row) for at, row in ledger.marks.items() if low <= at[0] <= high)

    def find_marks(self, session: int, kind: int, value: bytes) -> list[tuple[int, bytes]]:
        ledger = self.ledger(session)
        if ledger is None:
            return []
        found = [(q, row) for (q, k, v), row in ledger.marks.items() if (k, v) == (kind, value)]
        return sorted(found, reverse=True)

    def operations(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        ledger = self.ledger(session)
        if ledger is None:
            return []
        held = ledger.operations
        if high - low < len(held):
            return [(n, held[n]) for n in range(low, high + 1) if n in held]
        return sorted((n, row) for n, row in held.items() if low <= n <= high)

    def lease(self, session: int) -> Lease | None:
        ledger = self.ledger(session)
        return None if ledger is None else files_journal.lease_of(ledger)

    def leases(self, after: int, limit: int) -> list[Lease]:
        held = [files_journal.lease_of(ledger) for ledger in self._ledgers()]
        return [lease for lease in held if lease is not None and lease.session > after][:limit]

    def journal(self, session: int, low: int, limit: int) -> list[tuple[int, bytes]]:
        ledger = self.ledger(session)
        if ledger is None:
            return []
        return files_journal.read(ledger, low)[:limit]

    def last_entry(self, session: int) -> int:
        ledger = self.ledger(session)
        return 0 if ledger is None else files_journal.last_entry(ledger)

    def tombs(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        ledger = self.ledger(session)
        if ledger is None:
            return []
        if low == high:
            return [(low, ledger.tombs[low])] if low in ledger.tombs else []
        return sorted((seq, row) for seq, row in ledger.tombs.items() if low <= seq <= high)

    def _gaps(self, ledger: Ledger) -> dict[int, list[Gap]]:
        """Also those that other sessions' gc has noted since: we may see that it has freed."""
        now = None if ledger.origin is None else self._catalog.ledger(ledger.number)
        if now is None or now is ledger:
            return ledger.gaps
        found = {seq: list(gaps) for seq, gaps in ledger.gaps.items()}
        for seq, gaps in now.gaps.items():
            known = found.setdefault(seq, [])
            known += [gap for gap in gaps if gap[2] is not None and gap not in known]
        return found

    def _gap(self, gaps: Iterable[Gap]) -> Gap | None:
        """The newest one that holds: one that another session's gc wrote, if that went through."""
        for gap in reversed([*gaps]):
            condition = gap[2]
            if condition is None or self._was_swept(*condition):
                return gap
        return None

    def _was_swept(self, session: int, mark: str) -> bool:
        ledger = self.ledger(session)
        return ledger is None or mark in ledger.sweeps

    def gaps(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        ledger = self.ledger(session)
        if ledger is None:
            return []
        gaps = self._gaps(ledger) if high else ledger.gaps
        seqs = [low] if low == high else sorted(s for s in gaps if low <= s <= high)
        found = [(seq, self._gap(gaps.get(seq, ()))) for seq in seqs]
        return [(seq, gap[1]) for seq, gap in found if gap is not None]

    def gaps_below(self, session: int) -> list[tuple[int, int]]:
        out = []
        for ledger in self._ledgers():
            for seq, gaps in self._gaps(ledger).items():
                gap = self._gap(gaps)
                if gap is not None and gap[0] is not None and gap[0] >> SEQ_BITS == session:
                    out.append((ledger.number, seq))
        return sorted(out)

    # -- data ----------------------------------------------------------------------------------

    def items(self, stream: int, start: int, stop: int) -> list[tuple[int, bytes]]:
        path = self._catalog.stream(stream)
        return [] if path is None else [*self._streams.read(path, start, stop)]

    def _settle(self) -> list[tuple[bytes, os.stat_result]]:
        """Look at all of the store, so that what nobody seems to need then is needed by nobody.

        Blobs come first, while nobody is about to refer to one; then all logs, while no session
        is made and none freed.
        """
        if self._blobs is None:
            self.close()  # what was seen before may lack what is needed by now
            with self._home.names():
                self._catalog.refresh(force=True)
                for name in self._catalog.unknown():
                    raise Corrupt(
                        f"what the folder {name} needs is unknown, so no data is freed",
                        hint="verify() tells more; move away what is no session",
                    )
                for problem in self._catalog.clashes():
                    raise problem
                with self._home.blobs(shared=False):
                    self._blobs = self.blob_files()
                self._ledgers()
        return self._blobs

    def _committed(self, stream: int, path: Path) -> int:
        """How many items of a stream count, as far as we see. Those behind them may be about to."""
        folder = path.parent.parent.name
        if self._catalog.is_over(folder):
            return MAX_ITEMS
        number = self._catalog.number_of(folder)
        if number is None or number not in self._pinned:
            return 0  # what a session made meanwhile refers to is not among what we see
        ledger = self.ledger(number)
        if ledger is not None:
            return ledger.ends.get(stream, 0)
        now = self._catalog.ledger(number)
        return MAX_ITEMS if now is not None and now.removed else 0

    def item_rows(self, after: int, limit: int) -> list[tuple[int, int, bytes]]:
        self._settle()
        out: list[tuple[int, int, bytes]] = []
        for stream, path in self._catalog.streams():
            base = stream << STREAM_BITS
            low = max(after + 1 - base, 0)
            if low >= MAX_ITEMS:
                continue
            # All of them: a log that has lost lines does not tell which count, and gc has to know
            # what any refers to. Those behind are marked, and go only if they still do not count.
            high = self._committed(stream, path)
            for n, text in self._streams.lines(path, low, limit - len(out)):
                line = files_streams.hide(text)
                begin = line.row[:9] if line is not None else b""
                out.append((base | n, len(text), begin + LEFT if n >= high else begin))
            if len(out) >= limit:
                break
        return out

    def blob(self, digest: bytes) -> bytes | None:
        try:
            return files_streams.hide_blob(blob_path(self._root, digest).read_bytes())
        except FileNotFoundError:
            return None

    def blob_files(self) -> list[tuple[bytes, os.stat_result]]:
        found = sorted((self._root / BLOBS).glob("??/*.json"))
        sound = [path for path in found if _DIGEST.fullmatch(path.stem)]
        return [(bytes.fromhex(path.stem), path.stat()) for path in sound]

    def blob_rows(self, after: int, limit: int) -> list[tuple[int, bytes, int, int]]:
        found = self._settle()[after : after + limit]
        return [
            (after + n, digest, status.st_size, status.st_mtime_ns)
            for n, (digest, status) in enumerate(found, start=1)
        ]

    # -- the store -----------------------------------------------------------------------------

    def turnover(self) -> Turnover:
        return self._home.turns.read()

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
                "marks": ledger.marks.values(),
                "tombs": ledger.tombs.values(),
                "gaps": [gap[1] for gaps in ledger.gaps.values() if (gap := self._gap(gaps))],
                "journal": [row for _, row in files_journal.read(ledger)],
            }
            for kind, bodies in rows.items():
                counted.setdefault(kind, []).extend([len(body) for body in bodies])
            for seq in ledger.order:
                path = record_path(ledger.folder, seq)
                if path.exists():
                    counted.setdefault("checkpoints", []).append(path.stat().st_size)
        kinds = (
            "items", "blobs", "checkpoints", "sessions", "operations", "marks", "tombs", "gaps",
            "journal",
        )  # fmt: skip
        return {k: (len(counted.get(k, [])), sum(counted.get(k, []))) for k in kinds}

    def damage(self, session: int) -> str | None:
        """A line that is lost may have brought labels, or told of deletions."""
        ledger = self.ledger(session)
        return None if ledger is None else next(_lost_lines(ledger), None)

    def check(self) -> Iterator[str]:
        """What is in memory is right, whatever has become of the files: so they are read again."""
        self.close()
        self._catalog.reload()
        for name in self._catalog.unknown():
            yield f"the folder {name} is no session's, as far as can be told"
        for problem in [*self._catalog.clashes(), *self._catalog.twins()]:
            yield problem.message
        try:
            files_counters.read(self._root)
        except Corrupt as e:
            yield e.message
        for ledger in self._ledgers():
            if identity_of(ledger.folder) is None:
                yield f"{ledger.folder.name}/session.json is damaged or missing"
            yield from _lost_lines(ledger)


def _lost_lines(ledger: Ledger) -> Iterator[str]:
    for low, end in ledger.damaged:
        lines = f"line {low}" if end == low + 1 else f"lines {low} to {end - 1}"
        yield f"{lines} of {ledger.folder.name}/log.jsonl: damaged or missing"
