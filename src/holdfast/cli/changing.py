"""Commands that change a session. Each says how to take it back."""

from __future__ import annotations

import sys
from typing import Any

import click

from holdfast import shapes
from holdfast.cli import naming, words
from holdfast.cli.app import App, command, session_option, yes_option
from holdfast.cli.completing import complete_revisions, complete_sessions
from holdfast.cli.wording import as_commands
from holdfast.errors import UNREADABLE, InvalidRequest
from holdfast.model import STATUSES


@command("save")
@click.argument("session", shell_complete=complete_sessions)
@click.argument("file", default="-", type=click.Path(allow_dash=True, dir_okay=False))
@click.option("--label", "-l", metavar="TEXT", help="A label for the checkpoint.")
@click.option("--tag", "-t", "tags", metavar="TAG", multiple=True, help="A tag for it.")
@click.option("--status", type=click.Choice(STATUSES), help="The session's status from now on.")
@click.option("--reason", metavar="TEXT", help="Why the status is what it is.")
@click.option("--key", metavar="KEY", help="An external id, unique in the session.")
@click.option(
    "--agent",
    metavar="NAME",
    help="The agent that saves; a new session belongs to it from then on.",
)
def save_(
    app: App,
    session: str,
    file: str,
    label: str | None,
    tags: tuple[str, ...],
    agent: str | None,
    **fields: Any,
) -> None:
    """Save a state from a JSON FILE, or from standard input, to SESSION.

    The session is made if there is none of that name, and so is the store. The file may use the
    tags with which `holdfast state` prints what JSON has no word for.
    """
    state = read_json(file)
    given = {name: value for name, value in fields.items() if value is not None}
    if label is not None:
        given["label"] = label
    with app.store(create=True) as store:
        handle = store.session(session, agent=agent)
        checkpoint = handle.save(state, tags=tags, **given)
        if app.json:
            app.emit(shapes.checkpoint(checkpoint))
            return
        length = naming.short_length(store.backend, [checkpoint])
        app.say(words.line(checkpoint, length, head=True))
        app.way_back(handle)


def read_json(file: str) -> Any:
    """A value from a file of JSON in the exact rendering."""
    from holdfast.codec import portable, values

    try:
        if file == "-":
            raw = sys.stdin.buffer.read()
        else:
            with open(file, "rb") as source:
                raw = source.read()
        return values.decode(portable.hide(portable.loads(raw)))
    except OSError as e:
        raise InvalidRequest(f"cannot read {file}: {e.strerror}") from e
    except ValueError as e:
        raise InvalidRequest(f"{_said(file)} is not JSON: {e}") from e
    except UNREADABLE as e:
        raise InvalidRequest(
            f"{_said(file)}: {e.message}",
            hint='a key that begins with "$" is a tag; write "$$" for one of your own',
        ) from e


def _said(file: str) -> str:
    return "standard input" if file == "-" else file


@command("fork")
@click.argument("revision", shell_complete=complete_revisions)
@click.argument("name")
@session_option
def fork_(app: App, revision: str, name: str, session: str | None) -> None:
    """Begin a new session NAME with the state at REVISION. No data is copied."""
    with app.store(write=True) as store:
        found = naming.the_checkpoint(store, revision, session)
        new = found.session.fork(name, found.checkpoint.id)
        head = new.get()
        if app.json:
            app.emit(shapes.checkpoint(head))
            return
        length = naming.short_length(store.backend, [head, found.checkpoint])
        at, of = found.checkpoint, words.one_line(found.checkpoint.session)
        app.say(f"{words.one_line(name)} begins at {at.id[:length]} of {of}, step {at.step}")
        app.way_back(new)


@command("rewind")
@click.argument("revision", shell_complete=complete_revisions)
@session_option
def rewind_(app: App, revision: str, session: str | None) -> None:
    """Move a session's head to REVISION. Nothing is deleted; the next save makes a branch.

    What agents did to the outside world is not reversed.
    """
    with app.store(write=True) as store:
        found = naming.the_checkpoint(store, revision, session)
        before = found.session.head
        checkpoint = found.session.rewind(found.checkpoint.id)
        if app.json:
            app.emit(shapes.checkpoint(checkpoint))
            return
        length = naming.short_length(store.backend, [checkpoint])
        was = f", was at step {before.step}" if before is not None and not before.damaged else ""
        name = words.one_line(found.session.name)
        app.say(f"{name} is at {checkpoint.id[:length]}, step {checkpoint.step}{was}")
        app.way_back(found.session)


def _step_back(app: App, session: str | None, *, redo: bool) -> None:
    with app.store(write=True) as store:
        # One that was deleted has no name in the lists, and comes back by undo.
        handle = store.session(session) if session else naming.the_session(store, None)
        operation = handle.redo() if redo else handle.undo()
        if app.json:
            app.emit(shapes.operation(operation))
            return
        app.say(words.one_line(f"{handle.name}: {operation.summary}"))
        app.way_back(handle, redo=not redo)


@command("undo")
@session_option
def undo_(app: App, session: str | None) -> None:
    """Take the last change of a session back: a save, a rewind, a tag, a deletion."""
    _step_back(app, session, redo=False)


@command("redo")
@session_option
def redo_(app: App, session: str | None) -> None:
    """Do again what undo took back."""
    _step_back(app, session, redo=True)


@command("ops")
@session_option
def ops_(app: App, session: str | None) -> None:
    """List what was done to a session, apart from saving: the newest first."""
    with app.store() as store:
        handle = naming.the_session(store, session)
        found = handle.ops()
        if not found:
            app.note("Nothing was done to it apart from saving.")
        for operation in reversed(found):
            if app.json:
                app.emit(shapes.operation(operation))
                continue
            back = words.one_line(as_commands(operation.way_back))
            done = words.one_line(operation.summary)
            when = click.style(words.age(operation.created_at), dim=True)
            app.say(f"{operation.number:>4}  {operation.kind:<7} {done}  {when}")
            app.say(click.style(f"{'':14}way back: {back}", dim=True))


@command("tag")
@click.argument("revision", shell_complete=complete_revisions)
@click.argument("tags", nargs=-1, required=True)
@session_option
def tag_(app: App, revision: str, tags: tuple[str, ...], session: str | None) -> None:
    """Add TAGS to a checkpoint."""
    with app.store(write=True) as store:
        found = naming.the_checkpoint(store, revision, session)
        _told(app, found, found.session.tag(found.checkpoint.id, *tags))


@command("label")
@click.argument("revision", shell_complete=complete_revisions)
@click.argument("label")
@session_option
def label_(app: App, revision: str, label: str, session: str | None) -> None:
    """Give a checkpoint a LABEL, in place of the one it has."""
    with app.store(write=True) as store:
        found = naming.the_checkpoint(store, revision, session)
        _told(app, found, found.session.label(found.checkpoint.id, label))


def _told(app: App, found: naming.Found, checkpoint: Any) -> None:
    if app.json:
        app.emit(shapes.checkpoint(checkpoint))
        return
    app.say(words.line(checkpoint, naming.short_length(found.session.store.backend, [checkpoint])))
    app.way_back(found.session)


@command("delete")
@click.argument("revision", required=False, shell_complete=complete_revisions)
@session_option
@yes_option
def delete_(app: App, revision: str | None, session: str | None) -> None:
    """Delete a checkpoint, or with --session and no REVISION a whole session.

    It is hidden at once; undo brings it back until gc has freed it.
    """
    with app.store(write=True) as store:
        if revision is not None:
            found = naming.the_checkpoint(store, revision, session)
            handle, id = found.session, found.checkpoint.id
            what = f"checkpoint {id} (step {found.checkpoint.step}) of session {handle.name!r}"
        elif session is None:
            raise InvalidRequest("delete what?", hint="give a REVISION, or --session NAME")
        else:
            handle, id = naming.the_session(store, session), None
            count = words.plural(sum(1 for _ in handle.tree()), "checkpoint")
            what = f"session {handle.name!r} with {count}"
        app.note(f"To be deleted, because you say so: {what}.")
        app.note("It can be undone until `holdfast gc` frees it.")
        app.confirm("Delete it?")
        operation = handle.delete(id)
        if app.json:
            app.emit(shapes.operation(operation))
            return
        app.say(f"Deleted {what}.")
        app.way_back(handle)
