"""Any bit flipped, any file cut short: the original state or a typed error, never another state."""

from __future__ import annotations

import os
import random
import re
import resource
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import apsw

from . import processes
from .checking import scratch
from .ledger import complete_lines
from .subjects import Subject
from .workload import url_of

PAGE = 4096
_WAYS, _ROWS = 5, 13  # kinds of pages: of tables, and 2 and 10 of indexes
_INTERIOR = {2, _WAYS}
_PAGES = {2, _WAYS, 10, _ROWS}
SECONDS = 20.0  # for one damaged store; more is a hang
MEMORY = 4 << 30  # what a damaged length may make a reader ask for


@dataclass(frozen=True)
class Damage:
    """A flipped bit, or with `bit` None a file cut at `offset`."""

    offset: int
    bit: int | None = None

    def apply(self, data: bytes) -> bytes | None:
        if self.bit is None:
            return data[: self.offset]
        return flip(data, self.offset, self.bit)


def flip(data: bytes, offset: int, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[offset] ^= 1 << bit
    return bytes(flipped)


@dataclass(frozen=True)
class Blank:
    """A page that reads as zeros."""

    page: int

    def apply(self, data: bytes) -> bytes:
        begin = (self.page - 1) * PAGE
        return data[:begin] + bytes(PAGE) + data[begin + PAGE :]


@dataclass(frozen=True)
class Removal:
    """A file that is gone."""

    def apply(self, data: bytes) -> bytes | None:
        return None


@dataclass
class Report:
    tried: int = 0
    unharmed: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = (
            f"{self.tried} damages, {self.unharmed} without effect, {len(self.failures)} failures"
        )
        return "\n".join([head, *self.failures[:10]])


Check = Callable[[str, Subject], list[str]]


def flips(data: bytes, count: int, seed: int = 0) -> list[Damage]:
    """`count` bits: those of the file's header and of page headers more often than the others."""
    rng = random.Random(seed)
    if count >= len(data) * 8:
        return [Damage(place, bit) for place in range(len(data)) for bit in range(8)]
    chosen: dict[Damage, None] = {}
    while len(chosen) < count:
        place = rng.choice(
            [
                rng.randrange(len(data)),
                rng.randrange(min(100, len(data))),
                rng.randrange(0, len(data), PAGE) + rng.randrange(24),
            ][: 1 if len(chosen) % 3 else 3]
        )
        if place < len(data):
            chosen[Damage(place, rng.randrange(8))] = None
    return list(chosen)


def cell_heads(data: bytes, *, interior: bool | None = None) -> Iterator[range]:
    """Where trees have their lengths, keys and types of columns, and what leads to other pages.

    Of all pages, or only of those that do or do not lead to others.
    """
    for page in range(PAGE, len(data), PAGE):  # the first is the schema's
        kind = data[page]
        if kind not in _PAGES or interior not in {None, kind in _INTERIOR}:
            continue
        first = page + (12 if kind in _INTERIOR else 8)
        for n in range(int.from_bytes(data[page + 3 : page + 5], "big")):
            at = begin = page + int.from_bytes(data[first + 2 * n : first + 2 * n + 2], "big")
            at += 4 if kind in _INTERIOR else 0
            numbers = 2 if kind == _ROWS else 1  # its length, and its key
            for _ in range(numbers):
                at += length(data, at)
            yield range(begin, at if kind == _WAYS else at + data[at])


def length(data: bytes, at: int) -> int:
    """Of a number in the way of SQLite."""
    return next((n for n in range(1, 9) if data[at + n - 1] < 128), 9)


def some(places: Iterator[range], count: int, seed: int = 0) -> list[Damage]:
    """`count` bits of these places."""
    found = [Damage(at, bit) for place in places for at in place for bit in range(8)]
    return random.Random(seed).sample(found, min(count, len(found)))


def cuts(data: bytes, count: int, seed: int = 0) -> list[Damage]:
    """`count` lengths: around the borders of pages, and anywhere.

    Not 0: an empty file is a store that nobody has written to yet.
    """
    if count >= len(data):
        return [Damage(length) for length in range(1, len(data))]
    borders = {at + d for at in range(0, len(data), PAGE) for d in (-1, 0, 1)}
    lengths = sorted(borders | set(random.Random(seed).sample(range(len(data)), count)))
    chosen = random.Random(seed).sample(lengths, min(count, len(lengths)))
    return [Damage(length) for length in chosen if 0 < length < len(data)]


@dataclass(frozen=True)
class Cell:
    """One damaged value of a table, with every page and index around it sound."""

    table: str
    row: tuple[tuple[str, object], ...]
    column: str
    value: bytes | int

    def __str__(self) -> str:
        return f"{self.column} of {self.table} {dict(self.row)}"

    def apply(self, data: bytes) -> bytes:
        where = " AND ".join(f"{name} IS ?" for name, _ in self.row)
        with scratch() as folder:
            path = folder / "copy.db"
            path.write_bytes(data)
            connection = apsw.Connection(str(path))
            values = (self.value, *(value for _, value in self.row))
            connection.execute(f"UPDATE {self.table} SET {self.column} = ? WHERE {where}", values)
            connection.close()
            return path.read_bytes()


def found_by(data: bytes) -> list[bytes]:
    """The names, ids and digests that rows are found by."""
    columns = (("sessions", "name"), ("checkpoints", "id"), ("blobs", "digest"))
    with scratch() as folder:
        path = folder / "copy.db"
        path.write_bytes(data)
        connection = apsw.Connection(str(path))
        try:
            found = [connection.execute(f"SELECT {c} FROM {table}") for table, c in columns]
            return [value for rows in found for (value,) in rows]
        finally:
            connection.close()


def sightings(data: bytes, values: Sequence[bytes]) -> list[Damage]:
    """One bit in each place where one of the values stands."""
    places = {at.start() for value in values for at in re.finditer(re.escape(value), data)}
    return [Damage(at, 0) for at in sorted(places)]


def owners(data: bytes) -> dict[int, str]:
    """The name of the table or index that each page belongs to."""
    with scratch() as folder:
        path = folder / "copy.db"
        path.write_bytes(data)
        connection = apsw.Connection(str(path))
        try:
            return dict(connection.execute("SELECT pageno, name FROM dbstat ORDER BY pageno"))
        finally:
            connection.close()


def first_pages(data: bytes) -> dict[str, int]:
    """The number of the first page of each table and index."""
    return {name: page for page, name in reversed(owners(data).items())}


def recoverable(data: bytes) -> list[int]:
    """Pages of rows that carry seals, and of their indexes.

    But for those of the table that has the first page behind the roots of trees: to make another
    tree SQLite has to move that page, which it cannot do if it, or what leads to it, is damaged.
    """
    found, first = owners(data), first_pages(data)
    with scratch() as folder:
        path = folder / "copy.db"
        path.write_bytes(data)
        connection = apsw.Connection(str(path))
        roots = {root for (root,) in connection.execute("SELECT rootpage FROM sqlite_schema")}
        connection.close()
    behind = found.get(max(roots) + 1)
    names = {"sessions", "heads", "checkpoints", "items", "blobs"} - {behind}
    names |= {f"sqlite_autoindex_{name}_1" for name in names} & first.keys()
    return [page for page, name in found.items() if name in names and data[(page - 1) * PAGE]]


def headers(data: bytes, pages: Sequence[int]) -> Iterator[range]:
    """Of pages: their kind, how many cells there are, and where; the last page they lead to."""
    for page in pages:
        begin = (page - 1) * PAGE
        yield range(begin, begin + (12 if data[begin] in _INTERIOR else 8))


def cells(data: bytes, table: str, seed: int = 0) -> list[Cell]:
    """Every value of `table` that is not part of its key, with one bit of it flipped.

    Only `uses` is left alone: it tells gc that a blob was shared meanwhile, and means nothing else.
    """
    rng = random.Random(seed)
    found = []
    with scratch() as folder:
        path = folder / "copy.db"
        path.write_bytes(data)
        connection = apsw.Connection(str(path))
        columns = [
            (name, key)
            for _, name, _, _, _, key in connection.execute(f"PRAGMA table_info({table})")
        ]
        for row in connection.execute(f"SELECT {', '.join(n for n, _ in columns)} FROM {table}"):
            named = list(zip(columns, row, strict=True))
            where = tuple((name, value) for (name, key), value in named if key)
            for (name, key), value in named:
                if isinstance(value, int) and not key and name != "uses":
                    found.append(Cell(table, where, name, value ^ 1))
                elif isinstance(value, bytes) and name == "body":
                    flipped = flip(value, rng.randrange(len(value)), rng.randrange(8))
                    found.append(Cell(table, where, name, flipped))
        connection.close()
    return found


Anything = Damage | Blank | Removal | Cell


def campaign(
    known: Subject,
    file: str,
    damages: Sequence[Anything],
    check: Check,
    *,
    until: str | None = None,
) -> Report:
    """Try every damage of `file` in other processes: a crash or a hang is a failure too."""
    return campaigns(known, [(file, damage) for damage in damages], check, until=until)


def campaigns(
    known: Subject,
    damages: Sequence[tuple[str, Anything]],
    check: Check,
    *,
    until: str | None = None,
) -> Report:
    """The same for several files, each damaged on its own.

    Or `until` a failure matches that: a mutant need be caught only once.
    """
    report = Report()
    rest = list(damages)
    while rest:
        for (file, damage), verdict in _batch(known, rest, check):
            report.tried += 1
            report.unharmed += verdict == "unharmed"
            if verdict not in {"", "unharmed"}:
                report.failures.append(f"  {damage} of {file}: {verdict}")
                if until is not None and re.search(until, verdict):
                    return report
        rest = list(damages)[report.tried :]
    return report


def _batch(
    known: Subject, damages: Sequence[tuple[str, Anything]], check: Check
) -> Iterator[tuple[tuple[str, Anything], str]]:
    """Verdicts one by one; after a crash or a hang, that is the last one."""

    def run(out: int) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
        for file, damage in damages:
            with scratch() as folder:
                _put(known, folder, file, damage)
                try:
                    found = check(url_of(folder, known.backend), known)
                except Exception:
                    found = [traceback.format_exc().strip().replace("  ", "")[-300:]]
            verdict = "; ".join(found[:3]).replace("\n", " ")
            os.write(out, verdict.encode(errors="backslashreplace") + b"\n")

    child = processes.fork(run)
    done = 0
    alive = True
    try:
        while done < len(damages):
            before = len(child.said)
            alive = alive and child.listen(SECONDS, until=before + 1)
            verdicts = complete_lines(bytes(child.said))
            for verdict in verdicts[done:]:
                done += 1
                yield damages[done - 1], verdict.decode()
            if not alive or len(child.said) == before:
                break
        if done < len(damages):
            hung = alive
            status = child.finish(0.0)
            yield damages[done], "hangs" if hung else f"the process ended with {status}"
    finally:
        child.finish(0.0 if done < len(damages) else 60.0)


def _put(known: Subject, folder: Path, file: str, damage: Anything) -> None:
    for name in sorted(known.folders):
        (folder / name).mkdir()
    for name, data in known.files.items():
        found = damage.apply(data) if name == file else data
        if found is not None:
            (folder / name).write_bytes(found)
