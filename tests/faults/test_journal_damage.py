"""Any bit of a store flipped, or its journal cut: what runs have done, or a typed error."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import InDoubt
from holdfast.format import rows
from holdfast.runs import run_core as runs_run
from holdfast.storage.files import row_json

from .bitrot import flip
from .checking import named
from .test_bitrot import Agreeable

CALLS = [{"id": f"call {n}", "name": "act", "input": {"n": n}} for n in range(4)]


def made(url: Any) -> None:
    """Three calls that are done, and one in doubt: the worker is gone."""
    with holdfast.open(url, durability="normal") as store:
        run = store.session("s").run(state={"done": []})
        run.__enter__()
        for call in CALLS[:3]:
            run.state["done"].append(run.tool(call, lambda n: -n))
        run.checkpoint()
        how = runs_run.StepOptions(on_doubt="ask")
        run._core.prepare(runs_run.Prepare("tool", "act", "call 3", {"n": 3}, how))
        assert run._core._opened is not None
        run._core._opened.stop_heartbeat()


def answers(store: holdfast.Store) -> Iterator[tuple[str, Any]]:
    session = store.session("s")
    yield "calls", [(c.id, c.arguments, c.result, c.success) for c in session.tool_calls()]
    yield "pending", [(p.key, p.state, p.arguments) for p in session.pending()]


def findings(url: Any, expected: dict[str, Any]) -> list[str]:
    """What a damaged store says that is neither true nor an error of ours."""
    found = []
    try:
        with holdfast.open(url, durability="normal", timeout=1) as store:
            for what, answer in answers(store):
                if answer != expected[what]:
                    found.append(f"{what}: {answer}")
            with pytest.raises(InDoubt), store.session("s").run(takeover=True) as run:
                again(run, found)
    except holdfast.HoldfastError:
        pass
    except Exception as e:
        found.append(f"not one of the library's errors: {named(e)}")
    return found


def again(run: holdfast.Run, found: list[str]) -> None:
    for n, call in enumerate(CALLS):
        result = run.tool(call, lambda n: found.append(f"call {n} was made again"))
        if result != -n:
            found.append(f"call {n} returned {result!r}")


@pytest.mark.parametrize("file", ["store.db", "journal.jsonl", "log.jsonl", "lease"])
def test_flipped_bits(tmp_path: Path, rounds: Any, file: str) -> None:
    assert flipped(tmp_path, file, rounds(150, torture=1 << 40)) == []


def test_mutant_that_does_not_compare_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "xxh3_64_digest", lambda body, seed: Agreeable(8))
    monkeypatch.setattr(row_json, "xxh3_64_hexdigest", lambda body, seed: "0" * 16)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        assert flipped(tmp_path, "journal.jsonl", 150) == []


def flipped(tmp_path: Path, file: str, most: int) -> list[str]:
    """What goes wrong when bits of a file are flipped, each in a copy of its own."""
    whole = tmp_path / "whole"
    whole.mkdir()
    url = whole / "store.db" if file == "store.db" else f"files:{whole}/store"
    made(url)
    with holdfast.open(url) as store:
        expected = dict(answers(store))
    assert len(expected["calls"]) == 4
    [path] = [p.relative_to(whole) for p in whole.rglob(file)]
    data = (whole / path).read_bytes()
    bits = random.Random(0).sample(range(8 * len(data)), min(8 * len(data), most))
    damaged = tmp_path / "damaged"
    found = []
    for bit in bits:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        (damaged / path).write_bytes(flip(data, bit // 8, bit % 8))
        where = damaged / "store.db" if file == "store.db" else f"files:{damaged}/store"
        found += [f"bit {bit}: {each}" for each in findings(where, expected)]
    return found


def test_the_end_of_the_last_line(tmp_path: Path) -> None:
    """Its last bit flipped, the last line still counts, and the journal goes on behind it."""
    url = f"files:{tmp_path}/store"
    made(url)
    [path] = tmp_path.rglob("journal.jsonl")
    whole = path.read_bytes()
    for damage in (b"", b"\x0b", b"J"):
        path.write_bytes(whole[:-1] + damage)
        with holdfast.open(url) as store:
            session = store.session("s")
            assert [p.key for p in session.pending()] == ["call 3"]
            with pytest.raises(InDoubt), session.run() as run:
                run.tool(CALLS[3], lambda n: pytest.fail("was made again"))
    with holdfast.open(url) as store:
        session = store.session("s")
        session.resolve("call 3", -3)
        with session.run() as run:
            assert run.tool(CALLS[3], lambda n: pytest.fail("was made again")) == -3
        assert store.verify(read_data=True).ok
