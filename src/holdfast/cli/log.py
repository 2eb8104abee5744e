"""`holdfast log`: the tree of checkpoints.

It reads from the backend alone: most of a store's import would take longer than drawing a screen.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from holdfast import ids, lineage
from holdfast.cli import naming, words
from holdfast.cli.app import App, command
from holdfast.cli.completing import complete_sessions
from holdfast.cli.drawing import NODE, Lanes
from holdfast.codec import records
from holdfast.errors import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.base import Backend
    from holdfast.checkpoint import Checkpoint

_HEAD, _DAMAGED = "◉", "✗"
_PAGE = 200
_HIGHEST = b"\xff" * (ids.BYTES + 1)


@command("log")
@click.argument("session", required=False, shell_complete=complete_sessions)
@click.option("--all", "-a", "everything", is_flag=True, help="Every session, from its first step.")
@click.option(
    "--limit", "-n", type=click.IntRange(0), default=30, show_default=True,
    help="How many checkpoints of a session; 0 for all.",
)  # fmt: skip
def log_(app: App, session: str | None, limit: int, *, everything: bool) -> None:
    """Draw the tree of checkpoints, the newest first.

    Without SESSION: the sessions that were active last. ◉ is where a session's head is, ↳ names
    the sessions that were forked from a checkpoint, ⏸ calls without a result.
    """
    with app.backend() as backend:
        if session is not None:
            names = iter([session])
            if not _exists(backend, session):
                with app.store() as store:
                    naming.the_session(store, session)  # says what is near
        elif everything:
            names, limit = _all(backend), 0
        else:
            names = _active(backend, limit)
        empty = True
        for name in names:
            _log(app, backend, name, limit, first=empty)
            empty = False
        if empty:
            app.note("The store has no session yet.")


def _exists(backend: Backend, name: str) -> bool:
    with backend.reader() as reader:
        return reader.session(records.encode_name(name)) is not None


def _all(backend: Backend) -> Iterator[str]:
    after: bytes | None = None
    while True:
        with backend.reader() as reader:
            rows = reader.sessions(after, _PAGE)
        for number, raw, _ in rows:
            if records.former_name(number, raw) is None:
                yield records.shown_name(raw)
        if not rows:
            return
        after = rows[-1][1]


def _active(backend: Backend, limit: int) -> Iterator[str]:
    """The sessions of the newest checkpoints, as many as are in so many of them."""
    names: dict[str, None] = {}
    with backend.reader() as reader:
        for number, _, _ in reader.newest_ids(b"", _HIGHEST, limit or _PAGE):
            found = reader.session_by_number(number)
            if found is not None and records.former_name(number, found[0]) is None:
                names[records.shown_name(found[0])] = None
    return iter(names)


def _log(app: App, backend: Backend, name: str, limit: int, *, first: bool) -> None:
    raw = records.encode_name(name)
    rows = lineage.tree(backend, raw, name, newest_first=True)
    shown = list(islice(rows, limit or None))
    more = next(rows, None) is not None
    forks = lineage.forks(backend, raw)
    head, agent, damaged = _head(backend, raw)
    if app.json:
        from holdfast import shapes

        for c in shown:
            app.emit(
                shapes.checkpoint(c) | {"is_head": c.seq == head, "forks": forks.get(c.seq, [])}
            )
        return
    if not first:
        app.say()
    by = [f"({words.one_line(agent)})"] if agent else []
    title = [click.style(words.one_line(name), bold=True), *by]
    if damaged:
        title.append(click.style(f" damaged: {words.one_line(damaged)}", fg="red"))
    app.say(" ".join(title))
    length = naming.short_length(backend, shown)
    lanes = Lanes()
    width = 0
    for c in shown:
        for graph, text in _rows(lanes, c, forks.get(c.seq, []), length, is_head=c.seq == head):
            width = max(width, len(graph))
            app.say(f"{graph.ljust(width)}  {text}".rstrip())
    if more:
        app.say(f"{lanes.cut()}  more; --limit 0 shows all")


def _head(backend: Backend, raw: bytes) -> tuple[int, str | None, str | None]:
    """The seq of the head (0 if nothing tells), the session's agent, and why one is not known."""
    seq, agent, damaged = 0, None, None
    with backend.reader() as reader:
        found = reader.session(raw)
        try:
            if found is not None:
                seq = lineage.read_head(reader, found[0])[1].seq
                agent = records.unseal_session(found[0], raw, found[1]).agent
        except UNREADABLE as e:
            damaged = e.message
    return seq, agent, damaged


def _rows(
    lanes: Lanes, c: Checkpoint, forks: list[str], length: int, *, is_head: bool
) -> Iterator[tuple[str, str]]:
    """What is drawn for a checkpoint: the lanes, and what is said beside them."""
    glyph = _DAMAGED if c.damaged else _HEAD if is_head else NODE
    elsewhere = c.parent_session not in (None, c.session) if not c.damaged else False
    parent = None if c.damaged or elsewhere else c.ancestor
    *joints, own = lanes.row(c.id, parent, glyph)
    for joint in joints:
        yield joint, ""
    yield own, words.line(c, length, forks=forks, head=is_head)
    if c.damaged:
        return
    if c.pruned:
        gone = words.plural(c.pruned, "checkpoint")
        yield lanes.below(), click.style(f"{gone} pruned", dim=True)
    if elsewhere and c.parent:
        text = f"↳ from {words.one_line(str(c.parent_session))} at {c.parent[:length]}"
        yield lanes.below("╵"), click.style(text, fg="magenta")
