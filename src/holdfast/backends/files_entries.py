"""What commits and gc add to the log of a session: the facts of one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import ids
from holdfast.backends import files_text as text
from holdfast.codec import rows
from holdfast.codec.records import position

if TYPE_CHECKING:
    from holdfast.backends.base import Change, Notes, Sweep


def entry_of(change: Change, notes: Notes, ends: list[list[int]]) -> dict[str, Any]:
    """What a commit adds to the log. `ends` are streams, and where they end from now on."""
    session = change.session
    entry: dict[str, Any] = {}
    if change.create is not None:
        name, row = change.create
        entry["create"] = [session, text.show_name(name), text.show_row(row)]
    if notes.origin is not None:
        entry["origin"] = list(notes.origin)
    if change.checkpoint is not None:
        seq, id, _ = change.checkpoint
        entry["checkpoint"] = [seq, ids.to_text(id)]
    entry["head"] = text.show_row(change.head)
    if ends:
        entry["streams"] = ends
    if change.notes is not None:
        entry |= _show_notes(notes, session, change.checkpoint)
    return entry


def _show_notes(
    notes: Notes, session: int, checkpoint: tuple[int, bytes, bytes] | None
) -> dict[str, Any]:
    name, row = text.show_name, text.show_row
    keys = [(notes.key, checkpoint[0])] if notes.key is not None and checkpoint else []
    found: dict[str, Any] = {
        "keys": [[name(key), seq] for key, seq in [*keys, *notes.keys]],
        "unmarks": [[seq, kind, name(value)] for seq, kind, value in notes.unmarks],
        "marks": [[seq, kind, name(value), row(body)] for seq, kind, value, body in notes.marks],
        "tombs": [[seq, row(body)] for seq, body in notes.tombs],
        "untombs": list(notes.untombs),
        "unfacets": [[kind, name(value), show_id(id)] for kind, value, id in notes.unfacets],
        "facets": [[kind, name(value), show_id(id)] for kind, value, id in notes.facets],
    }
    copied = notes.copied
    if copied is not None:
        found["checkpoints"] = [[seq, ids.to_text(id)] for seq, id, _ in copied.checkpoints]
        found["operations"] = [_show_operation(session, *each) for each in copied.operations]
        found["gaps"] = [
            [seq, ancestor, row(text.plain(rows.GAP, position(session, seq), body))]
            for seq, ancestor, body in copied.gaps
        ]
        found["journal"] = copied.journal_from
    if notes.rename is not None:
        found["rename"] = [name(notes.rename[0]), row(notes.rename[1])]
    if notes.lease is not None:
        token, body = notes.lease
        found["lease"] = [token.hex(), row(text.plain(rows.LEASE, session, body))]
    if notes.operation is not None:
        found["operation"] = _show_operation(session, *notes.operation)
    return {what: facts for what, facts in found.items() if facts}


def _show_operation(session: int, number: int, body: bytes) -> list[Any]:
    body = text.plain(rows.OPERATION, position(session, number), body)
    return [number, text.show_row(body)]


def sweep_entry(sweep: Sweep, mark: str) -> dict[str, Any]:
    """What gc writes into the log of the session that it frees checkpoints of."""
    entry: dict[str, Any] = {
        "sweep": mark,
        "freed": [seq for seq, _ in sweep.checkpoints],
        "unkeys": [text.show_name(key) for key in sweep.keys],
        "unfacets": [[k, text.show_name(value), show_id(id)] for k, value, id in sweep.facets],
        "gaps": gaps_of(sweep, sweep.session),
        "journal": sweep.journal,
    }
    return entry if sweep.remove is None else {**entry, "removed": True}


def gaps_of(sweep: Sweep, session: int) -> list[Any]:
    out = []
    for other, seq, ancestor, body in sweep.gaps:
        if other == session:
            body = text.plain(rows.GAP, position(session, seq), body)
            out.append([seq, ancestor, text.show_row(body)])
    return out


def show_id(id: bytes) -> str:
    """Of a checkpoint; or, shorter, the number of a session."""
    return ids.to_text(id) if len(id) == ids.BYTES else id.hex()


def hide_id(shown: str) -> bytes:
    if len(shown) != ids.CHARS:
        return bytes.fromhex(shown)
    id = ids.from_text(shown)
    if id is None:
        raise ValueError(shown)
    return id
