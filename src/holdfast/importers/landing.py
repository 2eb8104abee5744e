"""Saving what was found: in order, each once, and below the parent that it had."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.checkpoint import Checkpoint
from holdfast.errors import KeyTaken, NotFound, NotSerializable
from holdfast.importers.foreign import Entry, Findings, Foreign, Unsound
from holdfast.model import Usage

if TYPE_CHECKING:
    from holdfast import Session, Store

PROVENANCE = "imported"
"""The name in `meta` under which an imported checkpoint says where it is from."""


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
    for name in sorted(by_session):
        landing = _Landing(store, format, name, findings)
        landing.run(arrange(by_session[name], findings))
        landings.append(landing)
    return Imported(
        sum(1 for landing in landings if landing.new or landing.known),
        sum(landing.new for landing in landings),
        sum(landing.known for landing in landings),
        tuple(findings.skipped),
        tuple(where for landing in landings for where in landing.unverified),
    )


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
        self._foreign_head = head is not None and not self._is_ours(head)

    def run(self, plan: list[tuple[Entry, Entry | None]]) -> None:
        spots: dict[tuple[str, str], Spot | None] = {}
        lost: set[tuple[str, str]] = set()
        for entry, parent in plan:
            above = self._head if parent is None else spots[parent.key]
            before = self.new
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
        newest = spots[max((entry for entry, _ in plan), key=_order).key]
        if self.new and newest and self._head and newest.id != self._head.id:
            self._session.rewind(newest.id)  # something older was saved after it

    def _find_or_save(self, entry: Entry, above: Spot | None) -> Spot | None:
        """The entry's checkpoint; None if it cannot be had, which is reported."""
        key = f"{self._format}:{entry.id}"
        found = self._get(key)
        if found is not None and found.meta[PROVENANCE].get("sha256") != entry.digest:
            key = f"{key}:{entry.digest}"  # the id was used twice
            found = self._get(key)
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

    def _get(self, key: str) -> Checkpoint | None:
        """The checkpoint of this key, if an import has made it."""
        if self._head is None:
            return None
        try:
            found = self._session.get(f"key:{key}")
        except NotFound:
            return None
        return found if self._is_ours(found) else None

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
        except (Unsound, NotSerializable) as e:
            self._findings.skip(entry.where, getattr(e, "message", e))
            return None
        except KeyTaken:
            why = f"the key {key!r} is taken: if it was imported and deleted since, undo() or gc()"
            self._findings.skip(entry.where, why)
            return None
        self.new += 1
        self._head = Spot(saved.id, saved.meta)
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

    def _is_ours(self, checkpoint: Checkpoint) -> bool:
        note = checkpoint.meta.get(PROVENANCE)
        return isinstance(note, dict) and note.get("format") == self._format


def _usage(meta: dict[str, Any], above: Spot | None, foreign: Foreign) -> Usage:
    """What was spent since the parent. A total below the parent's has begun anew from nothing."""
    spent = []
    for name in foreign.totals or ():
        now, then = meta[name], above.meta.get(name, 0) if above else 0
        spent.append(Decimal(str(now)) - Decimal(str(then)) if now >= then else Decimal(str(now)))
    return Usage(int(spent[0]), float(spent[1]))
