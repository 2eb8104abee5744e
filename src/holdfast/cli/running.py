"""Commands about runs: resume, pending, resolve, answer, abandoned."""

from __future__ import annotations

import inspect
import json as jsons
import os
import sys
import traceback
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from holdfast import leases, lineage, shapes
from holdfast.cli import naming, words
from holdfast.cli.app import App, command, session_option
from holdfast.cli.completing import complete_sessions
from holdfast.errors import Corrupt, HoldfastError, InvalidRequest
from holdfast.runs.handles import all_pending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast import Pending, Run, Session


@command("resume")
@click.argument("session", required=False, shell_complete=complete_sessions)
@click.argument("target", required=False, metavar="[MODULE:FUNCTION]")
@click.option("--takeover", is_flag=True, help="Take the session even from a worker that lives.")
def resume_(app: App, session: str | None, target: str | None, *, takeover: bool) -> None:
    """Show where a session stands, or let a function go on with it.

    MODULE:FUNCTION is called with the run, as in `with session.run(resume=True) as run`; the
    current folder is searched for it first.
    """
    if target is not None:
        function = _function(target)
        with app.store(write=True) as store:
            handle = naming.the_session(store, session)
            name = words.one_line(handle.name)
            with _told(target), handle.run(resume=True, takeover=takeover) as run:
                app.note(f"Resuming {name} at {_where(handle)}.")
                _called(target, function, run)
            last = handle.get()
            if app.json:
                app.emit(shapes.checkpoint(last))
            else:
                app.say(f"{name}: {words.status(last) or 'in progress'}, {_where(handle)}")
        return
    with app.store() as store:
        handle = naming.the_session(store, session)
        head, pending = handle.head, handle.pending()
        where = _where(handle)
        left = next((a for a in store.abandoned(halted=True) if a.session == handle.name), None)
        owner = _owner(handle)
        if app.json:
            app.emit(
                {
                    "session": handle.name,
                    "head": None if head is None else shapes.checkpoint(head),
                    "run": None if left is None else shapes.abandoned(left),
                    "pending": [shapes.pending(p) for p in pending],
                }
            )
            return
    app.say(f"{click.style(words.one_line(handle.name), bold=True)}: {where}")
    if owner is not None:
        app.say(f"Process {owner.pid} on {owner.host} is at work on it.")
    elif left is None:
        app.say("No run of it was interrupted.")
    else:
        how = "was halted" if left.halted else f"died (process {left.pid} on {left.host})"
        app.say(f"Run {left.run} {how}, attempt {left.attempt}.")
    if head is not None and not head.damaged and head.hint:
        app.say(f"Note for whoever resumes: {head.hint}")
    for each in pending:
        _tell(app, each)
    if left is not None:
        again = app.command("resume", handle.name)
        app.note(f"Go on with: {again} MODULE:FUNCTION, or session.run() in your program")


def _owner(session: Session) -> leases.Owner | None:
    """Who runs it now."""
    with session.store.backend.reader() as reader:
        number = lineage.find_session(reader, session.name)
        found = leases.holder(reader, number, lineage.read_head(reader, number)[1])
    return None if found is None else found[1].owner


@contextmanager
def _told(target: str) -> Iterator[None]:
    """What the function raises is told in one line, with its place."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        raise HoldfastError(
            f"{target} failed: {type(e).__name__}: {e}",
            hint=f"look at {last.filename}, line {last.lineno}; the run can be resumed again",
        ) from e


def _where(session: Session) -> str:
    head = session.head
    if head is None or head.damaged:
        return "no checkpoint" if head is None else "a damaged checkpoint"
    turn = f", turn {head.run.turn}" if head.run else ""
    return f"step {head.step}{turn}"


def _function(target: str) -> Callable[[Run], Any]:
    module, colon, name = target.partition(":")
    if not module or not colon or not name:
        raise InvalidRequest(f"not a function: {target!r}", hint="give MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as e:
        if e.name != module.partition(".")[0] and e.name != module:
            raise InvalidRequest(f"{module} cannot be imported: {e}") from e
        raise InvalidRequest(
            f"there is no module {module!r}", hint="it is looked for in the current folder"
        ) from None
    except Exception as e:
        raise InvalidRequest(f"{module} cannot be imported: {type(e).__name__}: {e}") from e
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidRequest(f"{module} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise InvalidRequest(f"{target} is not a function")
    if any(lazy(each) for lazy in _LAZY for each in (found, getattr(found, "__call__", None))):  # noqa: B004
        raise _not_run(target)
    return found  # type: ignore[no-any-return]


# Called, these have done nothing yet; the run would be completed before any of it began.
_LAZY = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)


def _called(target: str, function: Callable[[Run], Any], run: Run) -> None:
    made = function(run)
    if inspect.isawaitable(made):  # by a function that does not look like it
        if inspect.iscoroutine(made):
            made.close()
        raise _not_run(target)


def _not_run(target: str) -> InvalidRequest:
    return InvalidRequest(
        f"{target} is async or a generator: a call alone does not run it",
        hint="give a function that runs it to its end, as with asyncio.run()",
    )


def _tell(app: App, each: Pending) -> None:
    mark = {"in doubt": "?", "waiting": "⏸", "running": "…"}[each.state]
    arguments = shapes.dumps(shapes.value(each.arguments))
    when = click.style(words.age(each.since), dim=True)
    colour = "yellow" if each.state != "running" else None
    what = words.one_line(each.key if each.name in each.key else f"{each.key}  {each.name}")
    app.say(f"{click.style(f'{mark} {each.state}', fg=colour)}  {what}  {arguments}  {when}")


@command("pending")
@session_option
def pending_(app: App, session: str | None) -> None:
    """List calls in doubt, and what runs wait for; without --session, of all sessions."""
    with app.store() as store:
        damaged = []
        if session is not None:
            found = naming.the_session(store, session).pending()
        else:
            with store.backend.reader() as reader:
                told = list(all_pending(reader))
            found = [each for _, of in told if isinstance(of, list) for each in of]
            damaged = [(name, why) for name, why in told if isinstance(why, HoldfastError)]
        for each in found:
            _tell_pending(app, each)
        if damaged:
            raise Corrupt("; ".join(f"session {name!r}: {why.message}" for name, why in damaged))
        if not found:
            app.note("Nothing is pending.")


def _tell_pending(app: App, each: Pending) -> None:
    if app.json:
        app.emit(shapes.pending(each))
        return
    app.say(click.style(words.one_line(each.session), bold=True))
    _tell(app, each)
    if each.state == "in doubt":
        how = app.command("resolve", "-s", each.session, each.key)
        app.note(f"  Decide with: {how} --result JSON|--rerun|--skip")
    elif each.state == "waiting":
        how = app.command("answer", "-s", each.session, each.name)
        app.note(f"  Answer with: {how} JSON")


@command("resolve")
@click.argument("key")
@session_option
@click.option("--result", metavar="JSON", help="It was done, and this is its result.")
@click.option("--rerun", is_flag=True, help="It is to be made again.")
@click.option("--skip", is_flag=True, help="It is to be left out.")
def resolve_(
    app: App, key: str, session: str | None, result: str | None, *, rerun: bool, skip: bool
) -> None:
    """Decide what became of the call KEY, which is in doubt. The run goes on with that."""
    if (result is not None) + rerun + skip != 1:
        raise InvalidRequest("say what became of it", hint="--result JSON, --rerun or --skip")
    with app.store(write=True) as store:
        handle = naming.the_session(store, session)
        if result is not None:
            handle.resolve(key, result=_json(result))
        else:
            handle.resolve(key, rerun=rerun, skip=skip)
        decided = "result" if result is not None else "rerun" if rerun else "skip"
        if app.json:
            app.emit({"session": handle.name, "key": key, "decided": decided})
            return
        said = {"result": "has its result", "rerun": "is to be made again", "skip": "is left out"}
        app.say(words.one_line(f"{handle.name}: {key} {said[decided]}"))
        app.note(f"That is final. See how the run goes on: {app.command('resume', handle.name)}")


@command("answer")
@click.argument("name")
@click.argument("value")
@session_option
@click.option("--text", is_flag=True, help="VALUE is text as it stands, and not JSON.")
def answer_(app: App, name: str, value: str, session: str | None, *, text: bool) -> None:
    """Give a run the answer that it waits for.

    VALUE is JSON: true, false, 5 or '"some text"'.
    """
    given = value if text else _json(value, "--text")
    with app.store(write=True) as store:
        handle = naming.the_session(store, session)
        handle.answer(name, given)
        if app.json:
            app.emit({"session": handle.name, "name": name, "answer": shapes.value(given)})
            return
        said = f"{handle.name}: {name}: {shapes.dumps(shapes.value(given))}"
        app.say(f"{words.one_line(said)}; the run can be resumed")
        app.note(f"That is final. See how the run goes on: {app.command('resume', handle.name)}")


def _json(text: str, option: str | None = None) -> Any:
    """Nothing is guessed: an answer of "no" that was taken as text would count as a yes."""
    try:
        return jsons.loads(text)
    except (ValueError, RecursionError) as e:
        other = f", or give {option}" if option else ""
        hint = f"JSON, such as false or 5; text needs quotes: {words.quoted(jsons.dumps(text))}"
        raise InvalidRequest(f"not JSON: {text!r}: {e}", hint=hint + other) from e


@command("abandoned")
@click.option("--halted", is_flag=True, help="Also those that were left on purpose.")
def abandoned_(app: App, *, halted: bool) -> None:
    """List sessions whose run died, and nobody has taken up again."""
    with app.store() as store:
        found = store.abandoned(halted=halted)
        for each in found:
            if app.json:
                app.emit(shapes.abandoned(each))
                continue
            how = "halted" if each.halted else f"process {each.pid} on {each.host} died"
            name = words.one_line(each.session)
            app.say(f"{name}  run {each.run}, attempt {each.attempt}  {how}")
        if not found:
            app.note("No run was abandoned.")
