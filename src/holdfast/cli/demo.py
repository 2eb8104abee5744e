"""`holdfast demo`: an agent is killed and resumed, shown with real output."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

import holdfast
from holdfast.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

_AGENT = [sys.executable, "-m", "holdfast.cli.demo_agent"]


def play(folder: str | None, *, pause: float) -> None:
    """Show the demo, with a pause after each explanation. Without a folder, it leaves nothing."""
    with _scratch(folder) as path:
        _Demo(path, pause).run()
    click.echo(click.style("\nTry next:", bold=True))
    if folder is None:
        click.echo("    holdfast demo --folder demo    # the folder of this demo is deleted")
    store = shlex.quote(os.path.join(folder or "demo", "agent.db"))
    click.echo(f"    export HOLDFAST_STORE={store}")
    for words in ("sessions", "show @~1 -s lisbon", "undo -s grand", "search hotel", "--help"):
        click.echo(f"    holdfast {words}")


@contextmanager
def _scratch(folder: str | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as name:
            yield Path(name)
    else:
        os.makedirs(folder, exist_ok=True)
        yield Path(folder).resolve()


class _Demo:
    def __init__(self, folder: Path, pause: float) -> None:
        self._folder, self._pause = folder, pause
        self._url = str(folder / "agent.db")

    def run(self) -> None:
        self._explain(
            "A travel agent works. Each of its steps is a checkpoint. Then its process is killed,",
            "in the middle of a tool call.",
        )
        self._agent_is_killed()
        self._explain("Every step that was acknowledged is there:")
        self._holdfast("log")
        self._explain(
            "It died during a call. holdfast cannot know whether the hotel was booked, so it",
            "does not guess, and does not book twice:",
        )
        key = self._in_doubt()
        self._explain("The hotel's records show that it was booked, so that is what we answer:")
        self._shell("cat bookings.txt")
        self._holdfast("resolve", key, "--result", json.dumps("booked: Casa do Rio"))
        self._explain("The same program again. It resumes where it was, and books nothing twice:")
        self._agent()
        self._shell("cat bookings.txt")
        self._holdfast("log")
        self._explain(
            "You do not like the last answer? Go back. Nothing is deleted, so this can be undone:"
        )
        self._holdfast("rewind", "@~1", "-s", "lisbon")
        self._holdfast("undo", "-s", "lisbon")
        self._explain(
            "What if it had gone another way? Here are two forks from the moment before",
            "anything was booked. No data is copied:",
        )
        self._fork_twice()
        self._holdfast("log")
        self._explain("What is the difference between the two?")
        self._holdfast("diff", self._id("cheap"), self._id("grand"))
        self._explain("When did the budget change, and from what?")
        self._holdfast("blame", "plan.budget", "-s", "grand")
        self._explain("Nothing was lost or changed, and that can be checked:")
        self._holdfast("verify", "--read-data")

    # -- the story -----------------------------------------------------------------------------

    def _agent_is_killed(self) -> None:
        command = [*_AGENT, str(self._folder), "--slow"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:  # noqa: S603
            for line in child.stdout or ():
                click.echo(click.style(f"    agent: {line.rstrip()}", dim=True))
                if "hotel" in line:
                    child.kill()
        click.echo(click.style(f"    kill -9 {child.pid}", fg="red"))
        if child.returncode >= 0:
            raise Unavailable("the agent of the demo ended before it was killed")

    def _agent(self) -> None:
        command = [*_AGENT, str(self._folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
        if done.returncode:
            raise Unavailable(f"the agent of the demo failed: {done.stderr.strip()[-300:]}")

    def _in_doubt(self) -> str:
        self._holdfast("pending")
        with holdfast.open(self._url, read_only=True) as store:
            return store.pending()[0].key

    def _fork_twice(self) -> None:
        with holdfast.open(self._url) as store:
            trip = store.session("lisbon")
            start = next(c for c in trip.history() if c.parent is None)
            trip.label(start.id, "before booking")
            for name, budget, words in (
                ("cheap", 400, "A bus, and a room in Alfama."),
                ("grand", 2_500, "First class, and a suite with a view of the river."),
            ):
                way = trip.fork(name, start.id)
                way.patch(
                    set={("plan", "budget"): budget},
                    append={"messages": [{"role": "assistant", "content": words}]},
                    usage=holdfast.Usage(150, 30, cost=0.0021),
                    label=f"budget {budget}",
                )

    def _id(self, session: str) -> str:
        with holdfast.open(self._url, read_only=True) as store:
            head = store.session(session).get()
            return head.id[: store.id_length([head])]

    # -- output --------------------------------------------------------------------------------

    def _explain(self, *lines: str) -> None:
        click.echo()
        for line in lines:
            click.echo(click.style(line, bold=True))
        time.sleep(self._pause)

    def _holdfast(self, *words: str) -> None:
        """Show a command as the user would type it, and run it."""
        from holdfast.cli.main import run

        click.echo(click.style(f"    $ {shlex.join(['holdfast', *words])}", fg="cyan"))
        code = run(["--store", self._url, *words])
        if code:
            raise Unavailable(f"the demo's command failed: {words[0]}")

    def _shell(self, command: str) -> None:
        click.echo(click.style(f"    $ {command}", fg="cyan"))
        click.echo((self._folder / command.removeprefix("cat ")).read_text(), nl=False)
