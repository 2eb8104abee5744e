"""Load many states of one session. Items that they share are read once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import ids
from holdfast.format import load, records
from holdfast.history import lineage
from holdfast.history.revisions import Resolver
from holdfast.storage.reader import open_reader
from holdfast.storage.repository import StoredData
from holdfast.storage.rows import Address

if TYPE_CHECKING:
    from holdfast.history.checkpoint import Checkpoint
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader

_LIMIT = 64 << 20


class Series:
    """Loads states one after the other. A list item that several states share is read once.

    Each state equals the result of `Session.load`: it is read in a separate view, and every byte is
    checked. But states share the objects of equal list items, at any depth. So they must not be
    changed; code that passes states on has to copy them. Not safe for threads.

    `limit` bounds the stored size, in bytes, of the items that are kept for the next loads.
    """

    def __init__(self, backend: Backend, session: str, limit: int = _LIMIT) -> None:
        self._backend, self._name = backend, session
        self._known = load.Known(limit)

    def load(self, checkpoint: Checkpoint) -> Any:
        with open_reader(self._backend) as reader:
            row = self._row(reader, checkpoint)
            source = StoredData(self._backend, reader)
            return load.load(row.root, row.record.size, source, self._known)

    def _row(self, reader: Reader, checkpoint: Checkpoint) -> records.Row:
        number = lineage.find_session(reader, self._name)
        place = Address(number, checkpoint.seq)
        found = reader.checkpoint(*place)
        if (
            found is None
            or found.id != ids.from_text(checkpoint.id)
            or lineage.is_checkpoint_deleted(reader, place)
        ):  # in the session that this one was forked from, or deleted: then find() raises
            place = Resolver(reader, number, self._name).find(checkpoint.id)
            return lineage.read_row(reader, place)
        return records.unseal_checkpoint(place.session, *found)
