"""Everything that the viewer changes. Each is a call of the library, and as undoable as that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import shapes
from holdfast.codec import portable, values
from holdfast.errors import Corrupt, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast import Session, Store
    from holdfast.shapes import Shape
    from holdfast.web.asking import Asked


def fork(store: Store, asked: Asked) -> Shape:
    """A new session from a checkpoint."""
    at = asked.checkpoint(store)
    made = store.session(at.session).fork(asked.text("name"), at.id)
    return shapes.checkpoint(made.get())


def rewind(store: Store, asked: Asked) -> Shape:
    """A session's head moves to a checkpoint; nothing is deleted."""
    return shapes.checkpoint(_session(store, asked).rewind(asked.text("id")))


def undo(store: Store, asked: Asked) -> Shape:
    """With `ref`, what was told to be taken back, or nothing."""
    return shapes.operation(asked.session(store)._operator.undo(_ref(asked)))


def redo(store: Store, asked: Asked) -> Shape:
    return shapes.operation(asked.session(store)._operator.redo(_ref(asked)))


def _ref(asked: Asked) -> tuple[str, int] | None:
    ref = asked.maybe("ref")
    if ref is None:
        return None
    where, _, n = ref.partition(" ")
    return where, int(n) if n.isascii() and n.isdigit() else 0


def tag(store: Store, asked: Asked) -> Shape:
    at = asked.checkpoint(store)
    return shapes.checkpoint(store.session(at.session).tag(at.id, asked.text("tag")))


def label(store: Store, asked: Asked) -> Shape:
    at = asked.checkpoint(store)
    return shapes.checkpoint(store.session(at.session).label(at.id, asked.text("label")))


def resolve(store: Store, asked: Asked) -> Shape:
    """What became of a call in doubt: `result` with its value, `rerun` or `skip`."""
    session, key, decided = asked.session(store), asked.text("key"), asked.text("decided")
    if decided == "result":
        session.resolve(key, result=_value(asked, "result"))
    elif decided in ("rerun", "skip"):
        session.resolve(key, rerun=decided == "rerun", skip=decided == "skip")
    else:
        raise InvalidRequest(f"not a decision: {decided!r}", hint="result, rerun or skip")
    return {"session": session.name, "key": key, "decided": decided}


def answer(store: Store, asked: Asked) -> Shape:
    session, name, given = asked.session(store), asked.text("name"), _value(asked, "answer")
    session.answer(name, given)
    return {"session": session.name, "name": name, "answer": shapes.value(given)}


def _session(store: Store, asked: Asked) -> Session:
    """The one that is named; without a name, the one that the checkpoint lies in."""
    if asked.maybe("session") is not None:
        return asked.session(store)
    return store.session(asked.checkpoint(store).session)


def _value(asked: Asked, name: str) -> Any:
    """A value of any type, in the rendering in which values are shown."""
    try:
        return values.decode(portable.hide(asked.value(name)))
    except Corrupt as e:
        raise InvalidRequest(f"{name}: {e.message}") from e


ACTIONS: dict[str, Callable[[Store, Asked], Any]] = {
    function.__name__: function
    for function in (fork, rewind, undo, redo, tag, label, resolve, answer)
}
