"""What a shell may complete: names of sessions, labels and tags.

A shell asks while somebody types, so whatever goes wrong here completes nothing, and says nothing.
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


def _completed(
    ctx: click.Context, incomplete: str, names: Callable[[Store], Iterable[str]]
) -> list[str]:
    from holdfast.cli.app import App
    from holdfast.errors import HoldfastError

    url = ctx.params.get("store") or ctx.find_root().params.get("store")
    try:
        with App(url).store() as store:
            fitting = (n for n in names(store) if n.startswith(incomplete) and _tellable(n))
            return list(islice(fitting, _MOST))
    except (HoldfastError, OSError):
        return []


def _tellable(name: str) -> bool:
    """Whether it fits on a line, and into the bytes of an argument."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return len(name.splitlines()) <= 1 and "\0" not in name


def complete_sessions(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    return _completed(ctx, incomplete, lambda store: (info.name for info in store.sessions()))


def complete_tags(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    return _completed(ctx, incomplete, lambda store: sorted(_marks(store, ctx)[1]))


def complete_revisions(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Labels, and tags by tag:NAME."""

    def names(store: Store) -> list[str]:
        labels, tags = _marks(store, ctx)
        return ["@", *sorted(labels), *[f"tag:{tag}" for tag in sorted(tags)]]

    return _completed(ctx, incomplete, names)


def _marks(store: Store, ctx: click.Context) -> tuple[set[str], set[str]]:
    wanted = ctx.params.get("session")
    labels: set[str] = set()
    tags: set[str] = set()
    for info in store.sessions():
        if wanted in (None, info.name):
            for checkpoint in islice(store.session(info.name).tree(), 10_000):
                if not checkpoint.damaged:
                    labels |= {checkpoint.label} if checkpoint.label else set()
                    tags |= {*checkpoint.tags}
    return labels, tags
