"""What a session has cost: along its path, on all branches, and with the sessions below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast import lineage
from holdfast.codec import records
from holdfast.codec.records import CHILD_OF
from holdfast.errors import UNREADABLE
from holdfast.lineage import Place
from holdfast.live import all_rows
from holdfast.model import Usage

if TYPE_CHECKING:
    from holdfast.backends.base import Reader

_PAGE = 500
_TOP = b"\xff" * 9


class Totals(NamedTuple):
    """Tokens and cost of a session. Nothing is counted twice."""

    path: Usage
    """Of the checkpoints of this session from its first one to its head."""
    inherited: Usage
    """Of those before: of the sessions that it was forked from."""
    spent: Usage
    """Of all checkpoints of this session, those on branches that were left as well."""
    children: Usage
    """What the sessions have spent whose parent this is, and theirs."""
    runs: dict[str, Usage]
    """Of what this session has spent: by the ids of its runs."""

    @property
    def total(self) -> Usage:
        return self.spent + self.children


def totals(reader: Reader, number: int, name: str) -> Totals:
    path = inherited = Usage()
    _, head = lineage.read_head(reader, number)
    at: Place | None = Place(number, head.seq) if head.seq else None
    while at is not None:
        page, following = lineage.page(reader, at, None)
        for checkpoint in page:
            if checkpoint.session == name:
                path += checkpoint.usage
            else:
                inherited += checkpoint.usage
        at = following
    spent, runs = _spent(reader, number)
    return Totals(path, inherited, spent, _children(reader, name, {number}), runs)


def _spent(reader: Reader, number: int) -> tuple[Usage, dict[str, Usage]]:
    """Of all checkpoints of a session, and of those of each run."""
    out = Usage()
    runs: dict[str, Usage] = {}
    for seq, id, body in all_rows(reader, number):
        try:
            extra = records.unseal_checkpoint(number, seq, id, body).record.extra
        except UNREADABLE:
            continue  # verify() tells of it
        usage = Usage(*extra.get("usage", (0, 0.0)))
        out += usage
        if "run" in extra:
            run = extra["run"][0]
            runs[run] = runs.get(run, Usage()) + usage
    return out, runs


def _children(reader: Reader, name: str, seen: set[int]) -> Usage:
    out = Usage()
    high = _TOP
    while page := reader.find_facets(CHILD_OF, records.encode_name(name), b"", high, _PAGE):
        for id in page:
            child = int.from_bytes(id, "big")
            found = reader.session_by_number(child)
            if child in seen or found is None:
                continue
            if records.former_name(child, found[0]) is not None:
                continue  # deleted
            seen.add(child)
            out += _spent(reader, child)[0]
            out += _children(reader, records.decode_name(found[0]), seen)
        high = page[-1]
    return out
