"""Threads that holdfast has forked: what they have from the thread that they were forked from."""

from __future__ import annotations

from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from holdfast import lineage
from holdfast.adapters.langgraph.naming import AGENT, EVER, Where, id_of, is_fork, own_of
from holdfast.codec import records
from holdfast.errors import CheckpointNotFound, SessionExists, SessionNotFound
from holdfast.runs import notes
from holdfast.series import Series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.checkpoint import Checkpoint
    from holdfast.lineage import Place
    from holdfast.session import Session
    from holdfast.store import Store


class Stem:
    """The session of a thread, or of one of its namespaces, and what lies before it."""

    def __init__(self, store: Store, where: Where) -> None:
        self.where = where
        above = Where(where.thread, "").session if where.ns else None
        self.session: Session = store.session(where.session, agent=AGENT, parent=above)
        self.notes = notes.Notes(store.backend, where.session)
        self._backend = store.backend
        self._raw = records.encode_name(where.session)
        self.origin: Callable[[], Checkpoint | None] = lambda: None
        """What it begins with until it has a session: a subgraph of a fork, before it goes on."""

    def is_own(self, checkpoint: Checkpoint) -> bool:
        """Whether it lies in this session, and not in one that this was forked from."""
        return checkpoint.session == self.session.name

    def notes_in(self, session: str) -> notes.Notes:
        return self.notes if session == self.session.name else notes.Notes(self._backend, session)

    def load(self, checkpoint: Checkpoint) -> Any:
        if self.is_own(checkpoint):
            return self.session.load(checkpoint)
        return Series(self._backend, checkpoint.session).load(checkpoint)

    def series(self) -> Callable[[Checkpoint], Any]:
        """To load many of its states."""
        series: dict[str, Series] = {}

        def load(checkpoint: Checkpoint) -> Any:
            home = checkpoint.session
            if home not in series:
                series[home] = Series(self._backend, home)
            return series[home].load(checkpoint)

        return load

    def find(self, id: str) -> Checkpoint | None:
        with suppress(CheckpointNotFound, SessionNotFound):
            return checked(self.session.get(f"key:{id}"))
        for checkpoint in self.inherited():
            if checkpoint.key == id:
                return checkpoint
            if own_of(checkpoint)["highest"] < id:
                break
        return None

    def finder(self) -> Callable[[str], Checkpoint | None]:
        """`find` for many: what is inherited is read once."""
        inherited: dict[str, Checkpoint] = {}

        def find(id: str) -> Checkpoint | None:
            if not inherited:
                found = self.find(id)
                if found is not None and not self.is_own(found):
                    inherited.update({id_of(c): c for c in self.inherited()})
                return found
            with suppress(CheckpointNotFound, SessionNotFound):
                return checked(self.session.get(f"key:{id}"))
            return inherited.get(id)

        return find

    def above(self) -> Iterator[Checkpoint]:
        """The first checkpoint of a fork, and those before it, in other sessions."""
        at = self._begin()
        while at is not None:
            with self._backend.reader() as reader:
                page, at = lineage.page(reader, at)
            yield from page

    def _begin(self) -> Place | None:
        """Where a fork begins; None if it is none."""
        with self._backend.reader() as reader:
            if found := reader.session(self._raw):
                row = reader.session_by_number(found[0])
                if not row or records.unseal_session(found[0], *row).origin is None:
                    return None
                oldest = reader.checkpoints(found[0], 1, records.MAX_SEQ, 1)
                return lineage.Place(found[0], oldest[0][0]) if oldest else None
        if (at := self.origin()) is None:
            return None
        with self._backend.reader() as reader:
            return lineage.Place(lineage.find_session(reader, at.session), at.seq)

    def is_forked(self) -> bool:
        return self._begin() is not None

    def begin(self) -> bool:
        """Have the session of a subgraph of a fork; False if nothing was there to be forked."""
        at = None if self.session.exists() else self.origin()
        if at is None:
            return False
        with suppress(SessionExists):  # somebody else was faster
            self.session.store.session(at.session, agent=AGENT).fork(self.session.name, at)
        return True

    def inherited(self) -> Iterator[Checkpoint]:
        """What a fork has from the thread that it was forked from, the newest first."""
        seen = set[str]()
        for checkpoint in self.above():
            if self.is_own(checkpoint) or is_fork(checkpoint):
                continue
            if checked(checkpoint).key and checkpoint.key not in seen:
                seen.add(id_of(checkpoint))
                yield checkpoint

    def point(self) -> Checkpoint | None:
        """The checkpoint that a fork begins with; None if it is none."""
        fork = None
        for checkpoint in self.above():
            if fork is not None and checkpoint.id != fork.parent:
                break
            if not is_fork(checkpoint):
                return checked(checkpoint)
            fork = checkpoint
        if fork is None:
            return None
        raise CheckpointNotFound(
            f"what thread {self.where.thread!r} begins with was deleted in session "
            f"{fork.parent_session!r}",
            hint="undo() there brings it back, until gc() has freed it",
        )

    def until(self) -> int:
        """When its thread was forked: what its origin did later is not the fork's."""
        thread = Stem(self.session.store, Where(self.where.thread, "")) if self.where.ns else self
        return min((c._record.created_us for c in thread.stands()), default=EVER)

    def stands(self) -> list[Checkpoint]:
        """What stands in a fork for the checkpoint it begins with; of a fork's fork, two."""
        return [*takewhile(is_fork, self.above())]

    def check(self) -> None:
        """Raise if it is a fork that has lost what it begins with."""
        head = self.session.head
        if head is not None and is_fork(head):
            self.point()

    def own(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What one says of itself, or of the one that it stands for."""
        return own_of(self.point() or checkpoint if is_fork(checkpoint) else checkpoint)

    def forks(self) -> list[str]:
        """The sessions that were forked from it."""
        found = lineage.forks(self._backend, self._raw)
        return [name for names in found.values() for name in names]


def checked(checkpoint: Checkpoint) -> Checkpoint:
    own_of(checkpoint)
    return checkpoint
