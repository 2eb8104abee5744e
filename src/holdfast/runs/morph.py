"""Making one state into another in place, so that names for its parts stay names for its parts."""

from __future__ import annotations

from typing import Any


def morph(old: Any, new: Any) -> Any:
    """`new`, made of the dicts and lists of `old` wherever both have one in the same place."""
    if type(old) is dict and type(new) is dict:
        items = {key: morph(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(items)
        return old
    if type(old) is list and type(new) is list:
        both = min(len(old), len(new))
        old[:] = [*[morph(old[n], new[n]) for n in range(both)], *new[both:]]
        return old
    return new
