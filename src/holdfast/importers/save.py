"""Saves the checkpoints of a source: each of them once, parents first.

Importers describe the checkpoints of a source as `Entry` objects. `Import` saves them, one session
after the other, and counts what it did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast import Checkpoint, Store
from holdfast.errors import UNREADABLE, Conflict, InvalidRequest, KeyTaken, NotSerializable
from holdfast.importers.untrusted import Findings, Unsound

PROVENANCE = "imported"
"""The field of `meta` that describes where an imported checkpoint comes from."""


@dataclass(frozen=True)
class ImportResult:
    """The result of an import."""

    sessions: int
    """Number of sessions that now have checkpoints of this source."""
    checkpoints: int
    """Number of checkpoints that this import saved."""
    known: int
    """Number of checkpoints that an earlier import had saved."""
    skipped: tuple[tuple[str, str], ...]
    """Places in the source that were not imported or not followed, each with the reason."""
    unverified: tuple[str, ...] = ()
    """Places of checkpoints that were imported although their checksum could not be checked."""


@dataclass(slots=True)
class Content:
    """The state and fields of a checkpoint that is about to be saved."""

    state: Any
    fields: dict[str, Any]
    """Arguments of Session.save(), always with `meta`."""
    agent: str | None = None
    appended: list[dict[str, Any]] | None = None
    """Messages to append to those of the parent, instead of saving `state`."""


@dataclass(eq=False, slots=True, kw_only=True)
class Entry(ABC):
    """A checkpoint of the source."""

    where: str
    """Its place in the source, for findings."""
    key: str
    """The key for the checkpoint, unless another content has it already."""
    digest: str
    """A hash of the content. Entries with the same key may have different contents."""
    order: tuple[Any, ...]
    """Its place in time. An entry with a smaller order is older."""
    parent: Entry | None = None
    names_parent: bool = True
    """False if the source does not name a parent, and the entry just follows another one."""
    verified: bool = True
    """False if its checksum could not be checked."""
    checkpoint: Checkpoint | None = None
    """Its checkpoint in the store, if it has one already."""

    @abstractmethod
    def content(self, parent: Checkpoint | None) -> Content:
        """Return the content to save below `parent`, which need not be the entry's own parent.

        Raises Unsound if the source cannot be read any more.
        """


def merge_meta(rest: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return both as one `meta`. Values of `rest` whose names `known` has are under "fields"."""
    hidden = {name: rest[name] for name in rest if name in known}
    return rest | known | ({"fields": hidden} if hidden else {})


class Import:
    """One import into a store."""

    def __init__(self, store: Store, format: str, findings: Findings) -> None:
        self._store, self._format, self._findings = store, format, findings
        self._deleted = _deleted_sessions(store, format)
        self._sessions: set[str] = set()
        self._new = self._known = 0
        self._unverified: list[str] = []

    def save(
        self,
        name: str,
        plan: Callable[[SessionImport], tuple[Sequence[Entry], Entry | None]],
        parent: str | None = None,
    ) -> None:
        """Save the entries of one session. `plan` returns the arguments of SessionImport.save().

        If the session cannot be written, it is reported, and the import continues with others.
        """
        where = f"session {name!r}"
        if name in self._deleted:
            why = "it was imported and then deleted: undo() the deletion, or gc() and import again"
            self._findings.skip(where, why)
            return
        try:
            session = SessionImport(self._store, self._format, name, parent, self._findings)
            try:
                session.save(*plan(session))
            finally:
                self._new += session.new
                self._known += session.known
                self._unverified += session.unverified
                if session.new or session.known:
                    self._sessions.add(name)
        except (Conflict, InvalidRequest, NotSerializable, *UNREADABLE) as e:
            self._findings.skip(where, e.message)

    def result(self) -> ImportResult:
        skipped, unverified = tuple(self._findings.skipped), tuple(self._unverified)
        return ImportResult(len(self._sessions), self._new, self._known, skipped, unverified)


def _deleted_sessions(store: Store, format: str) -> set[str]:
    """Return the names of imported sessions that were deleted and are not freed yet.

    A name is left out if another session has it now.
    """
    return {
        info.name
        for info in store.deleted()
        if info.head is not None
        and _is_imported(format, info.head.meta)
        and not store.session(info.name).exists()
    }


def _is_imported(format: str, meta: Any) -> bool:
    """Return whether an import of this format saved the checkpoint with this `meta`."""
    note = meta.get(PROVENANCE) if isinstance(meta, dict) else None
    return isinstance(note, dict) and note.get("format") == format


class SessionImport:
    """The import of one session."""

    def __init__(
        self, store: Store, format: str, name: str, parent: str | None, findings: Findings
    ) -> None:
        self.new = self.known = 0
        self.unverified: list[str] = []
        self.format = format
        self._store, self._parent_session, self._findings = store, parent, findings
        self._session = store.session(name, parent=parent)
        self._head = self._session.head if self._session.exists() else None
        tree = [] if self._head is None else list(self._session.tree())
        self._imported = {c.key: c for c in tree if _is_imported(format, c.meta)}
        self._ids = {c.id for c in tree}
        self._has_gaps = bool(tree) and tree[-1].seq > len(tree)
        self._continued_here = self._head is not None and not _is_imported(format, self._head.meta)

    def find(self, key: str, digest: str) -> tuple[str, Checkpoint | None]:
        """Return the key for a content, and the checkpoint if an earlier import saved it.

        If the source uses an id for several contents, the first one has the key `<format>:<id>`,
        and the keys of the others end with their digests.
        """
        checkpoint = self._imported.get(key)
        if checkpoint is not None and checkpoint.meta[PROVENANCE].get("sha256") == digest:
            return key, checkpoint
        longer = f"{key}:{digest}"
        if checkpoint is not None or longer in self._imported:
            return longer, self._imported.get(longer)
        return key, None

    def save(self, entries: Sequence[Entry], last: Entry | None = None) -> None:
        """Save the entries that are not in the store yet. Parents come before their children.

        At the end the head is at `last`, or else at the newest entry that the store has.
        """
        for entry in entries:
            _, entry.checkpoint = self.find(entry.key, entry.digest)
        newest = max([e.checkpoint.seq for e in entries if e.checkpoint is not None], default=0)
        pruned = self._pruned(entries)
        left_out = 0
        for entry in entries:
            if entry.checkpoint is not None:
                self.known += 1
            elif entry in pruned:
                why = "pruned or deleted here since it was imported; import into another store"
                self._findings.skip(entry.where, why)
            elif self._continued_here:
                left_out += 1
            else:
                self._save(entry)
            if entry.checkpoint is not None and not entry.verified:
                self.unverified.append(entry.where)
        if left_out:
            why = f"its head was not imported, so {left_out} new checkpoints were left out"
            self._findings.skip(
                f"session {self._session.name!r}", f"{why}; import into another store"
            )
        if last is None:
            stored = [entry for entry in entries if entry.checkpoint is not None]
            last = max(stored, key=lambda entry: entry.order, default=None)
        if last is not None and last.checkpoint is not None:
            self._move_head(last.checkpoint, newest)

    def _move_head(self, target: Checkpoint, newest: int) -> None:
        """Rewind to `target` if this import saved something, or if the user did not move the head.

        The user did not move it if it is at the `newest` checkpoint of earlier imports.
        """
        if self._head is None or target.id == self._head.id or self._continued_here:
            return
        if self.new or target.seq < self._head.seq == newest:
            self._session.rewind(target.id)

    def _pruned(self, entries: Sequence[Entry]) -> set[Entry]:
        """Return the entries that an earlier import saved and that are not in the store any more.

        A missing entry was pruned in two cases: it is an ancestor of a stored checkpoint that lost
        its parent, or it is older than the newest stored entry and has no stored descendants. Any
        other entry is new, for example because its file was damaged until now.
        """
        if not self._has_gaps:
            return set()
        stored = [(entry, entry.checkpoint) for entry in entries if entry.checkpoint is not None]
        pruned: set[Entry] = set()
        ancestors: set[Entry] = set()
        for entry, checkpoint in stored:
            orphan = checkpoint.parent is not None and checkpoint.parent not in self._ids
            seen = pruned if orphan else ancestors
            above = entry.parent
            while above is not None and above.checkpoint is None and above not in seen:
                seen.add(above)
                ancestors.add(above)
                above = above.parent
        newest = max([entry.order for entry, _ in stored], default=())
        older = {e for e in entries if e.checkpoint is None and e.order < newest}
        return pruned | (older - ancestors)

    def _save(self, entry: Entry) -> None:
        """Save an entry below the nearest of its ancestors that the store has, or else the head."""
        ancestor = entry.parent
        while ancestor is not None and ancestor.checkpoint is None:
            ancestor = ancestor.parent
        above = self._head if ancestor is None else ancestor.checkpoint
        key, _ = self.find(entry.key, entry.digest)
        try:
            content = entry.content(above)
            saved = self._commit(entry, key, content, above)
        except (Unsound, NotSerializable, InvalidRequest) as e:
            self._findings.skip(entry.where, e.message)
            return
        except KeyTaken:
            why = f"another checkpoint has the key {key!r}"
            self._findings.skip(
                entry.where, f"{why}: if you deleted an imported one, undo() that, or gc()"
            )
            return
        self.new += 1
        self._head = entry.checkpoint = self._imported[key] = saved
        if above is not None and (entry.parent is None or entry.names_parent):
            self._report_other_parent(entry, ancestor, above)

    def _commit(
        self, entry: Entry, key: str, content: Content, above: Checkpoint | None
    ) -> Checkpoint:
        if content.agent is not None and content.agent != self._session.agent:
            name, agent = self._session.name, content.agent
            self._session = self._store.session(name, agent=agent, parent=self._parent_session)
        meta = content.fields["meta"]
        note = {"format": self.format, "where": entry.where, "sha256": entry.digest}
        note |= meta.get(PROVENANCE, {})
        fields = content.fields | {"key": key, "meta": meta | {PROVENANCE: note}}
        at_head = above is None or (self._head is not None and above.id == self._head.id)
        elsewhere = None if above is None or at_head else above.id
        if content.appended is None:
            return self._session.save(content.state, parent=elsewhere, **fields)
        if elsewhere is not None:
            self._session.rewind(elsewhere)
        return self._session.append("messages", *content.appended, **fields)

    def _report_other_parent(self, entry: Entry, ancestor: Entry | None, above: Checkpoint) -> None:
        if entry.parent is None:
            why = "the source has no checkpoint before it"
        elif ancestor is not entry.parent:
            why = f"its parent ({entry.parent.where}) was not imported"
        else:
            return
        self._findings.skip(entry.where, f"{why}; it follows {above.id}")
