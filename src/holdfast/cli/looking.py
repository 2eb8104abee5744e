"""Commands that look: sessions, show, state, search, stats, watch."""

from __future__ import annotations

import datetime as dt
import json as jsons
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from holdfast import shapes
from holdfast.cli import naming, words
from holdfast.cli.app import App, command, harmless, session_option
from holdfast.cli.completing import complete_revisions, complete_tags
from holdfast.errors import UNREADABLE, InvalidRequest, NotFound
from holdfast.model import STATUSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast import Checkpoint, Session, SessionInfo, Store


def _filters(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options by which sessions and checkpoints are chosen."""
    for option in (
        click.option("--until", metavar="TIME", help="Taken before: 2026-01-31, or an age as 2d."),
        click.option("--since", metavar="TIME", help="Taken since: 2026-01-31, or an age as 2d."),
        click.option("--meta", metavar="KEY=VALUE", multiple=True, help="With this in their meta."),
        click.option("--label", metavar="TEXT", help="With this label."),
        click.option("--tag", metavar="TAG", help="With this tag.", shell_complete=complete_tags),
        click.option("--trigger", metavar="NAME", help="Taken for this reason."),
        click.option("--status", type=click.Choice(STATUSES), help="With this status."),
        click.option("--agent", metavar="NAME", help="Of this agent."),
    ):
        function = option(function)
    return function


def _filled(meta: tuple[str, ...], since: str | None, until: str | None) -> dict[str, Any]:
    """What filters mean to the library."""
    found: dict[str, Any] = {}
    for pair in meta:
        key, equals, text = pair.partition("=")
        if not equals:
            raise InvalidRequest(f"--meta {pair!r} has no value", hint="--meta KEY=VALUE")
        found[key] = _plain(text)
    return {"meta": found or None, "since": moment(since), "until": moment(until)}


def _plain(text: str) -> Any:
    """JSON if it is some, else the text itself."""
    try:
        return jsons.loads(text)
    except ValueError:
        return text


def moment(text: str | None) -> dt.datetime | None:
    """A time as people write it: ISO 8601, or how long ago: 30s, 15m, 2h, 3d, 4w."""
    if text is None:
        return None
    number, unit = text[:-1], text[-1:]
    names = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
    try:
        if unit in names and number.isdecimal():
            return dt.datetime.now(dt.UTC) - dt.timedelta(**{names[unit]: int(number)})
        return dt.datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"not a time: {text!r}", hint="2026-01-31, 2026-01-31T12:00+02:00, or 30s, 15m, 2h, 3d"
        ) from None


@command("sessions")
@_filters
@click.option(
    "--limit", "-n", type=click.IntRange(0), default=0, help="How many at most; 0 for all."
)
def sessions_(
    app: App, limit: int, meta: tuple[str, ...], since: str | None, until: str | None, **more: Any
) -> None:
    """List sessions.

    --agent is held against the session, the other filters against its head.
    """
    with app.store() as store:
        found = store.sessions(**more, **_filled(meta, since, until))
        listed = islice(found, limit or None)
        if app.json:
            for info in listed:
                app.emit(shapes.session(info))
            return
        infos = list(listed)
        length = naming.short_length(store.backend, [i.head for i in infos if i.head is not None])
        if not infos:
            app.note("No session matches.")
            return
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in ("SESSION", "AGENT", "HEAD"):
            table.add_column(title, no_wrap=title == "HEAD")
        table.add_column("STEP", justify="right")
        table.add_column("ALL", justify="right")
        for title in ("STATUS", "ACTIVE"):
            table.add_column(title)
        for info in infos:
            table.add_row(*_session_row(info, length))
        app.table(table)


def _session_row(info: SessionInfo, length: int) -> list[Any]:
    from rich.text import Text

    head = info.head
    cells: list[str] = [words.one_line(info.name), words.one_line(info.agent or "")]
    if head is None or head.damaged:
        cells += ["", "", f"{info.checkpoints:,}"]
        damage = f"damaged: {words.one_line(info.damaged)}" if info.damaged else None
        cells += [click.style(damage, fg="red") if damage else "empty"]
        cells += [""]
    else:
        said = words.status(head) or "in progress"
        if head.pending:
            said += click.style("  ⏸", fg="yellow")
        step, count = f"{head.step:,}", f"{info.checkpoints:,}"
        cells += [head.id[:length], step, count, said, words.age(head.created_at)]
    return [Text.from_ansi(cell) for cell in cells]


@command("show")
@click.argument("revision", default="@", shell_complete=complete_revisions)
@session_option
def show_(app: App, revision: str, session: str | None) -> None:
    """Show what is known of one checkpoint.

    REVISION is an id, the beginning of one, @ (the head), @~3, a label, tag:NAME, key:KEY or
    step:12.
    """
    with app.store() as store:
        found = naming.the_checkpoint(store, revision, session)
        if app.json:
            app.emit(shapes.checkpoint(found.checkpoint))
            return
        for name, text in _facts(found.checkpoint):
            app.say(f"{click.style(name.rjust(10), dim=True)}  {text}")
        app.say(f"{click.style('state'.rjust(10), dim=True)}  {_outline(found)}")


def _facts(c: Checkpoint) -> list[tuple[str, str]]:
    facts = [("checkpoint", click.style(c.id, fg="cyan")), ("session", words.one_line(c.session))]
    if c.damaged:
        return [*facts, ("damaged", click.style(c.damaged, fg="red"))]
    made = f"step {c.step}, by {c.operation}" + (f" ({c.trigger})" if c.trigger else "")
    facts += [
        ("made", made),
        ("at", f"{c.created_at:%Y-%m-%d %H:%M:%S.%f} UTC, {words.age(c.created_at)}"),
    ]
    where = "" if c.parent_session in (None, c.session) else f" of session {c.parent_session}"
    optional = {
        "parent": c.parent and c.parent + where,
        "pruned": c.pruned and f"{words.plural(c.pruned, 'checkpoint')} before it",
        "label": c.label,
        "tags": ", ".join(c.tags),
        "status": words.status(c),
        "agent": c.agent,
        "child of": c.child_of,
        "run": c.run and f"{c.run.id}, turn {c.run.turn}",
        "usage": words.spent(c.usage.tokens, c.usage.cost),
        "hint": c.hint,
        "key": c.key,
        "meta": c.meta and shapes.dumps(shapes.value(c.meta)),
    }
    facts += [(name, str(text)) for name, text in optional.items() if text]
    for call in c.pending:
        asked = f"{call.name}({shapes.dumps(shapes.value(call.arguments))})"
        facts.append(("pending", click.style(f"⏸ {asked}", fg="yellow")))
    facts.append(("size", f"{words.size(c.size)}, of which {words.size(c.added)} were new"))
    return [*facts, ("hash", c.hash), ("state hash", c.state_hash)]


def _outline(found: naming.Found) -> str:
    """The state's keys, and how much there is of each; or why it does not load."""
    try:
        state = found.session.load(found.checkpoint.id)
    except UNREADABLE as e:
        return click.style(f"does not load: {e.message}", fg="red")
    if not isinstance(state, dict):
        return type(state).__name__
    return ", ".join(f"{key}{_amount(item)}" for key, item in state.items()) or "{}"


def _amount(item: Any) -> str:
    return f" ({len(item)})" if isinstance(item, list | dict | tuple | set | str | bytes) else ""


@command("state")
@click.argument("revision", default="@", shell_complete=complete_revisions)
@click.argument("path", required=False)
@session_option
def state_(app: App, revision: str, path: str | None, session: str | None) -> None:
    """Print a state, or the part of it at PATH (plan.budget, messages[0], tags['a.b']), as JSON.

    What JSON has no word for comes tagged, as {"$bytes": …}; see the page on JSON.
    """
    with app.store() as store:
        found = naming.the_checkpoint(store, revision, session)
        shown = shapes.value(part(found.session.load(found.checkpoint.id), path))
    if app.json:
        click.echo(shapes.dumps(shown))
    else:
        click.echo(jsons.dumps(shown, indent=2, ensure_ascii=not _is_text(shown)))


def _is_text(shown: Any) -> bool:
    """Whether it can be printed as it is; otherwise what cannot is escaped."""
    text = jsons.dumps(shown, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return harmless(text) == text


def part(state: Any, path: str | None) -> Any:
    from holdfast.blame import parse_path

    at = state
    for step in parse_path(path) if path else ():
        try:
            at = at[str(step) if isinstance(at, dict) and step not in at else step]
        except (LookupError, TypeError):
            raise NotFound(
                f"the state has nothing at {path!r}", hint="`holdfast state` prints all of it"
            ) from None
    return at


@command("search")
@click.argument("text", required=False)
@_filters
@click.option(
    "--limit", "-n", type=click.IntRange(1), default=20, show_default=True, help="How many."
)
@click.option("--before", metavar="ID", help="Go on behind this checkpoint.")
def search_(
    app: App,
    text: str | None,
    limit: int,
    before: str | None,
    meta: tuple[str, ...],
    since: str | None,
    until: str | None,
    **more: Any,
) -> None:
    """Find checkpoints by text, tag, status and more, the newest first.

    TEXT is looked for in every string of a state.
    """
    with app.store() as store:
        query = more | _filled(meta, since, until)
        found = list(store.find(text=text, before=before, limit=limit, **query))
        if app.json:
            for checkpoint in found:
                app.emit(shapes.checkpoint(checkpoint))
            return
        length = naming.short_length(store.backend, found)
        for checkpoint in found:
            where = click.style(words.one_line(checkpoint.session), dim=True)
            app.say(f"{words.line(checkpoint, length)}  {where}")
        if not found:
            app.note("Nothing matches.")
        elif len(found) == limit:
            app.note(f"There may be more: --before {found[-1].id}")


@command("stats")
def stats_(app: App) -> None:
    """Count sessions, checkpoints and bytes."""
    with app.store() as store:
        stats = store.stats()
        if app.json:
            app.emit(shapes.stats(stats) | {"sharing": stats.sharing})
            return
    stored = sum(stats.bytes.values())
    count = words.plural(stats.checkpoints, "checkpoint")
    app.say(f"{words.plural(stats.sessions, 'session')}, {count}")
    if stats.deleted:
        gone = words.plural(stats.deleted, "checkpoint")
        app.say(f"{gone} deleted, to be freed by `holdfast gc`")
    smaller = f": {stats.sharing:.1f} times smaller" if stats.sharing > 1 else ""
    app.say(f"{words.size(stats.states)} of states in {words.size(stored)}{smaller}")
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("LARGEST", "CHECKPOINTS", "WRITTEN"):
        table.add_column(title, justify="left" if title == "LARGEST" else "right")
    for each in stats.largest:
        name = Text(words.one_line(each.name))
        table.add_row(name, f"{each.checkpoints:,}", words.size(each.added))
    app.table(table)


@command("watch")
@session_option
@click.option("--seconds", type=float, metavar="N", help="End after N seconds without anything.")
def watch_(app: App, session: str | None, seconds: float | None) -> None:
    """Print checkpoints and operations as they land, whoever makes them. End it with Ctrl-C."""
    with app.store() as store:
        source: Store | Session = store if session is None else naming.the_session(store, session)
        events = source.watch(patience=seconds)
        app.note("Watching; Ctrl-C ends it.")  # from here on nothing is missed
        for event in events:
            if app.json:
                app.emit(shapes.event(event))
            elif isinstance(event, tuple):
                said = words.one_line(f"{event.summary}  {event.session}")
                app.say(f"{click.style('·', dim=True)} {said}")
            else:
                where = click.style(words.one_line(event.session), dim=True)
                app.say(f"{words.line(event, 12)}  {where}")
