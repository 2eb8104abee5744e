"""S3: conversations of agents, as files or in SQLite.

`<dir>/<agent>/<id>.json`, or one database with a table `checkpoints`. An agent's checkpoints become
the session of its name. A conversation is kept as it is, whatever is in it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import apsw

from holdfast.importers.database import Source, Table
from holdfast.importers.foreign import (
    Document,
    Entry,
    Findings,
    Folder,
    Foreign,
    Unsound,
    collect,
    decode,
    described,
    digest,
    existing,
    instant,
    merged,
    shown,
)
from holdfast.importers.landing import Imported, land

if TYPE_CHECKING:
    from holdfast import Store

TABLE = "checkpoints"
COLUMNS = ("id", "agent_id", "iteration", "conversation", "metadata", "created_at")


def import_s3(store: Store, path: str | os.PathLike[str]) -> Imported:
    """Import the agents in a folder or database of S3. Nothing in it is changed."""
    findings = Findings()
    source = existing(path)
    if not os.path.isdir(source):
        return _import_database(store, source, findings)
    folder = Folder(source, findings)
    folder.report_links(findings)
    names = []
    for name in folder.files:
        if name.endswith(".json"):
            names.append(name)
        else:
            findings.skip(shown(name), "not a checkpoint's file")
    return land(store, "s3", collect(folder, names, parse, findings), findings)


def _import_database(store: Store, path: str, findings: Findings) -> Imported:
    name = shown(os.path.basename(path))
    entries: list[Entry] = []
    source = Source(path)
    try:
        with source.opened(findings) as connection:
            table = Table(connection, TABLE, COLUMNS)
            if table.missing is None:
                entries = _collect_rows(table, name, findings)
            else:
                findings.skip(
                    name, f"no table {TABLE!r} of this format: {table.missing} is missing"
                )
            source.check()
            return land(store, "s3", entries, findings)
    except apsw.Error as e:
        source.check()
        findings.skip(name, f"the database cannot be read: {e}")
    return land(store, "s3", [], findings)


def _collect_rows(table: Table, name: str, findings: Findings) -> list[Entry]:
    entries = []
    for position, rowid in enumerate(table.rowids(name, findings)):
        where = f"{name}: row {rowid}"

        def read(rowid: int = rowid, position: int = position) -> tuple[Foreign, str]:
            data = dict(zip(COLUMNS, table.row(rowid), strict=True))
            for column in ("conversation", "metadata"):
                data[column] = _json(data[column], column)
            return parse(data, b"", position), digest(data)

        try:
            entries.append(Entry.make(where, read))
        except Unsound as e:
            findings.skip(where, e)
    return entries


def _json(value: Any, column: str) -> Any:
    if column == "metadata" and value is None:
        return {}
    if type(value) not in (str, bytes):
        raise Unsound(f"{column} is no JSON")
    raw = value.encode("utf-8", "surrogatepass") if type(value) is str else value
    return decode(raw, column)


def looks_like(data: dict[str, Any]) -> bool:
    return {"agent_id", "conversation"} <= data.keys()


def layout(_: list[str]) -> bool:
    return False  # any folder with folders of JSON files looks like that


def parse(data: Any, _: bytes, position: int = 0) -> Foreign:
    it = Document(data)
    id, agent, created = it.name("id"), it.name("agent_id"), it.take("created_at")
    iteration = it.whole("iteration")
    state = {"conversation": it.mapping("conversation")}
    known = {
        "id": id,
        "created_at": created,
        "iteration": iteration,
        "metadata": it.mapping("metadata"),
    }
    order = (iteration, instant(created), position)
    return Foreign(agent, id, order, state, described(merged(it.rest(), known)), agent)
