"""Commands that compare: diff and blame."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

import click

from holdfast import shapes
from holdfast.cli import naming, words
from holdfast.cli.app import App, command, session_option
from holdfast.cli.completing import complete_revisions
from holdfast.compare import Comparison, compare
from holdfast.diff import dotted
from holdfast.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast import Change, Checkpoint

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_NEAR = 60
"""Characters of unchanged text that are shown on either side of a change."""
_LONGEST = 2_000
"""Of a text, in one message; with --full, all of it."""


@command("diff")
@click.argument("a", shell_complete=complete_revisions)
@click.argument("b", default="@", shell_complete=complete_revisions)
@session_option
@click.option("--full", is_flag=True, help="Cut no text short.")
def diff_(app: App, a: str, b: str, session: str | None, *, full: bool) -> None:
    """Show what changed from checkpoint A to B (the head of A's session).

    Messages that came, went or were edited, word by word; other values by their place; and what
    lies between the two. The sessions of A and B may differ.
    """
    with app.store() as store:
        left = naming.the_checkpoint(store, a, session)
        right = naming.the_checkpoint(store, b, session, left.session)
        found = compare(store.backend, left.checkpoint, right.checkpoint)
        if app.json:
            app.emit(_shape(left.checkpoint, right.checkpoint, found))
            return
        length = naming.short_length(store.backend, [left.checkpoint, right.checkpoint])
    app.say(_heading(left.checkpoint, right.checkpoint, found, length))
    for change in found.changes:
        for line in _lines(change, _LONGEST if not full else None):
            app.say(line)
    if not found.changes:
        app.say("No difference.")


def _shape(a: Checkpoint, b: Checkpoint, found: Comparison) -> shapes.Shape:
    return {
        "a": shapes.checkpoint(a),
        "b": shapes.checkpoint(b),
        "ancestor": None if found.ancestor is None else found.ancestor.id,
        "steps": {"a": found.to_a.steps, "b": found.to_b.steps},
        "usage": {"a": shapes.usage(found.to_a.usage), "b": shapes.usage(found.to_b.usage)},
        "changes": shapes.changes(found.changes),
    }


def _heading(a: Checkpoint, b: Checkpoint, found: Comparison, length: int) -> str:
    """Both ends, how far apart they are, and what was spent on the way."""

    def end(c: Checkpoint) -> str:
        label = f' "{c.label}"' if c.label else ""
        where = words.one_line(f"({c.session}, step {c.step}{label})")
        return f"{click.style(c.id[:length], fg='cyan')} {where}"

    def way(steps: int, tokens: int, cost: float) -> str:
        spent = words.spent(tokens, cost)
        return words.plural(steps, "step") + (f", {spent}" if spent else "")

    forth = way(found.to_b.steps, *_usage(found.to_b.usage))
    lines = [f"{end(a)} → {end(b)}"]
    if found.ancestor is None:
        lines.append("They have no common ancestor.")
    elif not found.to_a.steps:
        lines.append(f"{forth} on.")
    else:
        back = way(found.to_a.steps, *_usage(found.to_a.usage))
        where = f"{found.ancestor.id[:length]} ({words.one_line(found.ancestor.session)})"
        lines.append(f"{back} back to {where}" + (f", {forth} on." if found.to_b.steps else "."))
    return "\n".join([lines[0], *[click.style(line, dim=True) for line in lines[1:]]])


def _usage(usage: Any) -> tuple[int, float]:
    return usage.tokens, usage.cost


def _lines(change: Change, longest: int | None) -> Iterator[str]:
    where = dotted(change.path).removeprefix("state").removeprefix(".")
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
    """What a message says, and the calls it makes or answers."""
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
    """Both texts in one: [-what went-] and {+what came+}, with a little of what stayed."""
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
    """Unchanged text: its ends alone, if it is long."""
    left, right = ("" if first else text[:_NEAR]), ("" if last else text[-_NEAR:])
    return text if len(left) + len(right) + 3 >= len(text) else f"{left} … {right}".strip()


def _value(value: Any, longest: int | None) -> str:
    return _cut(shapes.dumps(shapes.value(value)), longest)


def _cut(text: str, longest: int | None) -> str:
    if longest is None or len(text) <= longest:
        return text
    return f"{text[:longest]}… ({len(text) - longest:,} more characters; --full)"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


@command("blame")
@click.argument("path")
@click.argument("revision", default="@", shell_complete=complete_revisions)
@session_option
def blame_(app: App, path: str, revision: str, session: str | None) -> None:
    """Find the checkpoint in which the value at PATH (plan.budget) last changed, and from what.

    PATH is written as `holdfast diff` prints it.
    """
    from holdfast.cli.looking import part

    with app.store() as store:
        found = naming.the_checkpoint(store, revision, session)
        checkpoint = found.session.blame(path, found.checkpoint.id)
        after = part(found.session.load(checkpoint.id), path)
        before: Any = None
        existed = False
        if checkpoint.ancestor is not None:
            try:
                before = part(found.session.load(checkpoint.ancestor), path)
                existed = True
            except NotFound:
                existed = False
        if app.json:
            shown = {"checkpoint": shapes.checkpoint(checkpoint), "after": shapes.value(after)}
            app.emit(shown | ({"before": shapes.value(before)} if existed else {}))
            return
        length = naming.short_length(store.backend, [checkpoint])
    where = click.style(words.one_line(checkpoint.session), dim=True)
    app.say(f"{words.line(checkpoint, length)}  {where}")
    if existed and isinstance(before, str) and isinstance(after, str):
        app.say(_indented(word_diff(before, after)))
    elif existed:
        app.say(f"    {_value(before, _LONGEST)} → {_value(after, _LONGEST)}")
    else:
        app.say(f"    came as {_value(after, _LONGEST)}")
