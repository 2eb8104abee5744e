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

from holdfast import Budget, json
from holdfast.cli import output, select
from holdfast.cli.complete import complete_sessions
from holdfast.cli.context import App, command
from holdfast.cli.select import session_argument, session_option
from holdfast.errors import Corrupt, HoldfastError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast import Abandoned, Pending, Run, Session


@command("resume")
@click.argument("session", required=False, shell_complete=complete_sessions)
@click.argument("target", required=False, metavar="[MODULE:FUNCTION]")
@session_option("The same as SESSION.", "named")
@click.option("--takeover", is_flag=True, help="Take the session even if a live worker runs it.")
@click.option("--cost", type=float, help="Halt the run once it has cost this much in total.")
@click.option("--tokens", type=int, help="Halt the run once it has used this many tokens in total.")
@click.option("--turns", type=int, help="Halt the run after this many turns in total.")
def resume_(
    app: App,
    session: str | None,
    target: str | None,
    named: str | None,
    *,
    takeover: bool,
    cost: float | None,
    tokens: int | None,
    turns: int | None,
) -> None:
    """Show the state of a session's run, or resume it with a function.

    MODULE:FUNCTION is called with the run, as in `with session.run(resume=True) as run`. The
    current folder is searched for the module first.
    """
    session, target = select.session_and_more(session, target, named)
    if target is None:
        _print_run(app, session)
        return
    function = _function(target)
    with app.store(write=True) as store:
        handle = select.the_session(store, session)
        name = output.one_line(handle.name)
        unlimited = cost is None and tokens is None and turns is None
        budget = None if unlimited else Budget(cost, tokens, turns)
        opened = handle.run(resume=True, takeover=takeover, budget=budget)
        with _report_failure(target), opened as run:
            app.notice(f"Resuming {name} at {_position(handle)}.")
            _call(target, function, run)
        last = handle.get()
        if app.json:
            app.print_json(json.checkpoint(last))
        else:
            app.print(f"{name}: {output.status(last) or 'in progress'}, {_position(handle)}")


def _print_run(app: App, session: str | None) -> None:
    with app.store() as store:
        handle = select.the_session(store, session)
        head, pending = handle.head, handle.pending()
        where = _position(handle)
        owner, run = handle.owner(), handle.abandoned()
        if app.json:
            app.print_json(
                {
                    "session": handle.name,
                    "head": None if head is None else json.checkpoint(head),
                    "run": None if run is None else json.abandoned(run),
                    "pending": [json.pending(p) for p in pending],
                }
            )
            return
    app.print(f"{click.style(output.one_line(handle.name), bold=True)}: {where}")
    if owner is not None:
        app.print(f"Process {owner.pid} on {owner.host} is running it now.")
    elif run is None:
        app.print("It has no interrupted run.")
    else:
        app.print(f"Run {run.run} {_interruption(run)}.")
    answered = run is not None and run.state in ("ready", "halted")  # then the hint is out of date
    if head is not None and not head.damaged and head.hint and not answered:
        app.print(f"Hint: {head.hint}")
    for each in pending:
        _print_call(app, each)
    if run is not None:
        typed = app.command_line("resume", handle.name)
        app.notice(f"Resume with: {typed} MODULE:FUNCTION, or session.run() in your program")


def _interruption(run: Abandoned) -> str:
    """Return how a run was interrupted."""
    event = {
        "died": f"died (process {run.pid} on {run.host})",
        "failed": "failed",
        "in doubt": "stopped at a call in doubt",
        "waiting": "waits for an answer",
        "over budget": "was halted",
        "ready": "has its answer, and can be resumed",
        "stopped": "was stopped",
        "halted": "was halted",
    }[run.state]
    has_reason = run.reason and run.state in ("failed", "halted", "over budget", "stopped")
    reason = f": {output.one_line(run.reason or '')}" if has_reason else ""
    return f"{event}, attempt {run.attempt}{reason}"


@contextmanager
def _report_failure(target: str) -> Iterator[None]:
    """Turn an error of the function into one line with its place in the code."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        raise HoldfastError(
            f"{target} failed: {type(e).__name__}: {e}",
            hint=f"see {last.filename}, line {last.lineno}; then resume the run again",
        ) from e


def _position(session: Session) -> str:
    """Return the step and turn that a session is at."""
    head = session.head
    if head is None or head.damaged:
        return "no checkpoint" if head is None else "a damaged checkpoint"
    turn = f", turn {head.run.turn}" if head.run else ""
    return f"step {head.step}{turn}"


def _function(target: str) -> Callable[[Run], Any]:
    """Import MODULE:FUNCTION."""
    module, colon, name = target.partition(":")
    if not module or not colon or not name:
        raise InvalidRequest(f"not a function: {target!r}", hint="give MODULE:FUNCTION")
    if module.endswith(".py"):
        hint = f"give it as {module.removesuffix('.py').replace('/', '.')}:{name}"
        raise InvalidRequest(f"{module} is a file, not a module", hint=hint)
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as e:
        if e.name != module.partition(".")[0] and e.name != module:
            raise InvalidRequest(f"{module} cannot be imported: {e}") from e
        raise InvalidRequest(
            f"there is no module {module!r}",
            hint="modules are searched in the current folder first",
        ) from None
    except Exception as e:
        raise InvalidRequest(f"{module} cannot be imported: {type(e).__name__}: {e}") from e
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidRequest(f"{module} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise InvalidRequest(f"{target} is not a function")
    call = getattr(found, "__call__", None)  # noqa: B004
    if any(is_lazy(each) for is_lazy in _LAZY for each in (found, call)):
        raise _not_run_by_a_call(target)
    return found  # type: ignore[no-any-return]


# A call of these runs nothing yet. The run would be completed before it began.
_LAZY = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)


def _call(target: str, function: Callable[[Run], Any], run: Run) -> None:
    result = function(run)
    if inspect.isawaitable(result):  # such as from a lambda that calls an async function
        if inspect.iscoroutine(result):
            result.close()
        raise _not_run_by_a_call(target)


def _not_run_by_a_call(target: str) -> InvalidRequest:
    return InvalidRequest(
        f"{target} is async or a generator: calling it does not run it",
        hint="give a function that runs it to its end, for example with asyncio.run()",
    )


def _print_call(app: App, each: Pending) -> None:
    mark = {"in doubt": "?", "waiting": "⏸", "running": "…"}[each.state]
    arguments = json.dumps(json.value(each.arguments))
    when = click.style(output.age(each.since), dim=True)
    colour = "yellow" if each.state != "running" else None
    call = output.one_line(each.key if each.name in each.key else f"{each.key}  {each.name}")
    app.print(f"{click.style(f'{mark} {each.state}', fg=colour)}  {call}  {arguments}  {when}")


@command("pending", lists=True)
@session_argument("List only this session, the same as SESSION.")
def pending_(app: App, session: str | None) -> None:
    """List calls in doubt, and questions that runs wait for."""
    with app.store() as store:
        damaged: list[str] = []
        if session is not None:
            found = select.the_session(store, session).pending()
        else:
            found = store.pending(
                on_damage=lambda name, e: damaged.append(f"session {name!r}: {e.message}")
            )
        for each in found:
            _print_pending(app, each)
        if damaged:
            raise Corrupt("; ".join(damaged))
        if not found:
            app.notice("Nothing is pending.")


def _print_pending(app: App, each: Pending) -> None:
    if app.json:
        app.print_json(json.pending(each))
        return
    app.print(click.style(output.one_line(each.session), bold=True))
    _print_call(app, each)
    if each.state == "in doubt":
        typed = app.command_line("resolve", "-s", each.session, each.key)
        app.notice(f"  Decide with: {typed} --result JSON|--rerun|--skip")
    elif each.state == "waiting":
        typed = app.command_line("answer", "-s", each.session, each.key)
        app.notice(f"  Answer with: {typed} JSON")


@command("resolve")
@click.argument("key")
@session_option("The session; optional if there is only one.")
@click.option("--result", metavar="JSON", help="The call was made, with this result.")
@click.option("--rerun", is_flag=True, help="Make the call again.")
@click.option("--skip", is_flag=True, help="Skip the call.")
def resolve_(
    app: App, key: str, session: str | None, result: str | None, *, rerun: bool, skip: bool
) -> None:
    """Decide what to do about the call KEY, which is in doubt.

    The run uses the decision when it is resumed.
    """
    if (result is not None) + rerun + skip != 1:
        raise InvalidRequest("give exactly one decision", hint="--result JSON, --rerun or --skip")
    with app.store(write=True) as store:
        handle = select.the_session(store, session)
        if result is not None:
            handle.resolve(key, _json(result))
        else:
            handle.resolve(key, action="rerun" if rerun else "skip")
        decided = "result" if result is not None else "rerun" if rerun else "skip"
        if app.json:
            app.print_json({"session": handle.name, "key": key, "decided": decided})
            return
        effect = {
            "result": "has its result",
            "rerun": "will be called again",
            "skip": "will be skipped",
        }
        app.print(output.one_line(f"{handle.name}: {key} {effect[decided]}"))
        _print_final(app, handle)


@command("answer")
@click.argument("name")
@click.argument("value")
@session_option("The session; optional if there is only one.")
@click.option("--text", is_flag=True, help="VALUE is plain text, not JSON.")
def answer_(app: App, name: str, value: str, session: str | None, *, text: bool) -> None:
    """Answer a question that a run waits for.

    NAME is a key that `pending` lists, or the name of the question if only one has that name. VALUE
    is JSON: true, false, 5 or '"some text"'.
    """
    given = value if text else _json(value, "--text")
    with app.store(write=True) as store:
        handle = select.the_session(store, session)
        handle.answer(name, given)
        if app.json:
            app.print_json({"session": handle.name, "name": name, "answer": json.value(given)})
            return
        answer = f"{handle.name}: {name}: {json.dumps(json.value(given))}"
        app.print(f"{output.one_line(answer)}; the run can be resumed")
        _print_final(app, handle)


def _print_final(app: App, session: Session) -> None:
    app.notice(f"This is final. To see the run: {app.command_line('resume', session.name)}")


def _json(text: str, option: str | None = None) -> Any:
    """Parse JSON. Other text is refused: an agent may take the text "no" for a yes."""
    try:
        return jsons.loads(text)
    except (ValueError, RecursionError) as e:
        other = f", or give {option}" if option else ""
        hint = f"JSON, such as false or 5; text needs quotes: {output.quoted(jsons.dumps(text))}"
        raise InvalidRequest(f"not JSON: {text!r}: {e}", hint=hint + other) from e


@command("abandoned", lists=True)
@click.option(
    "--halted",
    is_flag=True,
    help="Also list runs that failed, were halted, wait for an answer or a decision, or are ready.",
)
def abandoned_(app: App, *, halted: bool) -> None:
    """List sessions whose run died and was not resumed."""
    with app.store() as store:
        found = store.abandoned(halted=halted)
        for each in found:
            if app.json:
                app.print_json(json.abandoned(each))
                continue
            app.print(f"{output.one_line(each.session)}  run {each.run} {_interruption(each)}")
        if not found:
            app.notice("There are no abandoned runs.")
