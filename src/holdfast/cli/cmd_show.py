"""Commands that show: sessions, show, state, search, usage, stats, watch."""

from __future__ import annotations

import datetime as dt
import json as jsons
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import click

from holdfast import STATUSES, IndexResult, SearchHit, Usage, json
from holdfast.cli import output, select
from holdfast.cli.complete import complete_revisions, complete_tags
from holdfast.cli.context import App, command, escape_controls
from holdfast.cli.select import session_argument, session_option
from holdfast.errors import UNREADABLE, InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast import Checkpoint, Session, SessionInfo, Store


def _filters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that filter sessions and checkpoints."""
    for option in (
        click.option(
            "--until",
            metavar="TIME",
            help="Only those saved before: 2026-01-31, or an age such as 2d.",
        ),
        click.option(
            "--since",
            metavar="TIME",
            help="Only those saved since: 2026-01-31, or an age such as 2d.",
        ),
        click.option(
            "--meta",
            metavar="KEY=VALUE",
            multiple=True,
            help="Only those with this in their metadata.",
        ),
        click.option("--label", metavar="TEXT", help="Only those with this label."),
        click.option(
            "--tag", metavar="TAG", help="Only those with this tag.", shell_complete=complete_tags
        ),
        click.option("--trigger", metavar="NAME", help="Only those saved for this reason."),
        click.option("--status", type=click.Choice(STATUSES), help="Only those with this status."),
        click.option("--agent", metavar="NAME", help="Only those of this agent."),
    ):
        function = option(function)
    return function


def _parsed(meta: tuple[str, ...], since: str | None, until: str | None) -> dict[str, Any]:
    """Return these filters as arguments of the library."""
    values: dict[str, Any] = {}
    for pair in meta:
        key, equals, text = pair.partition("=")
        if not equals:
            raise InvalidRequest(f"--meta {pair!r} has no value", hint="--meta KEY=VALUE")
        values[key] = _json_or_text(text)
    return {"meta": values or None, "since": moment(since), "until": moment(until)}


def _json_or_text(text: str) -> Any:
    """Return the value of JSON text; the text itself if it is not JSON."""
    try:
        return jsons.loads(text)
    except ValueError:
        return text


def moment(text: str | None) -> dt.datetime | None:
    """Return the time that a user typed: ISO 8601, or an age such as 30s, 15 min, 2h or 3 days."""
    if text is None:
        return None
    from holdfast import duration

    try:
        if (ago := duration(text)) is not None:
            return dt.datetime.now(dt.UTC) - dt.timedelta(seconds=ago)
        return dt.datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"not a time: {text!r}", hint="2026-01-31, 2026-01-31T12:00+02:00, or 30s, 15m, 2h, 3d"
        ) from None


@command("sessions", lists=True)
@_filters
@click.option(
    "--limit", "-n", type=click.IntRange(0), default=0, help="List at most this many; 0 means all."
)
def sessions_(
    app: App, limit: int, meta: tuple[str, ...], since: str | None, until: str | None, **more: Any
) -> None:
    """List sessions.

    --agent filters by the agent of the session, all other filters by its head.
    """
    with app.store() as store:
        found = store.sessions(**more, **_parsed(meta, since, until))
        listed = islice(found, limit or None)
        if app.json:
            for info in listed:
                app.print_json(json.session(info))
            return
        infos = list(listed)
        length = store.id_length(info.head for info in infos if info.head is not None)
        if not infos:
            app.notice("No sessions match.")
            return
        titles = "SESSION AGENT HEAD STEP ALL STATUS ACTIVE"
        rows = [_session_row(info, length) for info in infos]
        app.print_table(titles, rows, numbers=("STEP", "ALL"))


def _session_row(info: SessionInfo, length: int) -> list[str]:
    head, count = info.head, f"{info.checkpoints:,}"
    names = [output.one_line(info.name), output.one_line(info.agent or "")]
    if head is None or head.damaged:
        damage = f"damaged: {output.one_line(info.damaged)}" if info.damaged else None
        return [*names, "", "", count, click.style(damage, fg="red") if damage else "empty", ""]
    status = output.status(head) or "in progress"
    if head.pending:
        status += click.style("  ⏸", fg="yellow")
    if place := output.place(head):
        status += click.style(f"  {place}", dim=True)
    return [*names, head.id[:length], f"{head.step:,}", count, status, output.age(head.created_at)]


@command("show", lists=True)
@click.argument("revision", default="@", shell_complete=complete_revisions)
@session_option()
def show_(app: App, revision: str, session: str | None) -> None:
    """Show everything about one checkpoint.

    REVISION is an id or its first characters, @ (the head), @~3, a label, tag:NAME, key:KEY or
    step:12.
    """
    with app.store() as store:
        found = select.the_checkpoint(store, revision, session)
        if app.json:
            app.print_json(json.checkpoint(found.checkpoint))
            return
        for name, text in _facts(found.checkpoint):
            app.print(f"{click.style(name.rjust(10), dim=True)}  {text}")
        app.print(f"{click.style('state'.rjust(10), dim=True)}  {_outline(found)}")


def _facts(c: Checkpoint) -> list[tuple[str, str]]:
    facts = [("checkpoint", click.style(c.id, fg="cyan")), ("session", output.one_line(c.session))]
    if c.damaged:
        return [*facts, ("damaged", click.style(c.damaged, fg="red"))]
    facts += [
        ("made", f"step {c.step}, by {c.operation}" + (f" ({c.trigger})" if c.trigger else "")),
        ("at", f"{c.created_at:%Y-%m-%d %H:%M:%S.%f} UTC, {output.age(c.created_at)}"),
    ]
    where = "" if c.parent_session in (None, c.session) else f" of session {c.parent_session}"
    optional = {
        "parent": c.parent and c.parent + where,
        "pruned": c.pruned and f"{output.plural(c.pruned, 'checkpoint')} before it",
        "label": c.label,
        "tags": ", ".join(c.tags),
        "status": output.status(c),
        "agent": c.agent,
        "child of": c.child_of,
        "run": c.run and f"{c.run.id}, turn {c.run.turn}",
        "usage": output.spent(c.usage.tokens, c.usage.cost),
        "hint": c.hint,
        "key": c.key,
        "meta": c.meta and json.dumps(json.value(c.meta)),
    }
    facts += [(name, str(text)) for name, text in optional.items() if text]
    for call in c.pending:
        asked = f"{call.name}({json.dumps(json.value(call.arguments))})"
        facts.append(("pending", click.style(f"⏸ {asked}", fg="yellow")))
    facts.append(("size", f"{output.size(c.size)}, of which {output.size(c.added)} were new"))
    return [*facts, ("hash", c.hash), ("state hash", c.state_hash)]


def _outline(found: select.Found) -> str:
    """Return the keys of the state with their lengths, or why it does not load."""
    try:
        state = found.session.load(found.checkpoint.id)
    except UNREADABLE as e:
        return click.style(f"does not load: {e.message}", fg="red")
    if not isinstance(state, dict):
        return type(state).__name__
    return ", ".join(f"{key}{_length(item)}" for key, item in state.items()) or "{}"


def _length(item: Any) -> str:
    return f" ({len(item)})" if isinstance(item, list | dict | tuple | set | str | bytes) else ""


@command("state", lists=True)
@click.argument("revision", default="@", shell_complete=complete_revisions)
@click.argument("path", required=False)
@session_option()
def state_(app: App, revision: str, path: str | None, session: str | None) -> None:
    """Print a state as JSON, or its part at PATH (plan.budget, messages[0], tags['a.b']).

    Values that JSON does not have are tagged, such as {"$bytes": …}; see the page on JSON.
    """
    with app.store() as store:
        found = select.the_checkpoint(store, revision, session)
        try:
            shown = json.value(found.session.load(found.checkpoint.id, path=path))
        except NotFound as e:
            raise NotFound(e.message, hint="`holdfast state` prints the whole state") from None
    if app.json:
        click.echo(json.dumps(shown))
    else:
        click.echo(jsons.dumps(shown, indent=2, ensure_ascii=not _is_text(shown)))


def _is_text(shown: Any) -> bool:
    """Return whether a terminal can show it. If not, all but ASCII is escaped."""
    text = jsons.dumps(shown, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return escape_controls(text) == text


@command("search", lists=True)
@click.argument("text", required=False)
@session_option("Search only this session.")
@_filters
@click.option("--case-sensitive", is_flag=True, help="Distinguish upper and lower case.")
@click.option(
    "--limit", "-n", type=click.IntRange(1), default=20, show_default=True,
    help="Print at most this many.",
)  # fmt: skip
@click.option("--before", metavar="ID", help="Print those after this one in the list.")
def search_(
    app: App,
    text: str | None,
    session: str | None,
    limit: int,
    before: str | None,
    case_sensitive: bool,  # noqa: FBT001
    meta: tuple[str, ...],
    since: str | None,
    until: str | None,
    **more: Any,
) -> None:
    """Find checkpoints by text, tag, status and more, newest first.

    Searches all strings of the states for TEXT, in upper or lower case. Prints the sessions whose
    names contain it, and then the checkpoints in which it appeared. Without TEXT, prints all
    checkpoints that match the options. `holdfast index` makes searches fast.
    """
    with app.store() as store:
        within = None if session is None else select.the_session(store, session)
        query = more | _parsed(meta, since, until)
        query |= {"session": within, "before": before, "limit": limit}
        if text is None:
            hits = [SearchHit(c.session, c, (), "", 0, 0) for c in store.checkpoints(**query)]
        else:
            hits = list(store.search(text, case_sensitive=case_sensitive, **query))
        if app.json:
            for hit in hits:
                app.print_json(json.hit(hit))
            return
        checkpoints = [hit.checkpoint for hit in hits if hit.checkpoint is not None]
        length = store.id_length(checkpoints)
        for hit in hits:
            _print_hit(app, hit, length)
        if not hits:
            app.notice("Nothing matches.")
        elif len(checkpoints) == limit:
            app.notice(f"There may be more: --before {checkpoints[-1].id}")


def _print_hit(app: App, hit: SearchHit, length: int) -> None:
    text, start, end = hit.snippet, hit.start, hit.end
    marked = text[:start] + click.style(text[start:end], bold=True) + text[end:]
    if hit.checkpoint is None:
        app.print(f"{click.style('session', dim=True)}  {marked}")
        return
    app.print(output.line_with_session(hit.checkpoint, length))
    if text:
        app.print(f"   {click.style(output.one_line(hit.where), dim=True)}: {marked}")


@command("index")
@click.option("--drop", is_flag=True, help="Remove the index.")
def index_(app: App, drop: bool) -> None:  # noqa: FBT001
    """Make searches for text fast, with an index next to the store.

    Builds the index, or brings it up to date. From then on, searches of programs that write to the
    store keep it up to date, and no save waits for it. The index is not part of the store: copies
    and backups leave it out.
    """
    with app.store(write=True) as store:
        dropped = store.drop_index() if drop else False
        result = IndexResult(0, 0, 0) if drop else store.index()
    if app.json:
        app.print_json(json.index(result))
    if drop:
        app.print("The index is removed." if dropped else "There was no index.")
    else:
        changes = f"{result.added:,} added, {result.removed:,} removed"
        app.print(f"The index has {output.plural(result.checkpoints, 'checkpoint')}: {changes}.")


@command("usage", lists=True)
@click.option(
    "--by",
    type=click.Choice(("session", "agent", "model", "day")),
    default="session",
    show_default=True,
    help="One row for each of these.",
)
@session_option("Only this session.")
@_filters
def usage_(
    app: App,
    by: Literal["session", "agent", "model", "day"],
    session: str | None,
    meta: tuple[str, ...],
    since: str | None,
    until: str | None,
    **more: Any,
) -> None:
    """Sum up tokens and cost by session, agent, model or day.

    --since and --until limit the time of the usage, and days are in UTC. --agent filters by
    the agent of the session, all other filters by its head.
    """
    with app.store() as store:
        if session is not None:
            session = select.the_session(store, session).name
        found = store.usage(by, session=session, **more, **_parsed(meta, since, until))
    if app.json:
        app.print_json(json.usage_sums(by, found))
        return
    if not found:
        app.notice("No usage is recorded.")
        return
    rows = [_usage_row(output.one_line(name or "unknown"), each) for name, each in found.items()]
    rows.append(_usage_row("total", sum(found.values(), Usage())))
    numbers = ("TOKENS", "INPUT", "CACHED", "OUTPUT", "COST")
    app.print_table(" ".join((by.upper(), *numbers)), rows, numbers=numbers)


def _usage_row(name: str, of: Usage) -> list[str]:
    counts = [f"{n:,}" if n else "" for n in (of.tokens, of.input, of.cached, of.output)]
    return [name, *counts, output.money(of.cost) if of.cost else ""]


@command("stats", lists=True)
def stats_(app: App) -> None:
    """Count sessions, checkpoints and bytes."""
    with app.store() as store:
        stats = store.stats()
        if app.json:
            app.print_json(json.stats(stats) | {"sharing": stats.sharing})
            return
    stored = sum(stats.bytes.values())
    count = output.plural(stats.checkpoints, "checkpoint")
    app.print(f"{output.plural(stats.sessions, 'session')}, {count}")
    if stats.deleted:
        deleted = output.plural(stats.deleted, "checkpoint")
        app.print(f"{deleted} deleted; `holdfast gc --all` frees them")
    smaller = f": {stats.sharing:.1f} times smaller" if stats.sharing > 1 else ""
    app.print(f"{output.size(stats.states)} of states in {output.size(stored)}{smaller}")
    rows = [
        (output.one_line(each.name), f"{each.checkpoints:,}", output.size(each.added))
        for each in stats.largest
    ]
    app.print_table("LARGEST CHECKPOINTS WRITTEN", rows, numbers=("CHECKPOINTS", "WRITTEN"))


@command("watch", lists=True)
@session_argument()
@click.option(
    "--all", "-a", "everything", is_flag=True, help="Watch every session, including new ones."
)
@click.option(
    "--seconds", type=float, metavar="N", help="Stop when nothing has happened for N seconds."
)
def watch_(app: App, session: str | None, seconds: float | None, *, everything: bool) -> None:
    """Print checkpoints and operations of all processes as they are saved, until Ctrl-C.

    Watches SESSION; with --all, every session.
    """
    with app.store() as store:
        one = select.session_or_all(store, session, everything=everything)
        source: Store | Session = one or store
        events = source.watch(patience=seconds)
        app.notice("Watching. Press Ctrl-C to stop.")  # no event after this is missed
        for event in events:
            if app.json:
                app.print_json(json.event(event))
            elif isinstance(event, tuple):
                text = output.one_line(f"{event.summary}  {event.session}")
                app.print(f"{click.style('·', dim=True)} {text}")
            else:
                app.print(output.line_with_session(event, 12))
