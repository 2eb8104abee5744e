"""Many states of one session, for little more than what they do not have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import ids, lineage
from holdfast.codec import load as loading
from holdfast.codec import records
from holdfast.lineage import Place
from holdfast.revisions import Resolver
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from holdfast.backends.base import Backend, Reader
    from holdfast.checkpoint import Checkpoint

_LIMIT = 64 << 20


class Series:
    """Loads states one after the other; an item of a list that several hold is read once.

    Each state is what `Session.load` gives: read in a view of its own, every byte checked. But the
    items of their lists, at any depth, are the same objects. They must not be changed: whoever
    hands states out makes copies. Not safe for threads.

    `limit` bounds the bytes in which the items that are kept for the next states are stored.
    """

    def __init__(self, backend: Backend, session: str, limit: int = _LIMIT) -> None:
        self._backend, self._name = backend, session
        self._known = loading.Known(limit)

    def load(self, checkpoint: Checkpoint) -> Any:
        with self._backend.reader() as reader:
            row = self._row(reader, checkpoint)
            source = StoredSource(self._backend, reader)
            return loading.load(row.root, row.record.size, source, self._known)

    def _row(self, reader: Reader, checkpoint: Checkpoint) -> records.Row:
        number = lineage.find_session(reader, self._name)
        place = Place(number, checkpoint.seq)
        found = reader.checkpoint(*place)
        if (
            found is None
            or found[0] != ids.from_text(checkpoint.id)
            or lineage.is_buried(reader, place)
        ):  # it lies in a session that this one was forked from, or it is gone: this tells
            place = Resolver(reader, number, self._name).find(checkpoint.id)
            return lineage.read_row(reader, place)
        return records.unseal_checkpoint(*place, *found)
