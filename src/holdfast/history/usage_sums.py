"""Sum up the usage of many sessions: by session, agent, model or day."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.errors import InvalidRequest, SessionNotFound
from holdfast.format import records
from holdfast.history.sessions import describe, may_match, sessions
from holdfast.history.token_usage import charges
from holdfast.model import Usage, time_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.history.checkpoint import SessionInfo
    from holdfast.history.filters import Query
    from holdfast.storage.repository import Repository

KINDS = ("session", "agent", "model", "day")


def usage_sums(
    repository: Repository, by: str, session: str | None, query: Query
) -> dict[str | None, Usage]:
    """Return the usage by `by`; see Store.usage."""
    if by not in KINDS:
        raise InvalidRequest(f"usage by {by!r} is not known", hint=", ".join(KINDS))
    query.check()
    out: dict[str | None, Usage] = {}
    for info in _sessions(repository, session, query):
        with repository.reader() as reader:
            found = reader.session(records.encode_name(info.name))
            spent = (
                []
                if found is None
                else [*charges(reader, found.number, adopted=session is not None)]
            )
        for _, usage, at_us in spent:
            at = time_of(at_us)
            if (query.since and at < query.since) or (query.until and at >= query.until):
                continue
            for model, part in usage.by_model().items():
                keys = {"session": info.name, "agent": info.agent, "model": model}
                key = keys.get(by, f"{at:%Y-%m-%d}")
                out[key] = out.get(key, Usage()) + part
    return dict(sorted(out.items(), key=lambda item: item[0] or ""))


def _sessions(repository: Repository, name: str | None, query: Query) -> Iterator[SessionInfo]:
    """Yield the sessions that match. The times of the query do not concern their heads."""
    heads = replace(query, since=None, until=None)
    if name is None:
        yield from sessions(repository, heads, None)
        return
    with repository.reader() as reader:
        row = reader.session(records.encode_name(name))
        if row is None:
            raise SessionNotFound(f"there is no session {name!r}")
        info = describe(reader, row)
    if may_match(info, heads):
        yield info
