"""Shell completion of sessions, labels and tags.

It runs while the user types, so an error completes nothing and prints nothing.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import click

    from holdfast import Store

_MOST = 200
_CHECKPOINTS = 10_000
"""How many checkpoints of a session are searched for labels and tags."""


def _complete(
    ctx: click.Context, incomplete: str, names: Callable[[Store], Iterable[str]]
) -> list[str]:
    from holdfast.cli.context import App
    from holdfast.errors import HoldfastError

    url = ctx.params.get("store") or ctx.find_root().params.get("store")
    try:
        with App(url).store() as store:
            matching = (n for n in names(store) if n.startswith(incomplete) and _fits_a_shell(n))
            return list(islice(matching, _MOST))
    except (HoldfastError, OSError):
        return []


def _fits_a_shell(name: str) -> bool:
    """Return whether a name is one line, and can be an argument."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return len(name.splitlines()) <= 1 and "\0" not in name


def complete_sessions(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    return _complete(ctx, incomplete, lambda store: (info.name for info in store.sessions()))


def complete_tags(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    return _complete(ctx, incomplete, lambda store: sorted(_labels_and_tags(store, ctx)[1]))


def complete_revisions(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete @, labels, and tags in the form tag:NAME."""

    def names(store: Store) -> list[str]:
        labels, tags = _labels_and_tags(store, ctx)
        return ["@", *sorted(labels), *[f"tag:{tag}" for tag in sorted(tags)]]

    return _complete(ctx, incomplete, names)


def complete_revisions_and_sessions(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[str]:
    return complete_revisions(ctx, param, incomplete) + complete_sessions(ctx, param, incomplete)


def _labels_and_tags(store: Store, ctx: click.Context) -> tuple[set[str], set[str]]:
    """Return those of the session that was typed; without one, those of all sessions."""
    wanted = ctx.params.get("session")
    labels: set[str] = set()
    tags: set[str] = set()
    for info in store.sessions():
        if wanted in (None, info.name):
            for checkpoint in islice(store.session(info.name).tree(), _CHECKPOINTS):
                if not checkpoint.damaged:
                    labels |= {checkpoint.label} if checkpoint.label else set()
                    tags |= {*checkpoint.tags}
    return labels, tags
