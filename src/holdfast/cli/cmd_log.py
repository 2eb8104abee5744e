"""`holdfast log`: the tree of checkpoints."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from holdfast.cli import output, select
from holdfast.cli.context import App, command
from holdfast.cli.output import NODE, Lanes
from holdfast.cli.select import session_argument

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from holdfast import Checkpoint, SessionInfo, Store

_HEAD, _DAMAGED = "◉", "✗"


@command("log", lists=True)
@session_argument("Draw only this session, the same as SESSION.")
@click.option("--all", "-a", "everything", is_flag=True, help="Draw every session, completely.")
@click.option(
    "--limit", "-n", type=click.IntRange(0), default=30, show_default=True,
    help="Checkpoints per session; 0 means all.",
)  # fmt: skip
def log_(app: App, session: str | None, limit: int, *, everything: bool) -> None:
    """Draw the tree of checkpoints, newest first.

    Without SESSION, draws the sessions with the newest checkpoints. ◉ marks the head of a session,
    ↳ names the sessions that were forked from a checkpoint, and ⏸ lists calls without a result.
    """
    with app.store() as store:
        found: Iterable[SessionInfo]
        if session is not None:
            found, limit = [select.the_session(store, session).info()], 0 if everything else limit
        elif everything:
            found, limit = store.sessions(), 0
        else:
            found = store.recent(limit) if limit else store.recent()
        empty = True
        for info in found:
            _draw(app, store, info, limit, first=empty)
            empty = False
        if empty:
            app.notice("The store has no session yet.")


def _draw(app: App, store: Store, info: SessionInfo, limit: int, *, first: bool) -> None:
    session = store.session(info.name)
    tree = session.tree(newest_first=True, summary=True)
    shown = list(islice(tree, limit or None))
    more = next(tree, None) is not None
    forks = session.forks()
    if app.json:
        from holdfast import json

        for c in shown:
            about = {"is_head": c.seq == info.head_seq, "forks": forks.get(c.seq, [])}
            app.print_json(json.checkpoint(c) | about)
        return
    if not first:
        app.print()
    title = [click.style(output.one_line(info.name), bold=True)]
    if info.agent:
        title.append(f"({output.one_line(info.agent)})")
    if info.damaged and all(c.damaged != info.damaged for c in shown):
        title.append(click.style(f" damaged: {output.one_line(info.damaged)}", fg="red"))
    app.print(" ".join(title))
    length = store.id_length(shown)
    lanes = Lanes()
    width = 0
    for c in shown:
        is_head = c.seq == info.head_seq
        for graph, text in _rows(lanes, c, forks.get(c.seq, []), length, is_head=is_head):
            width = max(width, len(graph))
            app.print(f"{graph.ljust(width)}  {text}".rstrip())
    if more:
        app.print(f"{lanes.cut()}  more; --limit 0 shows all")


def _rows(
    lanes: Lanes, c: Checkpoint, forks: list[str], length: int, *, is_head: bool
) -> Iterator[tuple[str, str]]:
    """Yield the rows of a checkpoint: the lanes, and the text beside them."""
    glyph = _DAMAGED if c.damaged else _HEAD if is_head else NODE
    is_fork = not c.damaged and c.parent_session not in (None, c.session)
    parent = None if c.damaged or is_fork else c.ancestor
    *joints, own = lanes.row(c.id, parent, glyph)
    for joint in joints:
        yield joint, ""
    indent = len(own) + 2
    yield own, output.checkpoint_line(c, length, forks=forks, head=is_head, indent=indent)
    if c.damaged:
        return
    if c.pruned:
        count = output.plural(c.pruned, "checkpoint")
        yield lanes.below(), click.style(f"{count} pruned", dim=True)
    if is_fork and c.parent:
        text = f"↳ from {output.one_line(str(c.parent_session))} at {c.parent[:length]}"
        yield lanes.below("╵"), click.style(text, fg="magenta")
