"""S3: conversations of agents, as files or in SQLite.

`<dir>/<agent>/<id>.json`, or a database with a table `checkpoints`. The checkpoints of an agent
become a session with the agent's name. The content of a conversation is not checked.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import apsw

from holdfast import Store
from holdfast.importers.checkpoints.foreign import (
    CheckpointEntry,
    Foreign,
    import_entries,
    read_entries,
    read_files,
    save_fields,
)
from holdfast.importers.save import Imported, merge_meta
from holdfast.importers.untrusted import (
    Database,
    Document,
    Files,
    Findings,
    Table,
    Unsound,
    decode,
    digest,
    existing,
    instant,
    printable,
)

TABLE = "checkpoints"
COLUMNS = ("id", "agent_id", "iteration", "conversation", "metadata", "created_at")


def import_s3(store: Store, path: str | os.PathLike[str]) -> Imported:
    """Import the agents in a folder or database of S3. It is only read."""
    if not os.path.isdir(existing(path)):
        return _import_database(store, os.fspath(path))
    files = Files(path)
    names = files.select(".json", kind="checkpoint file")
    return import_entries(store, "s3", read_files("s3", files, names, parse), files.findings)


def _import_database(store: Store, path: str) -> Imported:
    name = printable(os.path.basename(path))
    findings = Findings()
    entries: list[CheckpointEntry] = []
    database = Database(path)
    try:
        with database.opened(findings) as connection:
            table = Table(connection, TABLE, COLUMNS)
            if table.missing is None:
                entries = _read_rows(table, name, findings)
            else:
                why = f"no table {TABLE!r} of this format: {table.missing} is missing"
                findings.skip(name, why)
            database.check_unchanged()
            return import_entries(store, "s3", entries, findings)
    except apsw.Error as e:
        database.check_unchanged()
        findings.skip(name, f"the database cannot be read: {e}")
    return import_entries(store, "s3", [], findings)


def _read_rows(table: Table, name: str, findings: Findings) -> list[CheckpointEntry]:
    def read(rowid: int, position: int) -> tuple[Foreign, str]:
        data = dict(zip(COLUMNS, table.row(rowid), strict=True))
        for column in ("conversation", "metadata"):
            data[column] = _json(data[column], column)
        return parse(data, b"", position), digest(data)

    sources = [
        (f"{name}: row {rowid}", partial(read, rowid, position))
        for position, rowid in enumerate(table.rowids(name, findings))
    ]
    return read_entries("s3", sources, findings)


def _json(value: Any, column: str) -> Any:
    if column == "metadata" and value is None:
        return {}
    if type(value) not in (str, bytes):
        raise Unsound(f"{column} is no JSON")
    raw = value.encode("utf-8", "surrogatepass") if type(value) is str else value
    return decode(raw, column)


def parse(data: Any, _: bytes, position: int = 0) -> Foreign:
    it = Document(data)
    id, agent, created = it.name("id"), it.name("agent_id"), it.take("created_at")
    iteration = it.integer("iteration")
    state = {"conversation": it.mapping("conversation")}
    known = {
        "id": id,
        "created_at": created,
        "iteration": iteration,
        "metadata": it.mapping("metadata"),
    }
    order = (iteration, instant(created), position)
    return Foreign(agent, id, order, state, save_fields(merge_meta(it.rest(), known)), agent)
