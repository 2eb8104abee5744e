"""`holdfast transcript`: the conversation of a session, for people."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from holdfast.cli import output, select
from holdfast.cli.complete import complete_sessions
from holdfast.cli.context import App, command
from holdfast.cli.select import session_option

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast import MessagePart, Session

_LONGEST = 2_000
"""Characters of a tool's result that are shown without --full."""
_COLORS = {"user": "green", "assistant": "cyan", "system": "yellow"}


@command("transcript", lists=True)
@click.argument("sessions", nargs=-1, metavar="[SESSION]...", shell_complete=complete_sessions)
@session_option("The same as SESSION.")
@click.option("--at", "revision", metavar="REVISION", help="Show it as it was at a checkpoint.")
@click.option("--path", metavar="PATH", help="Where the messages are in the state.")
@click.option("--markdown", is_flag=True, help="Write Markdown.")
@click.option("--full", is_flag=True, help="Show long results of tools completely.")
def transcript_(
    app: App,
    sessions: tuple[str, ...],
    session: str | None,
    revision: str | None,
    path: str | None,
    *,
    markdown: bool,
    full: bool,
) -> None:
    """Print the conversation of a session: messages, tool calls and their results.

    Without SESSION, prints that of the only session of the store.
    """
    first = sessions[0] if sessions else None
    names = (select.one_session(first, session), *sessions[1:])
    with app.store() as store:
        for n, name in enumerate(names):
            found = select.the_session(store, name)
            if app.json:
                _print_json(app, found, revision, path)
                continue
            if n:
                app.print()
            parts = found.transcript(revision, path=path)
            if not parts:
                app.notice(f"Session {output.one_line(found.name)!r} has no messages.")
            elif markdown:
                app.print("\n\n".join([f"# {output.one_line(found.name)}", *_markdown(parts)]))
            else:
                if len(names) > 1:
                    app.print(click.style(output.one_line(found.name), bold=True) + "\n")
                app.print("\n".join(_lines(parts, _LONGEST if not full else None)).strip("\n"))


def _print_json(app: App, session: Session, revision: str | None, path: str | None) -> None:
    from holdfast import json

    for part in session.transcript(revision, path=path):
        app.print_json({"session": session.name} | json.message_part(part))


def _lines(parts: Iterable[MessagePart], longest: int | None) -> Iterable[str]:
    """Yield the lines of a transcript. A role is named where it changes."""
    role = None
    for part in parts:
        if part.kind not in ("call", "result"):
            yield ""
            if part.role != role:
                role = part.role
                yield click.style(role, fg=_COLORS.get(role), bold=True)
        if part.kind == "call":
            role = "assistant"
            yield f"  {click.style(str(part), fg='blue')}"
        elif part.kind == "result":
            text = part.text if longest is None else output.cut(part.text, longest)
            first, *rest = text.strip().splitlines() or ["(empty)"]
            arrow = click.style(
                "✗" if part.is_error else "←", fg="red" if part.is_error else "blue"
            )
            yield f"    {arrow} {first}"
            yield from (f"      {line}" for line in rest)
        else:
            text = part.text if part.kind == "text" else f"({part.kind}: {part.text})"
            yield from (f"  {line}" for line in text.strip().splitlines())


def _markdown(parts: Iterable[MessagePart]) -> Iterable[str]:
    """Yield the blocks of a transcript in Markdown."""
    role = None
    for part in parts:
        if part.kind == "call":
            role = "assistant"
            yield f"**→ {_fenced(str(part)[2:], inline=True)}**"
        elif part.kind == "result":
            title = "✗ error" if part.is_error else f"← {part.name or 'result'}"
            yield f"{title}\n\n{_fenced(part.text)}"
        else:
            if part.role != role:
                role = part.role
                yield f"## {role}"
            kinds = {"text": part.text, "thinking": f"> {part.text}", "file": f"[{part.text}]"}
            yield kinds[part.kind].replace("\n", "\n> " if part.kind == "thinking" else "\n")


def _fenced(text: str, *, inline: bool = False) -> str:
    """Return text as code, between more backticks than it contains."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    if inline:
        ticks = "`" * (longest + 1)
        pad = " " if text.startswith("`") or text.endswith("`") else ""
        return f"{ticks}{pad}{text}{pad}{ticks}"
    ticks = "`" * max(longest + 1, 3)
    return f"{ticks}\n{text}\n{ticks}"
