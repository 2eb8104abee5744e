"""Commands that change a session. Each prints the command that undoes it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from holdfast import STATUSES, json
from holdfast.cli import output, select
from holdfast.cli.complete import complete_revisions, complete_sessions
from holdfast.cli.context import App, command, yes_option
from holdfast.cli.main import as_commands
from holdfast.cli.select import session_argument, session_option
from holdfast.errors import Conflict, Corrupt, InvalidRequest

if TYPE_CHECKING:
    from holdfast import Checkpoint, Session, Store


@command("save")
@click.argument("session", required=False, shell_complete=complete_sessions)
@click.argument("file", required=False)
@session_option("The same as SESSION.", "named")
@click.option("--label", "-l", metavar="TEXT", help="A label for the new checkpoint.")
@click.option(
    "--tag", "-t", "tags", metavar="TAG", multiple=True, help="A tag for it (may be repeated)."
)
@click.option("--status", type=click.Choice(STATUSES), help="The new status of the session.")
@click.option("--reason", metavar="TEXT", help="The reason for the status.")
@click.option("--key", metavar="KEY", help="An external id, unique in the session.")
@click.option("--agent", metavar="NAME", help="The agent that saves; a new session belongs to it.")
def save_(
    app: App,
    session: str | None,
    file: str | None,
    named: str | None,
    label: str | None,
    tags: tuple[str, ...],
    agent: str | None,
    **fields: Any,
) -> None:
    """Save a state to SESSION, from a JSON FILE or from standard input.

    A missing session is created, and so is a missing store. The file may contain the tags that
    `holdfast state` prints for values that JSON does not have, such as {"$bytes": …}.
    """
    name, file = _session_and_file(session, file, named)
    if file is None and sys.stdin.isatty():
        app.notice("Type the state as JSON, then Ctrl-D.")
    state = read_json(file or "-")
    given = {name: value for name, value in fields.items() if value is not None}
    if label is not None:
        given["label"] = label
    with app.store(create=True) as store:
        handle = store.session(name, agent=agent)
        checkpoint = handle.save(state, tags=tags, **given)
        _print_changed(app, store, handle, checkpoint, head=True)


def _session_and_file(
    session: str | None, file: str | None, named: str | None
) -> tuple[str, str | None]:
    """Return the session and the file to save. A file is never taken for a session.

    Raises InvalidRequest if there is no session, or if SESSION looks like a file.
    """
    name, file = select.session_and_more(session, file, named)
    if name is None:
        raise InvalidRequest("save to which session?", hint="holdfast save SESSION FILE")
    if session == name and (name == "-" or name.endswith(".json") or os.path.isfile(name)):
        quoted = output.quoted(name)
        raise InvalidRequest(
            f"{name} is a file: to which session should it be saved?",
            hint=f"holdfast save SESSION {quoted}; a session of that name: --session {quoted}",
        )
    return name, file


def read_json(file: str) -> Any:
    """Return the value in a file of JSON; "-" is standard input."""
    try:
        if file == "-":
            text = sys.stdin.buffer.read()
        else:
            with open(file, "rb") as source:
                text = source.read()
    except OSError as e:
        raise InvalidRequest(f"cannot read {file}: {e.strerror}") from e
    try:
        return json.parse(text)
    except InvalidRequest as e:
        where = "standard input" if file == "-" else file
        raise InvalidRequest(f"{where}: {e.message}", hint=e.hint) from e


@command("fork")
@click.argument("revision", shell_complete=complete_revisions)
@click.argument("name")
@session_option()
def fork_(app: App, revision: str, name: str, session: str | None) -> None:
    """Start a new session NAME from the state at REVISION. No data is copied."""
    with app.store(write=True) as store:
        found = select.the_checkpoint(store, revision, session)
        new = found.session.fork(name, found.checkpoint.id)
        head = new.get()
        if app.json:
            app.print_json(json.checkpoint(head))
            return
        length = store.id_length([head, found.checkpoint])
        at, of = found.checkpoint, output.one_line(found.checkpoint.session)
        app.print(f"{output.one_line(name)} begins at {at.id[:length]} of {of}, step {at.step}")
        app.print_undo(new)


@command("adopt")
@click.argument("fork", shell_complete=complete_sessions)
@session_option("The session that adopts; by default, the one that FORK was forked from.")
def adopt_(app: App, fork: str, session: str | None) -> None:
    """Make the line of FORK the line of its origin: state, history, usage and cost.

    No data is copied, and the fork stays.
    """
    with app.store(write=True) as store:
        handle = select.the_session(store, fork)
        if session is None:
            origins = (c.parent_session for c in handle.history() if c.parent_session != c.session)
            session = next((name for name in origins if name is not None), None)
        if session is None:
            raise InvalidRequest(f"session {fork!r} was not forked from another one")
        origin = select.the_session(store, session)
        _print_changed(app, store, origin, origin.adopt(handle), head=True)


@command("rewind")
@click.argument("revision", shell_complete=complete_revisions)
@session_option()
def rewind_(app: App, revision: str, session: str | None) -> None:
    """Move a session's head to REVISION. Nothing is deleted; the next save makes a branch.

    Effects of agents outside the store are not reversed.
    """
    with app.store(write=True) as store:
        found = select.the_checkpoint(store, revision, session)
        before = found.session.head
        checkpoint = found.session.rewind(found.checkpoint.id)
        if app.json:
            app.print_json(json.checkpoint(checkpoint))
            return
        length = store.id_length([checkpoint])
        was = f", was at step {before.step}" if before is not None and not before.damaged else ""
        name = output.one_line(found.session.name)
        app.print(f"{name} is at {checkpoint.id[:length]}, step {checkpoint.step}{was}")
        app.print_undo(found.session)


def _undo(app: App, session: str | None, *, redo: bool) -> None:
    with app.store(write=True) as store:
        # A deleted session is in no list, but undo restores it.
        handle = store.session(session) if session else select.the_session(store, None)
        operation = handle.redo() if redo else handle.undo()
        if app.json:
            app.print_json(json.operation(operation))
            return
        app.print(output.one_line(f"{handle.name}: {operation.summary}"))
        app.print_undo(handle, redo=not redo)


@command("undo")
@session_argument()
@click.option("--prune", is_flag=True, help="Undo the last `prune --all`, in all its sessions.")
def undo_(app: App, session: str | None, *, prune: bool) -> None:
    """Undo the last change of a session: a save, a rewind, a tag, a deletion.

    --prune undoes a prune of the whole store, and leaves later changes as they are. Exit code 4 if
    some sessions could not get their checkpoints back.
    """
    if not prune:
        _undo(app, session, redo=False)
    elif session is not None:
        raise InvalidRequest("--prune concerns all sessions", hint="leave out the session")
    else:
        _undo_prune(app)


def _undo_prune(app: App) -> None:
    with app.store(write=True) as store:
        done = store.undo_prune()
    if app.json:
        skipped = [{"what": name, "why": why} for name, why in done.skipped]
        operations = [json.operation(each) for each in done.operations]
        app.print_json({"operations": operations, "skipped": skipped})
    else:
        app.print(f"The prune is undone in {output.plural(len(done.operations), 'session')}.")
        for name, why in done.skipped:
            text = output.one_line(f"{name}: {as_commands(why)}")
            app.print(f"{click.style('left out', fg='yellow')}  {text}")
    if done.skipped:
        raise click.exceptions.Exit(Conflict.exit_code)


@command("redo")
@session_argument()
def redo_(app: App, session: str | None) -> None:
    """Redo the last change that was undone."""
    _undo(app, session, redo=True)


@command("operations", lists=True)
@session_argument()
def operations_(app: App, session: str | None) -> None:
    """List the operations on a session other than saves, newest first."""
    with app.store() as store:
        handle = select.the_session(store, session)
        found = handle.operations()
        if not found:
            app.notice("The session has no operations other than saves.")
        for operation in reversed(found):
            if app.json:
                app.print_json(json.operation(operation))
                continue
            back = output.one_line(as_commands(operation.way_back))
            summary = output.one_line(operation.summary)
            when = click.style(output.age(operation.created_at), dim=True)
            app.print(f"{operation.number:>4}  {operation.kind:<7} {summary}  {when}")
            app.print(click.style(f"{'':14}how to undo: {back}", dim=True))


@command("rename")
@click.argument("session", shell_complete=complete_sessions)
@click.argument("name")
def rename_(app: App, session: str, name: str) -> None:
    """Give SESSION another NAME. Its checkpoints, forks and children stay as they are."""
    with app.store(write=True) as store:
        handle = select.the_session(store, session)
        operation = handle.rename(name)
        if app.json:
            app.print_json(json.operation(operation))
            return
        app.print(f"{output.one_line(session)} is now called {output.one_line(name)}")
        app.print_undo(handle)


@command("tag")
@click.argument("revision", shell_complete=complete_revisions)
@click.argument("tags", nargs=-1, required=True)
@session_option()
def tag_(app: App, revision: str, tags: tuple[str, ...], session: str | None) -> None:
    """Add TAGS to a checkpoint."""
    with app.store(write=True) as store:
        found = select.the_checkpoint(store, revision, session)
        _print_changed(app, store, found.session, found.session.tag(found.checkpoint.id, *tags))


@command("label")
@click.argument("revision", shell_complete=complete_revisions)
@click.argument("label")
@session_option()
def label_(app: App, revision: str, label: str, session: str | None) -> None:
    """Give a checkpoint a LABEL, which replaces the one it has."""
    with app.store(write=True) as store:
        found = select.the_checkpoint(store, revision, session)
        _print_changed(app, store, found.session, found.session.label(found.checkpoint.id, label))


@command("untag")
@click.argument("revision", shell_complete=complete_revisions)
@click.argument("tags", nargs=-1, required=True)
@session_option()
def untag_(app: App, revision: str, tags: tuple[str, ...], session: str | None) -> None:
    """Remove TAGS from a checkpoint."""
    with app.store(write=True) as store:
        found = select.the_checkpoint(store, revision, session)
        _print_changed(app, store, found.session, found.session.untag(found.checkpoint.id, *tags))


@command("unlabel")
@click.argument("revision", shell_complete=complete_revisions)
@session_option()
def unlabel_(app: App, revision: str, session: str | None) -> None:
    """Remove the label of a checkpoint."""
    with app.store(write=True) as store:
        found = select.the_checkpoint(store, revision, session)
        _print_changed(app, store, found.session, found.session.unlabel(found.checkpoint.id))


def _print_changed(
    app: App, store: Store, session: Session, checkpoint: Checkpoint, *, head: bool = False
) -> None:
    if app.json:
        app.print_json(json.checkpoint(checkpoint))
        return
    app.print(output.checkpoint_line(checkpoint, store.id_length([checkpoint]), head=head))
    app.print_undo(session)


@command("delete")
@click.argument("revision", required=False, shell_complete=complete_revisions)
@session_option("The session to delete, or the one that REVISION belongs to.")
@yes_option
def delete_(app: App, revision: str | None, session: str | None) -> None:
    """Delete a checkpoint, or with --session and no REVISION a whole session.

    It disappears at once. Undo restores it until gc has freed it.
    """
    with app.store(write=True) as store:
        if revision is not None:
            try:
                found = select.the_checkpoint(store, revision, session)
            except Corrupt:  # delete() takes the id of a checkpoint that cannot be read
                handle, id = select.the_session(store, session), revision
                what = f"the damaged checkpoint {id} of session {handle.name!r}"
            else:
                handle, id = found.session, found.checkpoint.id
                what = f"checkpoint {id} (step {found.checkpoint.step}) of session {handle.name!r}"
        elif session is None:
            raise InvalidRequest("delete what?", hint="give a REVISION, or --session NAME")
        else:
            handle, id = select.the_session(store, session), None
            count = output.plural(sum(1 for _ in handle.tree()), "checkpoint")
            what = f"session {handle.name!r} with {count}"
        app.notice(f"This deletes {what}.")
        app.notice("Undo restores it, until `holdfast gc --all` frees it.")
        app.confirm("Delete it?")
        operation = handle.delete(id)
        if app.json:
            app.print_json(json.operation(operation) | {"forks": [*operation.forks]})
            return
        if id is None and operation.deleted:  # another process may have saved since the count
            what = f"session {handle.name!r} with {output.plural(operation.deleted, 'checkpoint')}"
        app.print(f"Deleted {what}.")
        if "to" in operation.details:
            head = handle.get()
            app.print(f"The head is now at {head.id[: store.id_length([head])]}, step {head.step}.")
        if operation.forks:
            names = ", ".join(map(repr, operation.forks))
            app.notice(f"Forks keep the data that they share: {output.one_line(names)}.")
        app.print_undo(handle)
