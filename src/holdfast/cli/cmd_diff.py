"""Commands that compare states: diff and blame."""

from __future__ import annotations

import re
from contextlib import suppress
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

import click

from holdfast import json
from holdfast.cli import output, select
from holdfast.cli.complete import complete_revisions, complete_revisions_and_sessions
from holdfast.cli.context import App, command
from holdfast.cli.select import session_option
from holdfast.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast import Change, Checkpoint, Comparison, Usage

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_CONTEXT = 60
"""How many characters of unchanged text are shown on either side of a change."""
_LONGEST = 2_000
"""How many characters of a text are shown without --full."""


@command("diff", lists=True)
@click.argument("a", shell_complete=complete_revisions_and_sessions)
@click.argument("b", default="@", shell_complete=complete_revisions_and_sessions)
@session_option()
@click.option("--full", is_flag=True, help="Show long texts completely.")
def diff_(app: App, a: str, b: str, session: str | None, *, full: bool) -> None:
    """Show what changed from checkpoint A to B (default: the head of A's session).

    Lists added, removed and changed values by their path. Changes in text are shown word by word.
    A and B may be in different sessions. The name of a session means its head.
    """
    with app.store() as store:
        left = select.the_checkpoint(store, a, session, sessions=True)
        right = select.the_checkpoint(store, b, session, left.session, sessions=True)
        found = store.compare(left.checkpoint, right.checkpoint)
        if app.json:
            app.print_json(json.comparison(left.checkpoint, right.checkpoint, found))
            return
        length = store.id_length([left.checkpoint, right.checkpoint])
    app.print(_heading(left.checkpoint, right.checkpoint, found, length))
    for change in found.changes:
        for line in _lines(change, _LONGEST if not full else None):
            app.print(line)
    if not found.changes:
        app.print("No difference.")


def _heading(a: Checkpoint, b: Checkpoint, found: Comparison, length: int) -> str:
    """Return both checkpoints, the steps between them, and the usage of these steps."""

    def end(c: Checkpoint) -> str:
        label = f' "{c.label}"' if c.label else ""
        where = output.one_line(f"({c.session}, step {c.step}{label})")
        return f"{click.style(c.id[:length], fg='cyan')} {where}"

    def steps(count: int, usage: Usage) -> str:
        spent = output.spent(usage.tokens, usage.cost)
        return output.plural(count, "step") + (f", {spent}" if spent else "")

    forward = steps(*found.to_b)
    lines = [f"{end(a)} → {end(b)}"]
    if found.ancestor is None:
        lines.append("They have no common ancestor.")
    elif not found.to_a.steps:
        lines.append(f"{forward} forward.")
    else:
        back = steps(*found.to_a)
        where = f"{found.ancestor.id[:length]} ({output.one_line(found.ancestor.session)})"
        lines.append(
            f"{back} back to {where}" + (f", {forward} forward." if found.to_b.steps else ".")
        )
    return "\n".join([lines[0], *[click.style(line, dim=True) for line in lines[1:]]])


def _lines(change: Change, longest: int | None) -> Iterator[str]:
    where = json.dotted(change.path).removeprefix("state").removeprefix(".")
    colour = {"added": "green", "removed": "red", "changed": "yellow"}[change.kind]
    sign = {"added": "+", "removed": "-", "changed": "~"}[change.kind]
    head = click.style(f"{sign} {where or 'the whole state'}", fg=colour)
    before, after = change.before, change.after
    if change.kind == "changed" and isinstance(before, str) and isinstance(after, str):
        yield head
        yield _indented(word_diff(before, after))
    elif change.kind == "changed":
        yield f"{head}  {_value(before, longest)} → {_value(after, longest)}"
    else:
        value = after if change.kind == "added" else before
        if _is_message(value):
            yield f"{head}  {click.style(str(value['role']), bold=True)}"
            yield from map(_indented, _message(value, longest))
        else:
            yield f"{head}  {_value(value, longest)}"


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _message(message: dict[str, Any], longest: int | None) -> Iterator[str]:
    """Yield the lines of a message: its text, and the calls that it makes or answers."""
    content = message.get("content")
    if isinstance(content, str):
        if content:
            yield _cut(content, longest)
    else:
        for block in content if isinstance(content, list) else []:
            yield _block(block, longest)
    for call in message.get("tool_calls") or []:
        function = call.get("function", {}) if isinstance(call, dict) else {}
        yield f"→ {function.get('name')}({_cut(str(function.get('arguments')), longest)})"
    if "tool_call_id" in message:
        yield click.style(f"answers {message['tool_call_id']}", dim=True)


def _block(block: Any, longest: int | None) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return _cut(str(block.get("text")), longest)
    if kind == "tool_use":
        return f"→ {block.get('name')}({_value(block.get('input'), longest)})"
    if kind == "tool_result":
        return f"answers {block.get('tool_use_id')}: {_value(block.get('content'), longest)}"
    return _value(block, longest)


def word_diff(before: str, after: str) -> str:
    """Return both texts in one, such as "the [-old-]{+new+} text". Long equal parts are cut."""
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    out: list[str] = []
    codes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    for n, (code, a, b, c, d) in enumerate(codes):
        if code == "equal":
            out.append(_middle("".join(old[a:b]), first=n == 0, last=n == len(codes) - 1))
            continue
        if b > a:
            out.append(click.style(f"[-{''.join(old[a:b])}-]", fg="red"))
        if d > c:
            out.append(click.style(f"{{+{''.join(new[c:d])}+}}", fg="green"))
    return "".join(out)


def _middle(text: str, *, first: bool, last: bool) -> str:
    """Return unchanged text; only its ends if it is long."""
    left, right = ("" if first else text[:_CONTEXT]), ("" if last else text[-_CONTEXT:])
    return text if len(left) + len(right) + 3 >= len(text) else f"{left} … {right}".strip()


def _value(value: Any, longest: int | None) -> str:
    return _cut(json.dumps(json.value(value)), longest)


def _cut(text: str, longest: int | None) -> str:
    if longest is None or len(text) <= longest:
        return text
    return f"{text[:longest]}… ({len(text) - longest:,} more characters; --full)"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


@command("blame", lists=True)
@click.argument("path")
@click.argument("revision", default="@", shell_complete=complete_revisions)
@session_option()
def blame_(app: App, path: str, revision: str, session: str | None) -> None:
    """Find the checkpoint in which the value at PATH last changed, and show the change.

    PATH is a path such as plan.budget, as `holdfast diff` prints it.
    """
    with app.store() as store:
        found = select.the_checkpoint(store, revision, session)
        checkpoint = found.session.blame(path, found.checkpoint.id)
        after = found.session.load(checkpoint.id, path=path)
        before, existed = None, False
        if checkpoint.ancestor is not None:
            with suppress(NotFound):
                before = found.session.load(checkpoint.ancestor, path=path)
                existed = True
        if app.json:
            shown = {"checkpoint": json.checkpoint(checkpoint), "after": json.value(after)}
            app.print_json(shown | ({"before": json.value(before)} if existed else {}))
            return
        length = store.id_length([checkpoint])
    app.print(output.line_with_session(checkpoint, length))
    if existed and isinstance(before, str) and isinstance(after, str):
        app.print(_indented(word_diff(before, after)))
    elif existed:
        app.print(f"    {_value(before, _LONGEST)} → {_value(after, _LONGEST)}")
    else:
        app.print(f"    added: {_value(after, _LONGEST)}")
