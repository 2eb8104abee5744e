"""Make docs/log.svg: the output of `holdfast log`, with a fixed clock and fixed ids."""

import contextlib
import datetime as dt
import io
import json
import os
import random
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
from rich.console import Console
from rich.text import Text

import holdfast
from holdfast.cli import main, output

START = dt.datetime(2026, 5, 4, 9, 0, tzinfo=dt.UTC)
WIDTH = 108


def svg() -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text("$ holdfast log", style="bold"))
    console.print(Text.from_ansi(printed()), soft_wrap=True)
    drawn = console.export_svg(title="holdfast log", unique_id="log")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # fonts from a network
    return drawn.replace("Fira Code, ", "").rstrip() + "\n"


def printed() -> str:
    """Return the output of the command, with its colours."""
    clock = _Clock()
    out = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("time.time_ns", clock),
        mock.patch("holdfast.ids._random", random.Random(42)),
        mock.patch.dict(os.environ, COLUMNS=str(WIDTH)),
    ):
        url = str(Path(folder) / "agent.db")
        with holdfast.open(url) as store:
            _history(store, clock.wait)
        age = partial(output.age, now=clock.now())
        with (
            mock.patch("holdfast.cli.output.age", age),
            mock.patch("click.utils.should_strip_ansi", return_value=False),
            contextlib.redirect_stdout(out),
        ):
            code = main.run(["--store", url, "log"])
    if code:
        raise click.ClickException(f"holdfast log ended with {code}")
    return out.getvalue()


class _Clock:
    """A clock that moves only when `wait` is called."""

    def __init__(self) -> None:
        self._ns = int(START.timestamp()) * 1_000_000_000

    def __call__(self) -> int:
        return self._ns

    def wait(self, seconds: int) -> None:
        self._ns += seconds * 1_000_000_000

    def now(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self._ns / 1e9, dt.UTC)


def _history(store: holdfast.Store, wait: Callable[[int], None]) -> None:
    """Save a trip that is planned twice, and fork it once."""
    trip = store.session("trip-42", agent="planner")
    trip.save({"messages": [_said("user", "Three days in Lisbon.")], "budget": 900}, label="asked")
    wait(41)
    usage = holdfast.Usage(tokens=1_830, cost=0.0092)
    trip.append("messages", _said("assistant", "A hotel by the river?"), tags=["plan"], usage=usage)
    wait(65)
    call = holdfast.ToolCall("c1", "book_hotel", {"nights": 3})
    asks = _said("assistant", "") | {"tool_calls": [_function(call)]}
    trip.append("messages", asks, pending=[call], usage=holdfast.Usage(tokens=640, cost=0.0031))
    wait(160)
    trip.rewind("tag:plan")
    trip.append("messages", _said("user", "Something cheaper?"))
    wait(38)
    trip.patch(
        set={"budget": 600}, usage=holdfast.Usage(tokens=2_210, cost=0.0111), label="cheaper"
    )
    wait(75)
    hostel = trip.fork("trip-42-hostel", at="tag:plan")
    usage = holdfast.Usage(tokens=1_120, cost=0.0056)
    hostel.append(
        "messages", _said("assistant", "A hostel in Alfama."), usage=usage, status="completed"
    )
    wait(52)
    usage = holdfast.Usage(tokens=1_480, cost=0.0073)
    trip.append(
        "messages", _said("assistant", "Booked: Casa do Rio."), usage=usage, status="completed"
    )
    wait(180)


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _function(call: holdfast.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}
