"""Saving what was found: in order, each once, and below the parent that it had."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import lineage
from holdfast.checkpoint import Checkpoint
from holdfast.codec import records
from holdfast.errors import (
    UNREADABLE,
    Conflict,
    InvalidRequest,
    KeyTaken,
    NotFound,
    NotSerializable,
)
from holdfast.importers.foreign import Entry, Findings, Foreign, Unsound
from holdfast.model import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast import Session, Store

PROVENANCE = "imported"
"""The name in `meta` under which an imported checkpoint says where it is from."""
DELETED = "it was imported and deleted: undo() that, or gc() and import it again"


@dataclass(frozen=True)
class Imported:
    """What an import has done, and what it has not."""

    sessions: int
    """Sessions that have checkpoints of this source now."""
    checkpoints: int
    """Checkpoints that were imported."""
    known: int
    """Checkpoints that an earlier import had brought."""
    skipped: tuple[tuple[str, str], ...]
    """What was not imported or not followed: where it lies, and why."""
    unverified: tuple[str, ...]
    """Checkpoints that were imported though nobody could check their checksums."""


class Spot(NamedTuple):
    """A checkpoint in the store, as a parent for others."""

    id: str
    meta: dict[str, Any]


def land(store: Store, format: str, entries: list[Entry], findings: Findings) -> Imported:
    """Save what is not in the store yet, session by session."""
    by_session: dict[str, list[Entry]] = {}
    for entry in entries:
        by_session.setdefault(entry.session, []).append(entry)
    landings = []
    deleted = deleted_sessions(store, format)
    for name in sorted(by_session):
        if name in deleted:
            findings.skip(f"session {name!r}", DELETED)
            continue
        with alone(name, findings):
            landing = _Landing(store, format, name, findings)
            landings.append(landing)
            landing.run(arrange(by_session[name], findings))
    return Imported(
        sum(1 for landing in landings if landing.new or landing.known),
        sum(landing.new for landing in landings),
        sum(landing.known for landing in landings),
        tuple(findings.skipped),
        tuple(where for landing in landings for where in landing.unverified),
    )


@contextmanager
def alone(name: str, findings: Findings) -> Iterator[None]:
    """One session of an import: what is wrong with it is listed, and the others go on."""
    try:
        yield
    except (Conflict, InvalidRequest, NotSerializable, *UNREADABLE) as e:
        findings.skip(f"session {name!r}", e.message)


def deleted_sessions(store: Store, format: str) -> set[str]:
    """Names that are free again, but belonged to imported sessions which are not freed yet."""
    names = set()
    with store.backend.reader() as reader:
        after = records.deleted_name(0, b"")
        while page := reader.sessions(after, lineage.PAGE):
            for number, raw, _ in page:
                former = records.former_name(number, raw)
                if former is None or reader.session(former) is not None:
                    continue
                with suppress(NotFound, *UNREADABLE):
                    head = lineage.Place(number, lineage.read_head(reader, number)[1].seq)
                    if is_from(format, lineage.read_row(reader, head).record.extra.get("meta")):
                        names.add(records.decode_name(former))
            after = page[-1][1]
    return names


def arrange(entries: list[Entry], findings: Findings) -> list[tuple[Entry, Entry | None]]:
    """Each checkpoint of a session once, with its parent, parents first.

    One that names no parent follows the one before it in order. So does one whose parent is not
    there, or is its own descendant; that is reported.
    """
    once = {entry.key: entry for entry in reversed(entries)}
    ordered = sorted(once.values(), key=_order)
    by_id = {entry.id: entry for entry in ordered}
    placed: list[tuple[Entry, Entry | None]] = []
    done: set[tuple[str, str]] = set()
    before: Entry | None = None
    for entry in ordered:
        chain, above = [], entry if entry.key not in done else None
        while above is not None and above.key not in done:
            chain.append(above)
            done.add(above.key)
            above = None if above.parent is None else by_id.get(above.parent)
        if chain and (above is None or above in chain):
            top = chain[-1]
            if top.parent is not None:
                why = "is not there" if above is None else "descends from it"
                place = "is the first" if before is None else f"follows {before.id!r}"
                findings.skip(
                    f"{top.where}: parent {top.parent!r}", f"{why}; the checkpoint {place} instead"
                )
            above = before
        for link in reversed(chain):
            placed.append((link, above))
            above = link
        before = entry
    return placed


def _order(entry: Entry) -> tuple[Any, ...]:
    return (*entry.order, entry.id, entry.digest)


class _Landing:
    """One session on its way into the store."""

    def __init__(self, store: Store, format: str, name: str, findings: Findings) -> None:
        self.new = self.known = 0
        self.unverified: list[str] = []
        self._store, self._format, self._findings = store, format, findings
        self._session = store.session(name)
        head = self._session.head if self._session.exists() else None
        self._head = None if head is None else Spot(head.id, head.meta)
        self._foreign_head = head is not None and not is_from(format, head.meta)
        tree = [] if head is None else list(self._session.tree())
        self._there = {c.key: c for c in tree if is_from(format, c.meta)}
        self._ids = {c.id for c in tree}
        self._lacks = bool(tree) and tree[-1].seq > len(tree)

    def run(self, plan: list[tuple[Entry, Entry | None]]) -> None:
        spots: dict[tuple[str, str], Spot | None] = {}
        lost: set[tuple[str, str]] = set()
        gone = self._gone(plan)
        for entry, parent in plan:
            above = self._head if parent is None else spots[parent.key]
            before = self.new
            if entry.key in gone:
                spot = None
                why = "older than what is left here: it was pruned, or deleted"
                self._findings.skip(entry.where, f"{why}; import into another store")
            else:
                spot = self._find_or_save(entry, above)
            spots[entry.key] = spot or above
            if spot is None:
                lost.add(entry.key)
            elif above is not None and self.new > before:
                if parent is None:
                    why = "what came before it is not there"
                elif entry.parent is not None and parent.key in lost:
                    why = f"parent {entry.parent!r} was not imported"
                else:
                    continue
                self._findings.skip(entry.where, f"{why}; the checkpoint follows {above.id}")
        newest = spots[max((entry for entry, _ in plan if entry.key not in gone), key=_order).key]
        if self.new and newest and self._head and newest.id != self._head.id:
            self._session.rewind(newest.id)  # something older was saved after it

    def _gone(self, plan: list[tuple[Entry, Entry | None]]) -> set[tuple[str, str]]:
        """What an import has brought and is here no more.

        It led to something whose parent is gone; or it led to nothing that is left, and is older
        than that. Of a session that lacks nothing, what is not there was never imported.
        """
        found = {entry.key: self._find(entry)[1] for entry, _ in plan}
        above = {entry.key: parent for entry, parent in plan}
        known = [entry for entry, _ in plan if found[entry.key] is not None]
        gone: set[tuple[str, str]] = set()
        led: set[tuple[str, str]] = set()
        for entry in known if self._lacks else ():
            it, parent = found[entry.key], above[entry.key]
            lost = it is not None and it.parent is not None and it.parent not in self._ids
            while parent is not None and found[parent.key] is None:
                if parent.key in (gone if lost else led):
                    break
                led.add(parent.key)
                if lost:
                    gone.add(parent.key)
                parent = above[parent.key]
        newest = max(map(_order, known), default=()) if self._lacks else ()
        older = {e.key for e, _ in plan if found[e.key] is None and _order(e) < newest}
        return gone | (older - led)

    def _find(self, entry: Entry) -> tuple[str, Checkpoint | None]:
        """The key of an entry, and the checkpoint that an import has made of it."""
        key = f"{self._format}:{entry.id}"
        longer = f"{key}:{entry.digest}"
        found = self._there.get(key)
        if found is not None and found.meta[PROVENANCE].get("sha256") == entry.digest:
            return key, found
        if found is not None or longer in self._there:  # the id was used twice
            return longer, self._there.get(longer)
        return key, None

    def _find_or_save(self, entry: Entry, above: Spot | None) -> Spot | None:
        """The entry's checkpoint; None if it cannot be had, which is reported."""
        key, found = self._find(entry)
        if found is not None:
            self.known += 1
        elif self._foreign_head:
            why = f"session {entry.session!r} has gone on without it: its head was not imported"
            self._findings.skip(entry.where, f"{why}; import into another store")
        else:
            found = self._save(entry, key, above)
        if found is None:
            return None
        if not entry.verified:
            self.unverified.append(entry.where)
        return Spot(found.id, found.meta)

    def _save(self, entry: Entry, key: str, above: Spot | None) -> Checkpoint | None:
        try:
            foreign = entry.again()
            session = self._handle(foreign.agent)
            fields = dict(foreign.fields)
            fields["meta"] = self._signed(entry, fields["meta"])
            if foreign.totals is not None:
                fields["usage"] = _usage(fields["meta"], above, foreign)
            goes_on = above is None or self._head is None or above.id == self._head.id
            parent = None if goes_on or above is None else above.id
            saved = session.save(foreign.state, parent=parent, key=key, **fields)
        except (Unsound, NotSerializable, InvalidRequest) as e:
            self._findings.skip(entry.where, getattr(e, "message", e))
            return None
        except KeyTaken:
            why = f"the key {key!r} is taken: if it was imported and deleted since, undo() or gc()"
            self._findings.skip(entry.where, why)
            return None
        self.new += 1
        self._head = Spot(saved.id, saved.meta)
        self._there[key] = saved
        return saved

    def _handle(self, agent: str | None) -> Session:
        """A handle that saves in the name of an agent."""
        if agent is not None and agent != self._session.agent:
            self._session = self._store.session(self._session.name, agent=agent)
        return self._session

    def _signed(self, entry: Entry, meta: dict[str, Any]) -> dict[str, Any]:
        """With a note on where it is from. A foreign field of that name moves into it."""
        note = {"format": self._format, "where": entry.where, "sha256": entry.digest}
        if PROVENANCE in meta:
            note[PROVENANCE] = meta[PROVENANCE]
        return meta | {PROVENANCE: note}


def is_from(format: str, meta: Any) -> bool:
    """Whether an import of this format has made a checkpoint, by its `meta`."""
    note = meta.get(PROVENANCE) if isinstance(meta, dict) else None
    return isinstance(note, dict) and note.get("format") == format


def _usage(meta: dict[str, Any], above: Spot | None, foreign: Foreign) -> Usage:
    """What was spent since the parent. A total below the parent's has begun anew from nothing."""
    spent = []
    for name in foreign.totals or ():
        now, then = meta[name], above.meta.get(name, 0) if above else 0
        spent.append(Decimal(str(now)) - Decimal(str(then)) if now >= then else Decimal(str(now)))
    return Usage(int(spent[0]), float(spent[1]))
