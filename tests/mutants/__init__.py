"""The table of mutants: the engine without one of its guards each.

A test or a campaign must fail on every mutant; a guard without one can get lost unnoticed. An entry
is a function with the address of what it replaces. Its docstring names the guard that is missing:

    @mutant(".maintenance.gc:FreePlanner._new_graft")
    def no_grafts(real):
        \"\"\"Checkpoints know their parent after gc has removed those between.\"\"\"
        return lambda *args: None

An address is a module, a colon and a path of attributes; a leading dot stands for `holdfast`.
So the name of an internal is written in one place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest  # not at run time: child programs whose calls are traced remove guards, too

Replacement = Callable[[Any], Any]
"""Takes what is there, returns what replaces it."""

MUTANTS: dict[str, Mutant] = {}


class Mutant:
    def __init__(self, name: str, guard: str, changes: dict[str, Replacement]) -> None:
        assert name not in MUTANTS, f"two mutants are called {name}"
        self.name, self.guard, self.changes = name, guard, changes
        self.__name__ = name  # the id of a parametrized test
        MUTANTS[name] = self

    def __repr__(self) -> str:
        return self.name

    def __call__(self, patch: pytest.MonkeyPatch | None = None) -> None:
        """Remove the guard, until the patch is undone; without one, for the rest of the process."""
        put = patch.setattr if patch is not None else setattr
        for address, replacement in self.changes.items():
            owner, attribute = _found(address)
            put(owner, attribute, replacement(getattr(owner, attribute)))


def _found(address: str) -> tuple[Any, str]:
    """Return the object that an address is an attribute of, and the attribute's name."""
    module, _, path = address.partition(":")
    owner: Any = importlib.import_module(module, "holdfast")
    *outer, attribute = path.split(".")
    for name in outer:
        owner = getattr(owner, name)
    return owner, attribute


def mutant(*addresses: str) -> Callable[[Replacement], Mutant]:
    """Enter a mutant: each address gets what the decorated function returns for it."""

    def enter(replacement: Replacement) -> Mutant:
        assert replacement.__doc__, "its docstring names the guard"
        changes = dict.fromkeys(addresses, replacement)
        return Mutant(replacement.__name__, replacement.__doc__, changes)

    return enter


def entry(name: str, guard: str, address: str, value: Any) -> Mutant:
    """Enter a mutant that replaces something by a value."""
    return Mutant(name, guard, {address: lambda _: value})


def named(name: str) -> Mutant:
    """Return a mutant of the engine, for a child program that gets its name."""
    for room in ("files", "runs", "maintenance", "storage", "history", "contract"):
        importlib.import_module(f"{__name__}.{room}")
        if name in MUTANTS:
            break
    return MUTANTS[name]


def nothing(*args: Any, **more: Any) -> None:
    """Do nothing, in place of a guard."""
