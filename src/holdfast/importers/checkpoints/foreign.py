"""Reads the checkpoints of other stores, and makes entries of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

from holdfast import Checkpoint, Store, Usage
from holdfast.importers.save import PROVENANCE, Content, Entry, Import, Imported, SessionImport
from holdfast.importers.untrusted import Files, Findings, Unsound, decode, digest, printable


@dataclass(frozen=True, slots=True)
class Foreign:
    """A checkpoint of another store, in holdfast's terms."""

    session: str
    id: str
    order: tuple[int, int, int]
    """Step or iteration, time in nanoseconds, and position in the source."""
    state: Any
    fields: dict[str, Any]
    """Arguments of Session.save(), always with `meta`."""
    agent: str | None = None
    parent: str | None = None
    totals: tuple[str, str] | None = None
    """The fields of `meta` with the tokens and the cost since the session began."""
    verified: bool = True
    """False if it has no checksum, or one that cannot be checked, although the format has them."""


Reader = Callable[[], tuple[Foreign, str]]
"""Returns a checkpoint and its digest. Raises Unsound."""


@dataclass(eq=False, slots=True, kw_only=True)
class CheckpointEntry(Entry):
    """A checkpoint of another store. Its state is read again when it is saved."""

    session: str
    id: str
    parent_id: str | None
    read: Reader

    def content(self, parent: Checkpoint | None) -> Content:
        foreign, digest = self.read()
        if digest != self.digest:
            raise Unsound("it changed during the import")
        fields = dict(foreign.fields)
        meta = fields["meta"]
        if PROVENANCE in meta:
            fields["meta"] = meta | {PROVENANCE: {PROVENANCE: meta[PROVENANCE]}}
        if foreign.totals is not None:
            before = {} if parent is None else parent.meta
            tokens, cost = [_increase(meta[name], before.get(name, 0)) for name in foreign.totals]
            fields["usage"] = Usage(int(tokens), float(cost))
        return Content(foreign.state, fields, foreign.agent)


def _increase(total: float, before: float) -> Decimal:
    """Return the difference of two totals. A total that is lower restarted from zero."""
    return Decimal(str(total)) - Decimal(str(before if total >= before else 0))


def save_fields(meta: dict[str, Any], **texts: tuple[str, str | None]) -> dict[str, Any]:
    """Return the arguments of Session.save(): `meta`, its tags, and texts.

    Each of `texts` has the name and value of a field of the source. An empty text has no meaning in
    holdfast, and stays in `meta`.
    """
    meta |= {name: text for name, text in texts.values() if text == ""}
    fields: dict[str, Any] = {ours: text for ours, (_, text) in texts.items() if text}
    if tags := tags_in(meta):
        fields["tags"] = tags
        del meta["tags"]
    return fields | {"meta": meta}


def tags_in(data: dict[str, Any]) -> list[str]:
    """Return the field `tags` if it is a list of texts that are not empty; else no tags."""
    tags = data.get("tags")
    if type(tags) is list and all(type(tag) is str and tag for tag in tags):
        return tags
    return []


def read_entries(
    format: str,
    sources: Iterable[tuple[str, Reader]],
    findings: Findings,
) -> list[CheckpointEntry]:
    """Return an entry for each place and its reader. Places that are not sound are reported."""
    entries = []
    for where, read in sources:
        try:
            foreign, content = read()
        except Unsound as e:
            findings.skip(where, e)
            continue
        entries.append(
            CheckpointEntry(
                where=where,
                key=f"{format}:{foreign.id}",
                digest=content,
                order=(*foreign.order, foreign.id, content),
                verified=foreign.verified,
                session=foreign.session,
                id=foreign.id,
                parent_id=foreign.parent,
                read=read,
            )
        )
    return entries


def read_files(
    format: str, files: Files, names: Iterable[str], parse: Callable[[Any, bytes], Foreign]
) -> list[CheckpointEntry]:
    """Return the entries of files with one checkpoint each."""

    def read(name: str) -> tuple[Foreign, str]:
        raw = files.read(name)
        data = decode(raw)
        return parse(data, raw), digest(data)

    sources = [(printable(name), partial(read, name)) for name in names]
    return read_entries(format, sources, files.findings)


def import_entries(
    store: Store, format: str, entries: list[CheckpointEntry], findings: Findings
) -> Imported:
    """Save the entries that are not in the store yet, session by session."""
    importing = Import(store, format, findings)
    sessions: dict[str, list[CheckpointEntry]] = {}
    for entry in entries:
        sessions.setdefault(entry.session, []).append(entry)
    for name in sorted(sessions):
        importing.save(name, partial(_with_parents, sessions[name], findings))
    return importing.result()


def _with_parents(
    entries: list[CheckpointEntry], findings: Findings, _: SessionImport
) -> tuple[list[CheckpointEntry], None]:
    """Return the entries of a session, each once and parents first, with their parents set.

    An entry that names no parent follows the entry before it in time. So does an entry whose parent
    is missing, or is its own descendant; that is reported.
    """
    unique = {(entry.id, entry.digest): entry for entry in reversed(entries)}
    ordered = sorted(unique.values(), key=lambda entry: entry.order)
    by_id = {entry.id: entry for entry in ordered}
    planned: list[CheckpointEntry] = []
    done: set[CheckpointEntry] = set()
    before: CheckpointEntry | None = None
    for entry in ordered:
        if entry in done:
            before = entry
            continue
        chain: list[CheckpointEntry] = []
        above: CheckpointEntry | None = entry
        while above is not None and above not in done:
            chain.append(above)
            done.add(above)
            above = by_id.get(above.parent_id) if above.parent_id is not None else None
        if above is None or above in chain:
            if chain[-1].parent_id is not None:
                _report_parent(chain[-1], above, before, findings)
            above = before
        for child in reversed(chain):
            child.parent, child.names_parent = above, child.parent_id is not None
            planned.append(child)
            above = child
        before = entry
    return planned, None


def _report_parent(
    entry: CheckpointEntry,
    parent: CheckpointEntry | None,
    before: CheckpointEntry | None,
    findings: Findings,
) -> None:
    why = "not in this session" if parent is None else "it descends from this checkpoint"
    instead = "the checkpoint is the first" if before is None else f"it follows {before.id!r}"
    findings.skip(f"{entry.where}: parent {entry.parent_id!r}", f"{why}; {instead}")
