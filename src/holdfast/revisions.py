"""Revisions: the ways to name a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import ids
from holdfast.codec import records
from holdfast.codec.records import LABEL, TAG
from holdfast.errors import AmbiguousRevision, CheckpointNotFound, Corrupt, InvalidRequest
from holdfast.lineage import (
    Place,
    ancestors,
    family,
    forked_at,
    is_buried,
    read_head,
    read_row,
    session_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.base import Reader
    from holdfast.model import Record

    Found = tuple[int, int, bytes]
    """session, seq and id"""

_PAGE = 1_000
"""So many ids are asked for at a time."""
_MAX_DIGITS = 20
_LISTED = 5
"""So many candidates are named."""


class Resolver:
    """Finds the checkpoint that a revision names, for one session."""

    def __init__(self, reader: Reader, session: int, name: str) -> None:
        self._reader, self._session, self._name = reader, session, name

    def find(self, revision: str) -> Place:
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
                where = "" if kind == "key" else "among the ancestors of the head of "
                raise CheckpointNotFound(
                    f"no checkpoint with {kind} {rest!r} {where or 'in '}session {self._name!r}"
                )
            return place  # type: ignore[no-any-return]
        if (place := self._by_label(revision)) is not None:
            return place
        return self._by_prefix(revision)

    def _line(self) -> Iterator[tuple[Place, Record]]:
        """The head's ancestors, to the last that is certain."""
        _, head = read_head(self._reader, self._session)
        start = Place(self._session, head.seq) if head.seq else None
        for place, record in ancestors(self._reader, start, head.parent):
            yield place, record
            if record.damaged and record.parent_seq is None:
                if place.seq == 1:  # then the session's row tells, if that is not damaged as well
                    forked_at(self._reader, place.session)
                    continue
                raise Corrupt(
                    f"what lies behind checkpoint {place.seq} is unknown: {record.damaged}"
                )

    def _by_id(self, raw: bytes) -> Place | None:
        for session, seq, _ in self._reader.find_ids(raw, raw, 1):
            place = Place(session, seq)
            _check_id(self._reader, place, raw)
            if session == self._session:
                return self._living(place)
            if any(p == place for p, _ in self._line()):
                return place
            other = session_name(self._reader, session)
            raise CheckpointNotFound(
                f"checkpoint {ids.to_text(raw)} belongs to another session, {other!r}"
            )
        return None

    def _living(self, place: Place) -> Place:
        if is_buried(self._reader, place):
            raise CheckpointNotFound(
                f"checkpoint {place.seq} of session {self._name!r} was deleted",
                hint="undo() brings it back until gc() has freed it",
            )
        return place

    def _relative(self, revision: str) -> Place:
        back = revision[2:] if revision.startswith("@~") else "0" if revision == "@" else ""
        wanted = _number(back)
        if wanted is None:
            raise InvalidRequest(f"not a revision: {revision!r}", hint="use @ or @~3")
        for n, (place, _) in enumerate(self._line()):
            if n == wanted:
                return place
        raise CheckpointNotFound(f"session {self._name!r} has no checkpoint {revision}")

    def _marked(self, kind: int, value: str) -> Place | None:
        raw = records.encode_name(value)
        marked = {
            Place(session, seq): body
            for session in family(self._reader, self._session)
            for seq, body in self._reader.find_marks(session, kind, raw)
        }
        if not marked:
            return None
        for place, _ in self._line():
            if place in marked:
                records.unseal_mark(records.position(*place), kind, raw, marked[place])
                return place
        return None

    def _by_label(self, value: str) -> Place | None:
        return self._marked(LABEL, value)

    def _by_tag(self, value: str) -> Place | None:
        return self._marked(TAG, value)

    def _by_key(self, value: str) -> Place | None:
        seq = self._reader.find_key(self._session, records.encode_name(value))
        if seq is None:
            return None
        place = Place(self._session, seq)
        if read_row(self._reader, place).record.extra.get("key") != value:
            raise Corrupt(f"the index of keys names the wrong checkpoint for {value!r}")
        return self._living(place)

    def _by_step(self, value: str) -> Place | None:
        wanted = _number(value)
        if wanted is None:
            raise InvalidRequest(f"not a step: {value!r}", hint="use step:12")
        return next((p for p, r in self._line() if r.step == wanted and not r.damaged), None)

    def _by_prefix(self, prefix: str) -> Place:
        mine = (at for at in _beginning(self._reader, prefix) if at[0] == self._session)
        found = _only(self._reader, mine, prefix, f" in session {self._name!r}")
        if found is None:
            raise CheckpointNotFound(f"session {self._name!r} has no checkpoint {prefix!r}")
        return self._living(found)


def check_own(reader: Reader, session: int, place: Place) -> Place:
    """Refuse a checkpoint of the session that this one was forked from."""
    if place.session != session:
        home = session_name(reader, place.session)
        raise InvalidRequest(
            f"that checkpoint lies in session {home!r}, from which this one was forked",
            hint="use a handle of that session, or fork() from there",
        )
    return place


def _number(text: str) -> int | None:
    """Python refuses to read very long ones."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def find_in_store(reader: Reader, revision: str) -> Place:
    """A checkpoint of any session, by id or prefix."""
    found = None
    if isinstance(revision, str):
        found = _only(reader, _beginning(reader, revision), revision, "")
    if found is None:
        raise CheckpointNotFound(f"the store has no checkpoint {revision!r}")
    if is_buried(reader, found):
        raise CheckpointNotFound(f"the checkpoint {revision!r} was deleted", hint="undo()")
    return found


def _beginning(reader: Reader, prefix: str) -> Iterator[Found]:
    """The checkpoints whose ids begin with a prefix, by id.

    Page by page to the end: sessions share the beginnings of ids, and one session's only match may
    come behind any number of others'.
    """
    bounds = ids.prefix_range(prefix)
    while bounds:
        low, high = bounds
        page = reader.find_ids(low, high, _PAGE)
        yield from page
        last = page[-1][2] if len(page) == _PAGE else high
        bounds = (ids.after(last), high) if last < high else None


def _only(reader: Reader, found: Iterator[Found], prefix: str, where: str) -> Place | None:
    """The one that is meant: what is deleted only counts where nothing else matches."""
    living: list[Found] = []
    buried: list[Found] = []
    for at in found:
        (buried if is_buried(reader, Place(*at[:2])) else living).append(at)
        if len(living) > _LISTED:
            break
    matches = living or buried
    if len(matches) > 1:
        raise AmbiguousRevision(
            f"{prefix!r} begins more than one id{where}: "
            + _candidates([id for _, _, id in matches])
        )
    for session, seq, id in matches:
        _check_id(reader, Place(session, seq), id)
        return Place(session, seq)
    return None


def _candidates(found: list[bytes]) -> str:
    listed = [ids.to_text(id) for id in found[:_LISTED]]
    return ", ".join([*listed, "…"] if len(found) > _LISTED else listed)


def _check_id(reader: Reader, place: Place, id: bytes) -> None:
    """An index may be damaged: it has found a place, and that has to be the right one."""
    found = reader.checkpoint(*place)
    if found is not None and found[0] != id:
        raise Corrupt(f"the index of ids names the wrong checkpoint for {ids.to_text(id)}")
