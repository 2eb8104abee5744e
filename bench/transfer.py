"""Copies of a store, through all kinds of stores and back."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import apsw
import psycopg

import holdfast
from holdfast.storage import fs

from .lab import Lab, Row
from .messages import Writer
from .postgres import server


def copy(lab: Lab) -> list[Row]:
    sessions, steps = lab.pick(1_000, 50), 5
    root = lab.path("moving").parent
    first = holdfast.open(str(root / "first.db"), durability="normal")
    fresh = Writer(71).conversation(10_000_000)
    for n in range(sessions):
        session = first.session(f"session {n}")
        for _ in range(steps):
            session.append("messages", next(fresh))
        if n % 10 == 9:
            session.fork(f"fork {n}").append("messages", next(fresh))
    stores = [("SQLite", first)]
    with server() as url:
        stores.append(("PostgreSQL", holdfast.open(url, create=True)))
        stores.append(("files", holdfast.open(f"files:{root / 'files'}")))
        stores.append(("SQLite", holdfast.open(str(root / "last.db"))))
        taken, bare = [], []
        for (_, source), (_, target) in pairwise(stores):
            start = time.perf_counter()
            done = source.copy(target)
            taken.append(time.perf_counter() - start)
            if done.skipped:
                raise AssertionError(done.skipped)
        for (_, source), (kind, target) in pairwise(stores):
            bare.append(_floor(source, kind, target, root / f"bare {kind}", url))
        if _hashes(stores[0][1]) != _hashes(stores[-1][1]):
            raise AssertionError("a hash has changed in a copy")
        for _, store in stores:
            store.close()
    names = [name for name, _ in stores]
    parts = [
        f"{a} → {b} {t / f:.1f} × ({t:.1f} s / {f:.1f} s)"
        for (a, b), t, f in zip(pairwise(names), taken, bare, strict=True)
    ]
    return [
        lab.row(
            f"`copy` of {sessions:,} sessions of {steps} messages, and {sessions // 10:,} forks",
            "every hash equal; "
            "≤ 3 × reading the rows and writing them once, with a commit per session",
            "every hash equal; " + ", ".join(parts) + f"; all {sum(taken) / sum(bare):.1f} ×",
            passed=sum(taken) <= 3 * sum(bare),
        )
    ]


def _hashes(store: holdfast.Store) -> list[tuple[str, str, str]]:
    return [
        (c.id, c.hash, c.state_hash)
        for info in store.sessions()
        for c in store.session(info.name).tree()
    ]


def _floor(
    source: holdfast.Store, kind: str, target: holdfast.Store, path: Path, url: str
) -> float:
    """Time reading all rows and writing as many bytes, with a commit for each session."""
    start = time.perf_counter()
    groups = _read(source)
    if kind == "files":
        _write_files(target._repository.backend.path, path)  # type: ignore[attr-defined]
    elif kind == "PostgreSQL":
        _write_postgres(groups, url)
    else:
        _write_sqlite(groups, path)
    return time.perf_counter() - start


def _read(source: holdfast.Store) -> list[list[bytes]]:
    groups: list[list[bytes]] = []
    items: list[bytes] = []
    with source._repository.reader() as reader:
        for number, _, row in reader.sessions(None, 1 << 30):
            held = [body for _, _, body in reader.checkpoints(number, 1, 1 << 31, 1 << 30)]
            groups.append([row, reader.head(number) or b"", *held])
        after, streams = -1, set()
        while page := reader.item_rows(after, 1_000):
            streams |= {pos >> 24 for pos, _, _ in page}
            after = page[-1][0]
        for stream in streams:
            items += [body for _, body in reader.items(stream, 0, 1 << 24)]
    for n, item in enumerate(items):
        groups[n % len(groups)].append(item)
    return groups


def _write_sqlite(groups: list[list[bytes]], path: Path) -> None:
    connection = apsw.Connection(str(path))
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", 2)
    connection.execute("CREATE TABLE rows (n INTEGER PRIMARY KEY, body BLOB)")
    for group in groups:
        with connection:
            connection.executemany("INSERT INTO rows (body) VALUES (?)", [(row,) for row in group])
    connection.close()


def _write_postgres(groups: list[list[bytes]], url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE bare (n bigserial PRIMARY KEY, body bytea)")
        connection.commit()
        for group in groups:
            with connection.cursor() as cursor:
                cursor.executemany("INSERT INTO bare (body) VALUES (%s)", [(row,) for row in group])
            connection.commit()


def _write_files(like: Path, path: Path) -> None:
    """Write the same files with the same bytes. Sync each file, and each folder once."""
    for folder in [like, *[p for p in like.rglob("*") if p.is_dir()]]:
        target = path / folder.relative_to(like)
        target.mkdir(parents=True, exist_ok=True)
        with fs.Batch(durable=True) as batch:
            for file in folder.iterdir():
                if file.is_file():
                    batch.put(str(target / file.name), file.read_bytes())
