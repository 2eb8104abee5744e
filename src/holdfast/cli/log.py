"""`holdfast log`: the tree of checkpoints."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from holdfast import lineage, shapes
from holdfast.cli import naming, words
from holdfast.cli.app import App, command
from holdfast.cli.completing import complete_sessions
from holdfast.cli.drawing import NODE, Lanes
from holdfast.codec.records import encode_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast import Checkpoint, Session, Store

_HEAD, _DAMAGED = "◉", "✗"


@command("log")
@click.argument("session", required=False, shell_complete=complete_sessions)
@click.option("--all", "-a", "everything", is_flag=True, help="Every session, from its first step.")
@click.option(
    "--limit", "-n", type=click.IntRange(0), default=30, show_default=True,
    help="How many checkpoints of a session; 0 for all.",
)  # fmt: skip
def log_(app: App, session: str | None, limit: int, *, everything: bool) -> None:
    """Draw the tree of checkpoints, the newest first.

    Without SESSION: the sessions that were active last. ◉ is where a session's head is, ⑂ names
    the sessions that were forked from a checkpoint, ⏸ calls without a result.
    """
    with app.store() as store:
        if session is not None:
            chosen = iter([naming.the_session(store, session)])
        elif everything:
            chosen = (store.session(info.name) for info in store.sessions())
            limit = 0
        else:
            chosen = _active(store, limit)
        empty = True
        for each in chosen:
            _log(app, store, each, limit, first=empty)
            empty = False
        if empty:
            app.note("The store has no session yet.")


def _active(store: Store, limit: int) -> Iterator[Session]:
    """Those of the newest checkpoints, as many as are in so many of them."""
    names = dict.fromkeys(c.session for c in store.find(limit=limit or None))
    return (store.session(name) for name in names)


def _log(app: App, store: Store, session: Session, limit: int, *, first: bool) -> None:
    rows = session.tree(newest_first=True)
    shown = list(islice(rows, limit or None))
    more = next(rows, None) is not None
    forks = lineage.forks(store.backend, encode_name(session.name))
    head = session.head
    if app.json:
        for c in shown:
            place = {"is_head": c == head, "forks": forks.get(c.seq, [])}
            app.emit(shapes.checkpoint(c) | place)
        return
    if not first:
        app.say()
    app.say(_title(session, head))
    length = naming.short_length(store, shown)
    lanes = Lanes()
    width = 0
    for c in shown:
        for graph, text in _rows(lanes, c, head, forks.get(c.seq, []), length):
            width = max(width, len(graph))
            app.say(f"{graph.ljust(width)}  {text}".rstrip())
    if more:
        app.say(f"{lanes.cut()}  more; --limit 0 shows all")


def _title(session: Session, head: Checkpoint | None) -> str:
    parts = [click.style(session.name, bold=True)]
    agent = session.agent or (head.agent if head is not None and not head.damaged else None)
    if agent:
        parts.append(f"({agent})")
    return " ".join(parts)


def _rows(
    lanes: Lanes, c: Checkpoint, head: Checkpoint | None, forks: list[str], length: int
) -> Iterator[tuple[str, str]]:
    """What is drawn for a checkpoint: the lanes, and what is said beside them."""
    is_head = head is not None and c.id == head.id
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
        text = f"⑂ from {c.parent_session} at {c.parent[:length]}"
        yield lanes.below("╵"), click.style(text, fg="magenta")
