"""Revisions: find the checkpoint that a text names, such as `@~3`, `label:draft` or an id."""

from __future__ import annotations

from functools import partialmethod
from typing import TYPE_CHECKING

from holdfast import ids
from holdfast.errors import AmbiguousRevision, CheckpointNotFound, Corrupt, InvalidRequest
from holdfast.format import records
from holdfast.format.records import LABEL, TAG
from holdfast.history.lineage import (
    ancestors,
    family,
    forked_at,
    is_checkpoint_deleted,
    read_head,
    read_row,
    session_name,
)
from holdfast.storage.rows import PAGE, Address, IdRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from holdfast.history.checkpoint import Checkpoint
    from holdfast.model import Record
    from holdfast.storage.reader import Reader

_MAX_DIGITS = 20
_SHORTEST_ID = 8
_LISTED = 5
"""How many candidates an error message names."""


class Resolver:
    """Finds the checkpoint that a revision names in one session."""

    def __init__(self, reader: Reader, session: int, name: str) -> None:
        self._reader, self._session, self._name = reader, session, name

    def find(self, revision: str) -> Address:
        if not isinstance(revision, str) or not revision:
            raise InvalidRequest(f"not a revision: {revision!r}", hint="see docs: Revisions")
        full = ids.from_text(revision)
        if full is not None and (place := self._by_id(full)) is not None:
            return place
        if revision.startswith("@"):
            return self._relative(revision)
        kind, colon, rest = revision.partition(":")
        if colon and kind in ("label", "tag", "key", "step"):
            place = getattr(self, f"_by_{kind}")(rest)
            if place is None:
                if kind in ("label", "tag"):
                    self._refuse_elsewhere(LABEL if kind == "label" else TAG, rest)
                where = "" if kind == "key" else "among the ancestors of the head of "
                raise CheckpointNotFound(
                    f"no checkpoint with {kind} {rest!r} {where or 'in '}session {self._name!r}"
                )
            return place  # type: ignore[no-any-return]
        if (place := self._by_label(revision)) is not None:
            return place
        return self._by_prefix(revision)

    def _refuse_elsewhere(self, kind: int, value: str) -> None:
        """Raise CheckpointNotFound, with the id as a hint, if another branch has this mark."""
        for place in self._marks(kind, value):
            row = self._reader.checkpoint(*place)
            if row is None or is_checkpoint_deleted(self._reader, place):
                continue
            home = f"session {session_name(self._reader, place.session)!r}"
            branch = "another branch" if place.session == self._session else f"a branch of {home}"
            raise CheckpointNotFound(
                f"the {'label' if kind == LABEL else 'tag'} {value!r} is on {branch}, "
                f"not among the ancestors of the head of session {self._name!r}",
                hint=f"give the id of its checkpoint: {ids.to_text(row.id)}",
            )

    def _line(self) -> Iterator[tuple[Address, Record]]:
        """Yield the head and its ancestors.

        Raises Corrupt where damage hides the next ancestor: a wrong answer would be worse.
        """
        _, head = read_head(self._reader, self._session)
        start = Address(self._session, head.seq) if head.seq else None
        for place, record in ancestors(self._reader, start, head.parent):
            yield place, record
            if record.damaged and record.parent_seq is None:
                if place.seq == 1:  # raises if the session's row is damaged too
                    forked_at(self._reader, place.session)
                    continue
                raise Corrupt(
                    f"what lies behind checkpoint {place.seq} is unknown: {record.damaged}"
                )

    def _by_id(self, raw: bytes) -> Address | None:
        for row in self._reader.find_ids(raw, raw, 1):
            place = row.address
            _check_id(self._reader, place, raw)
            if place.session == self._session:
                return self._living(place)
            if any(p == place for p, _ in self._line()):
                return place
            other = session_name(self._reader, place.session)
            raise CheckpointNotFound(
                f"checkpoint {ids.to_text(raw)} belongs to another session, {other!r}"
            )
        return None

    def _living(self, place: Address) -> Address:
        if is_checkpoint_deleted(self._reader, place):
            raise CheckpointNotFound(
                f"checkpoint {place.seq} of session {self._name!r} was deleted",
                hint="undo() brings it back until gc() has freed it",
            )
        return place

    def _relative(self, revision: str) -> Address:
        back = revision[2:] if revision.startswith("@~") else "0" if revision == "@" else ""
        wanted = _number(back)
        if wanted is None:
            raise InvalidRequest(f"not a revision: {revision!r}", hint="use @ or @~3")
        for n, (place, _) in enumerate(self._line()):
            if n == wanted:
                return place
        raise CheckpointNotFound(f"session {self._name!r} has no checkpoint {revision}")

    def _marks(self, kind: int, value: str) -> dict[Address, bytes]:
        """Return the rows of a mark in this session and in the sessions that it was forked from."""
        raw = records.encode_name(value)
        return {
            Address(session, mark.seq): mark.body
            for session in family(self._reader, self._session)
            for mark in self._reader.find_marks(session, kind, raw)
        }

    def _marked(self, kind: int, value: str) -> Address | None:
        marked = self._marks(kind, value)
        if not marked:
            return None
        raw = records.encode_name(value)
        for place, _ in self._line():
            if place in marked:
                records.unseal_mark(records.position(*place), kind, raw, marked[place])
                return place
        return None

    _by_label = partialmethod(_marked, LABEL)
    _by_tag = partialmethod(_marked, TAG)

    def _by_key(self, value: str) -> Address | None:
        seq = self._reader.find_key(self._session, records.encode_name(value))
        if seq is None:
            return None
        place = Address(self._session, seq)
        if read_row(self._reader, place).record.extra.get("key") != value:
            raise Corrupt(f"the index of keys names the wrong checkpoint for {value!r}")
        return self._living(place)

    def _by_step(self, value: str) -> Address | None:
        wanted = _number(value)
        if wanted is None:
            raise InvalidRequest(f"not a step: {value!r}", hint="use step:12")
        return next((p for p, r in self._line() if r.step == wanted and not r.damaged), None)

    def _by_prefix(self, prefix: str) -> Address:
        mine = (at for at in _beginning(self._reader, prefix) if at[0] == self._session)
        found = _only(self._reader, mine, prefix, f" in session {self._name!r}")
        if found is None:
            self._refuse_elsewhere(LABEL, prefix)
            raise CheckpointNotFound(f"session {self._name!r} has no checkpoint {prefix!r}")
        return self._living(found)


def check_own(reader: Reader, session: int, place: Address) -> Address:
    """Return `place`. Raises InvalidRequest if it is in another session."""
    if place.session != session:
        home = session_name(reader, place.session)
        raise InvalidRequest(
            f"that checkpoint lies in session {home!r}, from which this one was forked",
            hint="use a handle of that session, or fork() from there",
        )
    return place


def _number(text: str) -> int | None:
    """Return the number, or None. At most 20 digits: Python refuses to parse very long numbers."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def id_length(reader: Reader, checkpoints: Iterable[Checkpoint]) -> int:
    """Return how many characters of an id are enough to name each of these in the store."""
    length = _SHORTEST_ID
    for checkpoint in checkpoints:
        while length < ids.CHARS:
            bounds = ids.prefix_range(checkpoint.id[:length])
            if bounds is None or len(reader.find_ids(*bounds, 2)) < 2:
                break
            length += 1
    return length


def find_in_store(reader: Reader, revision: str) -> Address:
    """Return the checkpoint with this id, or beginning of an id; see Store.get."""
    found = None
    if isinstance(revision, str):
        found = _only(reader, _beginning(reader, revision), revision, "")
    if found is None:
        raise CheckpointNotFound(f"the store has no checkpoint {revision!r}")
    if is_checkpoint_deleted(reader, found):
        raise CheckpointNotFound(f"the checkpoint {revision!r} was deleted", hint="undo()")
    return found


def _beginning(reader: Reader, prefix: str) -> Iterator[IdRow]:
    """Yield the checkpoints whose ids begin with a prefix, in the order of the ids.

    Reads all pages, because ids of many sessions begin alike: the only match in one session may
    come after any number of ids of other sessions.
    """
    bounds = ids.prefix_range(prefix)
    while bounds:
        low, high = bounds
        page = reader.find_ids(low, high, PAGE)
        yield from page
        last = page[-1].id if len(page) == PAGE else high
        bounds = (ids.after(last), high) if last < high else None


def _only(reader: Reader, found: Iterator[IdRow], prefix: str, where: str) -> Address | None:
    """Return the only match, or None. Deleted checkpoints count only if no other matches.

    Raises AmbiguousRevision if there are several.
    """
    living: list[IdRow] = []
    deleted: list[IdRow] = []
    for row in found:
        (deleted if is_checkpoint_deleted(reader, row.address) else living).append(row)
        if len(living) > _LISTED:
            break
    matches = living or deleted
    if len(matches) > 1:
        raise AmbiguousRevision(
            f"{prefix!r} begins more than one id{where}: "
            + _candidates([row.id for row in matches])
        )
    for row in matches:
        _check_id(reader, row.address, row.id)
        return row.address
    return None


def _candidates(found: list[bytes]) -> str:
    listed = [ids.to_text(id) for id in found[:_LISTED]]
    return ", ".join([*listed, "…"] if len(found) > _LISTED else listed)


def _check_id(reader: Reader, place: Address, id: bytes) -> None:
    """Raise Corrupt if the index of ids is damaged and named another checkpoint."""
    found = reader.checkpoint(*place)
    if found is not None and found.id != id:
        raise Corrupt(f"the index of ids names the wrong checkpoint for {ids.to_text(id)}")
