"""What other systems left on a disk arrives as it was; what is damaged is listed; nothing changes.

Each format has a builder that writes what the foreign system writes. `bring` imports, and checks
each time that the source has its bytes, names and times as before, and that the store is sound.
"""

import hashlib
import itertools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import HoldfastError, InvalidRequest, NotFound, Retention, ToolCall, Unavailable
from holdfast.importers import import_, untrusted
from holdfast.importers.checkpoints import (
    COLUMNS,
    CheckpointEntry,
    import_s0,
    import_s1,
    import_s2,
    import_s3,
)
from holdfast.importers.save import Content, ImportResult
from tests.docs.test_pages import run as run_page
from tests.support.stores import Home

SESSION = "trip"


# -- what the foreign systems write --------------------------------------------------------------


def messages(count: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"message {n} é"} for n in range(count)]


def s0_data(n: int, session: str = SESSION, **more: Any) -> dict[str, Any]:
    return {
        "checkpoint_id": f"cp{n}",
        "session_id": session,
        "created_at": f"2025-03-01T10:00:{n:02}.123456789Z",
        "trigger": "manual",
        "iteration": n,
        "messages": messages(n + 1),
        "tool_calls_pending": [],
        "tool_results": {"search": f"found {n}"},
        "tokens_used": 100 * (n + 1),
        "cost_estimate": 0.01 * (n + 1),
        "resume_hint": None,
    } | more


def with_checksum(data: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return data | {"_checksum": hashlib.sha256(text.encode()).hexdigest(), "_version": "1.0"}


def s1_data(n: int, session: str = SESSION, **more: Any) -> dict[str, Any]:
    call = {"tool_name": "search", "arguments": "query", "result": "found", "success": True}
    return {
        "id": f"{session}-{n}",
        "agent_name": "researcher",
        "session_id": session,
        "step": n,
        "messages": messages(n + 1),
        "tool_calls": [call],
        "partial_results": [f"chunk {n}"],
        "timestamp": 1_740_000_000 + n,
        "status": "InProgress",
    } | more


def s2_data(n: int, session: str = SESSION, **more: Any) -> dict[str, Any]:
    metadata = {
        "tasks_completed": n,
        "token_count": 1000 + n,
        "state_size_bytes": 77,
        "context_compressed": False,
        "parent_checkpoint_id": None,
        "extra": {"branch": "main"},
    }
    metadata |= more.pop("metadata", {})
    return {
        "id": f"00000000-0000-4000-8000-{n:012}",
        "session_id": session,
        "label": None,
        "created_at": f"2025-03-01T10:00:{n:02}.5Z",
        "state": {"plan": [f"step {k}" for k in range(n + 1)]},
        "context": list(f"context {n}".encode()),
        "metadata": metadata,
    } | more


def s3_data(n: int, session: str = SESSION, **more: Any) -> dict[str, Any]:
    return {
        "id": f"id-{n}",
        "agent_id": session,
        "conversation": {
            "system_prompt": "Be brief",
            "messages": messages(n + 1),
            "max_tokens": 100_000,
        },
        "iteration": n,
        "metadata": {"model": "m"},
        "created_at": f"2025-03-01T10:00:{n:02}.5Z",
    } | more


def write(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(data, bytes):
        data = json.dumps(data, indent=2, ensure_ascii=False).encode()
    path.write_bytes(data)
    return path


def s0_path(root: Path, data: dict[str, Any]) -> Path:
    name = f"cp_20250301_1000{data['iteration']:02}_{data['checkpoint_id']}.json"
    return Path(root, data["session_id"], "checkpoints", name)


def write_s0(root: Path, *all_data: dict[str, Any]) -> list[Path]:
    paths = [write(s0_path(root, data), with_checksum(data)) for data in all_data]
    latest = paths[-1].with_name("latest.json")
    latest.unlink(missing_ok=True)
    latest.symlink_to(paths[-1].name)
    return paths


def write_s1(root: Path, *all_data: dict[str, Any]) -> list[Path]:
    paths = []
    for data in all_data:
        paths.append(write(root / f"{data['session_id']}_{data['step']}.json", data))
        write(root / f"{data['session_id']}_latest.json", paths[-1].name.encode())
    return paths


def write_s2(root: Path, *all_data: dict[str, Any]) -> list[Path]:
    paths = []
    index = json.loads((root / "index.json").read_text()) if (root / "index.json").exists() else {}
    for data in all_data:
        inside = f"sessions/{data['session_id']}/{data['id']}.json"
        paths.append(write(root / inside, data))
        head = {k: data[k] for k in ("id", "session_id", "label", "created_at")}
        index[data["id"]] = head | {"path": inside, "size_bytes": paths[-1].stat().st_size}
    write(root / "index.json", index)
    return paths


def write_s3(root: Path, *all_data: dict[str, Any]) -> list[Path]:
    return [write(root / data["agent_id"] / f"{data['id']}.json", data) for data in all_data]


SCHEMA = """
    CREATE TABLE IF NOT EXISTS checkpoints (
        id TEXT PRIMARY KEY, agent_id TEXT NOT NULL, iteration INTEGER NOT NULL,
        conversation BLOB NOT NULL, metadata TEXT DEFAULT '{}', created_at INTEGER NOT NULL);
    CREATE INDEX IF NOT EXISTS idx_checkpoints_agent ON checkpoints(agent_id, created_at DESC);
"""


def write_db(path: Path, *all_data: dict[str, Any], wal: bool = True) -> apsw.Connection:
    """The connection stays open: the last rows are in the log until it is closed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = apsw.Connection(str(path))
    connection.pragma("journal_mode", "wal" if wal else "delete")
    connection.execute(SCHEMA)
    for data in all_data:
        row = (
            data["id"],
            data["agent_id"],
            data["iteration"],
            json.dumps(data["conversation"]).encode(),
            json.dumps(data["metadata"]),
            1_740_000_000 + data["iteration"],
        )
        connection.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", row)
    return connection


class Format:
    """One format with what is needed to test it beside the others."""

    def __init__(self, name: str, data: Callable, write: Callable, bring: Callable) -> None:
        self.name, self.data, self.write, self.bring = name, data, write, bring

    def id(self, n: int) -> Any:
        return self.data(n)["checkpoint_id" if self.name == "s0" else "id"]

    def fill(self, root: Path, count: int, session: str = SESSION) -> list[Path]:
        paths: list[Path] = self.write(root, *[self.data(n, session) for n in range(count)])
        return paths

    def seal(self, data: dict[str, Any]) -> dict[str, Any]:
        return with_checksum(data) if self.name == "s0" else data

    def state(self, data: dict[str, Any]) -> dict[str, Any]:
        """What the foreign system resumes from."""
        names = {
            "s0": ("messages", "tool_calls_pending", "tool_results"),
            "s1": ("messages", "tool_calls", "partial_results"),
            "s2": ("state", "context"),
            "s3": ("conversation",),
        }[self.name]
        state = {name: data[name] for name in names if name in data}
        if (context := state.pop("context", None)) is not None:
            state["context"] = bytes(context)
        return state


FORMATS = [
    Format("s0", s0_data, write_s0, import_s0),
    Format("s1", s1_data, write_s1, import_s1),
    Format("s2", s2_data, write_s2, import_s2),
    Format("s3", s3_data, write_s3, import_s3),
]
S0, S1, S2, S3 = FORMATS
every_format = pytest.mark.parametrize("format", FORMATS, ids=[f.name for f in FORMATS])


def snapshot(path: Path) -> dict[str, Any]:
    """Names, kinds, bytes and times of all that is at a path, and beside it."""
    found = {}
    for file in sorted(path.parent.rglob("*")):
        if file.is_symlink():
            content: Any = os.readlink(file)
        else:
            content = file.read_bytes() if file.is_file() else None
        found[str(file)] = (content, file.lstat().st_mtime_ns, file.lstat().st_mode)
    return found


def bring(store: holdfast.Store, path: Path, format: Any = None) -> ImportResult:
    before = snapshot(path)
    result = import_(store, path, format)
    assert snapshot(path) == before
    report = store.verify()
    assert report.ok, str(report)
    return result


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere" / "source").mkdir(parents=True)
    return tmp_path / "elsewhere" / "source"


@pytest.fixture
def store() -> Iterator[holdfast.Store]:
    with holdfast.open("memory:") as store:
        yield store


def tree(store: holdfast.Store, session: str = SESSION) -> list[holdfast.Checkpoint]:
    return list(store.session(session).tree())


def one(store: holdfast.Store, root: Path, format: Format, **more: Any) -> holdfast.Checkpoint:
    """Import a single checkpoint with these fields."""
    format.write(root, format.data(1, **more))
    result = bring(store, root, format.name)
    assert result == ImportResult(1, 1, 0, (), ()), result
    [checkpoint] = tree(store)
    return checkpoint


def why(result: ImportResult, where: str) -> str:
    """The reason given for the one entry of that place."""
    [reason] = [why for place, why in result.skipped if place == where]
    return reason


# -- what all have in common ---------------------------------------------------------------------


@every_format
def test_states_arrive_as_they_were(home: Home, root: Path, format: Format) -> None:
    format.fill(root, 5)
    format.fill(root, 2, "other")
    assert bring(home.store, root) == ImportResult(2, 7, 0, (), ())
    store = home.reopened()
    assert [info.name for info in store.sessions()] == ["other", SESSION]
    for n, checkpoint in enumerate(tree(store)):
        assert store.session(SESSION).load(checkpoint.id) == format.state(format.data(n))
    assert store.session(SESSION).load() == format.state(format.data(4))


@every_format
def test_steps_are_in_the_order_of_the_foreign_ones(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    paths = format.fill(root, 12)
    for age, path in enumerate(paths):  # a clock that went backwards
        os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))
    bring(store, root)
    assert [c.key for c in tree(store)] == [f"{format.name}:{format.id(n)}" for n in range(12)]
    assert [c.step for c in tree(store)] == [*range(1, 13)]
    assert [c.parent for c in tree(store)] == [None, *[c.id for c in tree(store)][:-1]]


@every_format
def test_key_is_the_foreign_id(store: holdfast.Store, root: Path, format: Format) -> None:
    format.fill(root, 3)
    bring(store, root)
    found = store.session(SESSION).get(f"key:{format.name}:{format.id(1)}")
    assert store.session(SESSION).load(found.id) == format.state(format.data(1))


@every_format
def test_creation_time_is_kept_as_it_was(store: holdfast.Store, root: Path, format: Format) -> None:
    checkpoint = one(store, root, format)
    data = format.data(1)
    assert checkpoint.meta["created_at"] == data.get("created_at", data.get("timestamp"))


@every_format
def test_meta_says_where_it_is_from(store: holdfast.Store, root: Path, format: Format) -> None:
    [path] = format.fill(root, 1)
    bring(store, root)
    [checkpoint] = tree(store)
    note = checkpoint.meta["imported"]
    assert (note["format"], note["where"]) == (format.name, str(path.relative_to(root)))


@every_format
def test_unknown_fields_are_in_meta(store: holdfast.Store, root: Path, format: Format) -> None:
    more = {"mood": {"is": ["good", 1.5]}, "imported": "theirs"}
    checkpoint = one(store, root, format, **more)
    assert checkpoint.meta["mood"] == more["mood"]
    assert checkpoint.meta["imported"]["imported"] == "theirs"


def test_unknown_field_with_a_name_that_is_taken(store: holdfast.Store, root: Path) -> None:
    checkpoint = one(store, root, S2, tasks_completed="theirs")
    assert checkpoint.meta["tasks_completed"] == 1
    assert checkpoint.meta["fields"] == {"tasks_completed": "theirs"}


@every_format
def test_field_of_tags(store: holdfast.Store, root: Path, format: Format) -> None:
    assert one(store, root, format, tags=["b", "a"]).tags == ("a", "b")


@every_format
def test_field_of_tags_that_are_none(store: holdfast.Store, root: Path, format: Format) -> None:
    checkpoint = one(store, root, format, tags=["a", ""])
    assert (checkpoint.tags, checkpoint.meta["tags"]) == ((), ["a", ""])


@every_format
def test_again_is_known(home: Home, root: Path, format: Format) -> None:
    format.fill(root, 4)
    bring(home.store, root)
    before = [(c.id, c.hash) for c in tree(home.store)]
    assert bring(home.reopened(), root) == ImportResult(1, 0, 4, (), ())
    assert [(c.id, c.hash) for c in tree(home.store)] == before
    assert home.session(SESSION).head == tree(home.store)[-1]


@every_format
def test_again_after_the_source_went_on(store: holdfast.Store, root: Path, format: Format) -> None:
    format.fill(root, 3)
    bring(store, root)
    format.fill(root, 5)
    assert bring(store, root) == ImportResult(1, 2, 3, (), ())
    assert [c.step for c in tree(store)] == [1, 2, 3, 4, 5]


@every_format
def test_again_after_the_source_was_pruned(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    paths = format.fill(root, 3)
    bring(store, root)
    for path in paths:
        path.unlink()
    (root / "index.json").unlink(missing_ok=True)
    format.write(root, format.data(3), format.data(4))
    result = bring(store, root)
    assert (result.checkpoints, result.known) == (2, 0)
    [(_, reason)] = result.skipped
    assert "follows" in reason
    assert [c.step for c in tree(store)] == [1, 2, 3, 4, 5]
    assert [c.usage.tokens for c in tree(store)] == ([100] * 5 if format is S0 else [0] * 5)


@every_format
def test_an_older_one_found_later_does_not_move_the_head(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    paths = format.fill(root, 4)
    kept = paths[1].read_bytes()
    paths[1].write_bytes(b"{")
    bring(store, root)
    paths[1].write_bytes(kept)
    assert bring(store, root) == ImportResult(1, 1, 3, (), ())
    first, third, fourth, second = tree(store)
    assert store.session(SESSION).head == fourth
    assert (second.parent, third.parent) == (first.id, first.id)


@every_format
@pytest.mark.parametrize("after", [0, 1, 4])
def test_interrupted_and_run_again(
    home: Home, root: Path, format: Format, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    format.fill(root, 3)
    format.fill(root, 3, "another")
    save = holdfast.Session.save
    calls = itertools.count()

    def failing(self: holdfast.Session, *args: Any, **fields: Any) -> holdfast.Checkpoint:
        if next(calls) == after:
            raise Unavailable("injected")
        return save(self, *args, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(holdfast.Session, "save", failing)
        with pytest.raises(Unavailable):
            bring(home.store, root)
    assert bring(home.reopened(), root) == ImportResult(2, 6 - after, after, (), ())
    for session in (SESSION, "another"):
        assert [c.step for c in tree(home.store, session)] == [1, 2, 3]


@every_format
def test_a_session_of_the_same_name_is_left_alone(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    mine = store.session(SESSION).save({"mine": True})
    format.fill(root, 2)
    format.fill(root, 1, "other")
    result = bring(store, root)
    assert (result.sessions, result.checkpoints) == (1, 1)
    assert "2 new checkpoints" in why(result, f"session {SESSION!r}")
    assert tree(store) == [mine]


@every_format
def test_a_session_that_went_on_here_is_left_alone(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    format.fill(root, 2)
    bring(store, root)
    mine = store.session(SESSION).save({"mine": True})
    format.fill(root, 3)
    result = bring(store, root)
    assert (result.checkpoints, result.known) == (0, 2)
    assert "1 new checkpoints" in why(result, f"session {SESSION!r}")
    assert store.session(SESSION).head == mine


@every_format
def test_a_deleted_one_does_not_come_back_silently(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    paths = format.fill(root, 3)
    bring(store, root)
    store.session(SESSION).delete(tree(store)[1])
    result = bring(store, root)
    assert (result.checkpoints, result.known) == (0, 2)
    assert "deleted" in why(result, str(paths[1].relative_to(root)))


@every_format
def test_what_was_pruned_does_not_come_back(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    paths = [str(path.relative_to(root)) for path in format.fill(root, 6)]
    bring(store, root)
    session = store.session(SESSION)
    session.label(tree(store)[1], "kept")
    session.prune(Retention(keep_last=2, keep_labelled=True))
    store.gc()
    left = tree(store)
    assert [c.seq for c in left] == [2, 5, 6]
    format.fill(root, 7)
    result = bring(store, root)
    assert (result.checkpoints, result.known) == (1, 3)
    assert [where for where, why in result.skipped if "pruned" in why] == [paths[0], *paths[2:4]]
    assert tree(store)[:-1] == left
    newest = store.session(SESSION).head
    assert newest is not None
    assert newest.parent == left[-1].id
    assert bring(store, root).checkpoints == 0


@every_format
def test_an_older_one_found_after_a_prune(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    """It comes if it is certain that it never was here."""
    paths = format.fill(root, 5)
    kept = paths[3].read_bytes()
    paths[3].write_bytes(b"{")
    bring(store, root)
    store.session(SESSION).prune(Retention(keep_last=2))
    store.gc()
    third, fifth = tree(store)
    assert fifth.parent == third.id
    paths[3].write_bytes(kept)
    result = bring(store, root)
    assert (result.checkpoints, result.known, len(result.skipped)) == (1, 2, 2)
    assert tree(store)[-1].parent == third.id
    assert store.session(SESSION).head == fifth


def test_a_branch_that_was_pruned_does_not_come_back(store: holdfast.Store, root: Path) -> None:
    write_s2(root, child(0, None), child(1, 0), child(2, 1), child(3, 0))
    bring(store, root)
    for gone in tree(store)[1:3]:
        store.session(SESSION).delete(gone)
    store.gc()
    write_s2(root, child(0, None), child(1, 0), child(2, 1), child(3, 0), child(4, 0))
    result = bring(store, root)
    assert (result.checkpoints, result.known, len(result.skipped)) == (1, 2, 2)
    assert family(store) == {0: None, 3: 0, 4: 0}


def test_a_deleted_session_does_not_come_back(home: Home, root: Path) -> None:
    S1.fill(root, 2)
    S1.fill(root, 1, "other")
    home.session("mine").save({})
    bring(home.store, root)
    for name in (SESSION, "mine"):
        home.session(name).delete()
    S1.fill(root, 1, "mine")  # what had this name was never imported
    result = bring(home.reopened(), root)
    assert (result.sessions, result.checkpoints, result.known) == (2, 1, 1)
    assert "deleted" in why(result, f"session {SESSION!r}")
    assert [info.name for info in home.store.sessions()] == ["mine", "other"]
    home.session(SESSION).undo()
    assert bring(home.store, root) == ImportResult(3, 0, 4, (), ())
    home.session(SESSION).delete()
    home.store.gc()
    assert bring(home.store, root).checkpoints == 2


def test_one_session_does_not_stop_the_others(home: Home, root: Path) -> None:
    for name in ("a", "b", "c", "d"):
        S1.fill(root, 1, name)
    bring(home.store, root)
    home.spoil_checkpoint(1, name="b")
    for name in ("a", "b", "c", "e"):
        S1.fill(root, 2, name)
    with home.reopened().session("a").run():
        result = import_(home.another(), root)
    assert (result.sessions, result.checkpoints) == (4, 3)
    assert "is run by" in why(result, "session 'a'")
    assert "checkpoint 1" in why(result, "session 'b'")
    assert len(result.skipped) == 2


def test_s0_cost_that_no_checkpoint_can_have(store: holdfast.Store, root: Path) -> None:
    costs = [s0_data(n, cost_estimate=cost) for n, cost in enumerate([-1.7e308, 1.7e308])]
    paths = write_s0(root, *costs)
    S0.fill(root, 1, "other")
    result = bring(store, root)
    assert (result.sessions, result.checkpoints) == (2, 2)
    assert "cost" in why(result, str(paths[1].relative_to(root)))


@every_format
def test_an_id_used_twice_gives_two(store: holdfast.Store, root: Path, format: Format) -> None:
    paths = format.fill(root, 2)
    changed = format.data(1)
    changed |= {"note": "second"}
    write(paths[1].with_name(f"cp_again_{paths[1].name}"), format.seal(changed))
    assert bring(store, root).checkpoints == 3
    assert bring(store, root) == ImportResult(1, 0, 3, (), ())
    notes = [c.meta.get("note") for c in tree(store)]
    assert sorted(notes, key=str) == [None, None, "second"]


@every_format
def test_a_copy_is_no_second_checkpoint(store: holdfast.Store, root: Path, format: Format) -> None:
    paths = format.fill(root, 2)
    write(paths[1].with_name(f"cp_copy_{paths[1].name}"), paths[1].read_bytes())
    assert bring(store, root) == ImportResult(1, 2, 0, (), ())


# -- damage --------------------------------------------------------------------------------------


def damaged(store: holdfast.Store, root: Path, format: Format, content: Any) -> str:
    """Spoil the middle one of three; the reason that is given."""
    paths = format.fill(root, 3)
    write(paths[1], content)
    result = bring(store, root, format.name)
    assert (result.sessions, result.checkpoints) == (1, 2)
    assert [c.key for c in tree(store)] == [f"{format.name}:{format.id(n)}" for n in (0, 2)]
    return why(result, str(paths[1].relative_to(root)))


DAMAGE = {
    "empty": b"",
    "truncated": b'{"id": "x", "messages": [',
    "binary": bytes(range(256)),
    "no object": b"[1, 2]",
    "null": b"null",
    "not UTF-8": b'{"id": "\xff"}',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "big number": b'{"id": ' + b"9" * 5_000 + b"}",
}


@every_format
@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_file(store: holdfast.Store, root: Path, format: Format, content: bytes) -> None:
    assert damaged(store, root, format, content)


@every_format
def test_file_with_a_key_twice(store: holdfast.Store, root: Path, format: Format) -> None:
    text = json.dumps(format.seal(format.data(1)))
    twice = text[:-1] + ', "created_at": "2020-01-01T00:00:00Z", "timestamp": 1, "id": "x"}'
    assert "twice" in damaged(store, root, format, (twice[:-1] + ', "id": "x"}').encode())


@every_format
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_file_with_what_is_no_number(
    store: holdfast.Store, root: Path, format: Format, number: str
) -> None:
    text = json.dumps(format.data(1) | {"x": 0})
    assert "not JSON" in damaged(
        store, root, format, text.replace('"x": 0', f'"x": {number}').encode()
    )


def nested(depth: int) -> Any:
    deep: Any = "x"
    for _ in range(depth):
        deep = [deep]
    return deep


@every_format
@pytest.mark.parametrize("depth", [70, 600])
def test_state_that_is_nested_too_deeply_for_the_store(
    store: holdfast.Store, root: Path, format: Format, depth: int
) -> None:
    deep = {"d": nested(depth)}
    name = {"s0": "tool_results", "s2": "state"}.get(format.name, "conversation")
    data = format.data(1) | {name: deep}
    if format is S1:
        data = format.data(1) | {"messages": [{"role": "user", "content": deep}]}
    assert "nested" in damaged(store, root, format, format.seal(data))


@every_format
def test_nesting_of_any_depth(root: Path, format: Format) -> None:
    """Reading it, comparing it and saving it each end at a depth of their own."""
    for depth in range(300, 1_200, 30):
        shutil.rmtree(root)
        paths = format.fill(root, 3)
        data = format.data(1, extra="DEEP")
        text = json.dumps(format.seal(data)).replace('"DEEP"', "[" * depth + "]" * depth)
        write(paths[1], text.encode())
        with holdfast.open("memory:") as store:
            result = format.bring(store, root)
            assert result.checkpoints == 2
            assert why(result, str(paths[1].relative_to(root)))


@every_format
def test_meta_that_is_nested_too_deeply_for_the_store(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    deep = nested(70)
    assert "nested deeper" in damaged(
        store, root, format, format.seal(format.data(1) | {"x": deep})
    )


@every_format
def test_file_that_is_too_big(
    store: holdfast.Store, root: Path, format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrusted, "MAX_BYTES", 10_000)
    data = format.data(1) | {"padding": "x" * 10_000}
    assert "more than 10000 bytes" in damaged(store, root, format, format.seal(data))


@every_format
def test_file_that_takes_too_much_memory(store: holdfast.Store, root: Path, format: Format) -> None:
    content = format.seal(format.data(1) | {"padding": [[]] * 9000})
    with holdfast.memory_limit(300_000):
        assert "more than 300,000 bytes of memory" in damaged(store, root, format, content)


REQUIRED = {
    "s0": [
        "checkpoint_id", "session_id", "created_at", "trigger", "iteration", "messages",
        "tool_calls_pending", "tool_results", "tokens_used", "cost_estimate",
    ],
    "s1": [*s1_data(0)],
    "s2": ["id", "session_id", "created_at", "state", "metadata"],
    "s3": [*s3_data(0)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("format", "field"),
    [pytest.param(f, field, id=f"{f.name}-{field}") for f in FORMATS for field in REQUIRED[f.name]],
)
def test_missing_field(store: holdfast.Store, root: Path, format: Format, field: str) -> None:
    data = format.data(1)
    del data[field]
    missing = "id" if field == "checkpoint_id" else field
    assert damaged(store, root, format, format.seal(data)) == f"{missing} is missing"


WRONG = [None, True, -1, 1.5, "", "text", [], [1], [None], {}, {"x": 1}, "2025-13-01T00:00:00Z"]
RIGHT: dict[str, dict[str, tuple[Any, ...]]] = {
    "s0": {
        "created_at": (-1,),
        "trigger": ("", "text", "2025-13-01T00:00:00Z"),
        "messages": ([], [1], [None]),
        "tool_calls_pending": ([], [1], [None]),
        "tool_results": (*WRONG,),
        "cost_estimate": (-1, 1.5),
        "resume_hint": (None, "", "text", "2025-13-01T00:00:00Z"),
        "checkpoint_id": ("text", "2025-13-01T00:00:00Z"),
        "session_id": ("text", "2025-13-01T00:00:00Z"),
    },
    "s1": {
        "id": ("text", "2025-13-01T00:00:00Z"),
        "agent_name": ("", "text", "2025-13-01T00:00:00Z"),
        "session_id": ("text", "2025-13-01T00:00:00Z"),
        "messages": ([],),
        "tool_calls": ([],),
        "partial_results": ([],),
    },
    "s2": {
        "id": ("text", "2025-13-01T00:00:00Z"),
        "session_id": ("text", "2025-13-01T00:00:00Z"),
        "label": (None, "", "text", "2025-13-01T00:00:00Z"),
        "created_at": (-1,),
        "state": (*WRONG,),
        "context": (None, [], [1]),
        "metadata": ({}, {"x": 1}),
    },
    "s3": {
        "id": ("text", "2025-13-01T00:00:00Z"),
        "agent_id": ("text", "2025-13-01T00:00:00Z"),
        "conversation": ({}, {"x": 1}),
        "metadata": ({}, {"x": 1}),
        "created_at": (-1,),
    },
}


@pytest.mark.parametrize(
    ("format", "field"),
    [pytest.param(f, field, id=f"{f.name}-{field}") for f in FORMATS for field in f.data(0)],
)
def test_field_of_a_wrong_type(root: Path, format: Format, field: str) -> None:
    right = [repr(value) for value in RIGHT[format.name].get(field, ())]
    for value in WRONG:
        shutil.rmtree(root)
        paths = format.fill(root, 3)
        write(paths[1], format.seal(format.data(1) | {field: value}))
        with holdfast.open("memory:") as store:
            result = bring(store, root, format.name)
            reported = str(paths[1].relative_to(root)) in dict(result.skipped)
            assert reported == (repr(value) not in right), (field, value, result)
            assert result.checkpoints == 3 - reported


INNER: dict[str, list[tuple[Format, dict[str, Any]]]] = {
    "message without a role": [(S1, {"messages": [{"content": "x"}]})],
    "message without content": [(S1, {"messages": [{"role": "user"}]})],
    "role of a wrong type": [(S1, {"messages": [{"role": 1, "content": "x"}]})],
    "call without a name": [(S1, {"tool_calls": [{"arguments": "", "success": True}]})],
    "call without success": [(S1, {"tool_calls": [{"tool_name": "x", "arguments": ""}]})],
    "unknown status": [(S1, {"status": "Paused"})],
    "status without its reason": [(S1, {"status": "Failed"})],
    "status with too much": [(S1, {"status": {"Failed": "x", "Halted": "y"}})],
    "reason of a wrong type": [(S1, {"status": {"Failed": 5}})],
    "bytes that are none": [(S2, {"context": [256]}), (S2, {"context": [-1]})],
    "count of a wrong type": [(S2, {"metadata": {"tasks_completed": "3"}})],
    "tokens of a wrong type": [(S2, {"metadata": {"token_count": 1.5}})],
    "flag of a wrong type": [(S2, {"metadata": {"context_compressed": 1}})],
    "parent of a wrong type": [(S2, {"metadata": {"parent_checkpoint_id": 7}})],
    "parent that is empty": [(S2, {"metadata": {"parent_checkpoint_id": ""}})],
    "extra of a wrong type": [(S2, {"metadata": {"extra": []}})],
    "cost beyond a float": [(S0, {"cost_estimate": 10**400})],
}


@pytest.mark.parametrize("cases", INNER.values(), ids=INNER.keys())
def test_damage_within_a_field(root: Path, cases: list[tuple[Format, dict[str, Any]]]) -> None:
    for format, more in cases:
        shutil.rmtree(root)
        with holdfast.open("memory:") as store:
            assert damaged(store, root, format, format.seal(format.data(1, **more)))


@every_format
def test_foreign_files_are_listed(store: holdfast.Store, root: Path, format: Format) -> None:
    paths = format.fill(root, 2)
    write(root / ".DS_Store", b"\0\1")
    write(paths[0].parent / "notes.txt", b"hello")
    write(paths[0].parent / "package.json", {"name": "x"})
    places = {str(p.relative_to(root)) for p in (paths[0].parent / "notes.txt",)}
    places |= {".DS_Store", str((paths[0].parent / "package.json").relative_to(root))}
    result = bring(store, root)
    assert result.checkpoints == 2
    assert {where for where, _ in result.skipped} == places


@every_format
def test_pipe_is_not_opened(store: holdfast.Store, root: Path, format: Format) -> None:
    paths = format.fill(root, 2)
    pipe = paths[0].parent / "cp_20250301_100009_pipe.json"
    os.mkfifo(pipe)
    result = bring(store, root)
    assert result.checkpoints == 2
    assert why(result, str(pipe.relative_to(root))) == "not a regular file"


@every_format
def test_link_that_leads_out_is_not_followed(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    paths = format.fill(root, 2)
    outside = root.parent / "outside"
    secret = format.write(outside, format.data(7))[0]
    link = paths[0].parent / "cp_20250301_100007_cp7.json"
    link.symlink_to(secret)
    (root / "folder").symlink_to(outside)
    result = bring(store, root)
    assert result.checkpoints == 2
    for place in (str(link.relative_to(root)), "folder"):
        assert "leads out" in why(result, place)


@every_format
def test_link_within_is_not_followed(store: holdfast.Store, root: Path, format: Format) -> None:
    paths = format.fill(root, 2)
    link = paths[0].parent / "cp_link.json"
    link.symlink_to(paths[0].name)
    (root / "round").symlink_to(root, target_is_directory=True)
    result = bring(store, root)
    assert result.checkpoints == 2
    assert "not followed" in why(result, str(link.relative_to(root)))


@every_format
def test_file_that_becomes_a_link_is_not_followed(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    """Between the look into the folder and the opening."""
    paths = format.fill(root, 1)
    files = untrusted.Files(root)
    outside = write(root.parent / "outside.json", format.data(1))
    paths[0].unlink()
    paths[0].symlink_to(outside)
    with pytest.raises(untrusted.Unsound):
        files.read(str(paths[0].relative_to(root)))


@every_format
def test_file_that_changes_meanwhile_is_not_imported(
    store: holdfast.Store, root: Path, format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = format.fill(root, 3)
    content = CheckpointEntry.content

    def changed(entry: CheckpointEntry, parent: holdfast.Checkpoint | None) -> Content:
        if entry.where == str(paths[1].relative_to(root)):
            write(paths[1], format.seal(format.data(1) | {"x": 1}))
        return content(entry, parent)

    monkeypatch.setattr(CheckpointEntry, "content", changed)
    result = import_(store, root)
    assert result.checkpoints == 2
    assert "changed" in why(result, str(paths[1].relative_to(root)))


@every_format
def test_a_folder_that_cannot_be_listed(
    store: holdfast.Store, root: Path, format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    format.fill(root, 2)
    (root / "closed").mkdir()
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    result = import_(store, root)
    assert result.checkpoints == 2
    assert "Permission denied" in why(result, "closed")


HOSTILE = [
    "../../x", "/etc/passwd", "..", ".", "a/b", "a\0b", "\0", "*", "?", "[", "[a-z]", "x", "xy",
    "xy_1", "latest", "x_latest", "@", "@~1", "key:x", "'; DROP TABLE heads; --", "\ud800", "😀",
    "y" * 5_000, "\n", " ",
]  # fmt: skip


@every_format
def test_hostile_sessions_and_ids(home: Home, root: Path, format: Format) -> None:
    """As they stand in the data; each is a name, and never more."""
    id = "checkpoint_id" if format is S0 else "id"
    session = "agent_id" if format is S3 else "session_id"
    folder = root / "s" / "checkpoints"
    for n, (a, b) in enumerate(itertools.product(HOSTILE, HOSTILE[:8])):
        data = format.data(0) | {session: a, id: b}
        write(folder / f"cp_{n}_1.json", json.dumps(data).encode())
    result = bring(home.store, root, format.name)
    assert (result.sessions, result.checkpoints) == (len(HOSTILE), len(HOSTILE) * 8)
    assert result.skipped == ()
    assert sorted(info.name for info in home.store.sessions()) == sorted(HOSTILE)
    for name in HOSTILE:
        assert {c.key for c in tree(home.store, name)} == {
            f"{format.name}:{b}" for b in HOSTILE[:8]
        }
    assert bring(home.store, root, format.name).known == len(HOSTILE) * 8


@every_format
def test_file_names_of_any_bytes(store: holdfast.Store, root: Path, format: Format) -> None:
    paths = format.fill(root, 2)
    os.rename(paths[1], os.fsencode(paths[1].parent) + b"/cp_\xff\xfe*[.json")
    write(paths[0].parent / "cp_\x1b[2J.json", b"{")
    result = format.bring(store, root)
    assert result.checkpoints == 2
    assert all(where.encode() for where, _ in result.skipped)
    assert tree(store)[1].meta["imported"]["where"].endswith("cp_\\udcff\\udcfe*[.json")


@every_format
def test_file_names_that_look_alike(store: holdfast.Store, root: Path, format: Format) -> None:
    """Of which one has a byte that is shown as the other spells it out."""
    paths = format.fill(root, 2)
    for path, name in zip(paths, (b"cp_\\udcff.json", b"cp_\xff.json"), strict=True):
        os.rename(path, os.fsencode(paths[0].parent) + b"/" + name)
    assert format.bring(store, root).checkpoints == 2
    assert {c.meta["imported"]["where"] for c in tree(store)} == {
        f"{paths[0].parent.relative_to(root)}/cp_\\udcff.json".removeprefix("./")
    }
    assert format.bring(store, root).known == 2


# -- S0 ------------------------------------------------------------------------------------------


def test_s0_trigger(store: holdfast.Store, root: Path) -> None:
    assert one(store, root, S0, trigger="tool_call").trigger == "tool_call"


def test_s0_empty_trigger(store: holdfast.Store, root: Path) -> None:
    checkpoint = one(store, root, S0, trigger="")
    assert (checkpoint.trigger, checkpoint.meta["trigger"]) == (None, "")


def test_s0_hint(store: holdfast.Store, root: Path) -> None:
    assert one(store, root, S0, resume_hint="ask the user").hint == "ask the user"


def test_s0_empty_hint(store: holdfast.Store, root: Path) -> None:
    checkpoint = one(store, root, S0, resume_hint="")
    assert (checkpoint.hint, checkpoint.meta["resume_hint"]) == (None, "")


def test_s0_iteration(store: holdfast.Store, root: Path) -> None:
    assert one(store, root, S0, iteration=17).meta["iteration"] == 17


def test_s0_tool_results(store: holdfast.Store, root: Path) -> None:
    one(store, root, S0, tool_results=[{"id": 1, "out": None}])
    assert store.session(SESSION).load()["tool_results"] == [{"id": 1, "out": None}]


def test_s0_tokens_and_cost_are_what_was_added(store: holdfast.Store, root: Path) -> None:
    spent = [(100, 0.01), (250, 0.03), (250, 0.03), (900, 0.1)]
    data = [s0_data(n, tokens_used=t, cost_estimate=c) for n, (t, c) in enumerate(spent)]
    write_s0(root, *data)
    bring(store, root)
    assert [c.usage.tokens for c in tree(store)] == [100, 150, 0, 650]
    assert [c.usage.cost for c in tree(store)] == [0.01, 0.02, 0.0, 0.07]
    assert [(c.meta["tokens_used"], c.meta["cost_estimate"]) for c in tree(store)] == spent


def test_s0_tokens_that_were_counted_anew(store: holdfast.Store, root: Path) -> None:
    spent = [(100, 0.5), (300, 0.9), (40, 0.2), (60, 0.2)]
    data = [s0_data(n, tokens_used=t, cost_estimate=c) for n, (t, c) in enumerate(spent)]
    write_s0(root, *data)
    bring(store, root)
    assert [c.usage.tokens for c in tree(store)] == [100, 200, 40, 20]
    assert [c.usage.cost for c in tree(store)] == [0.5, 0.4, 0.2, 0.0]


def test_s0_tokens_over_a_damaged_one(store: holdfast.Store, root: Path) -> None:
    paths = S0.fill(root, 4)
    write(paths[1], b"")
    bring(store, root)
    assert [c.usage.tokens for c in tree(store)] == [100, 200, 100]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            {"id": "c1", "name": "book", "arguments": {"seat": 3}, "risk": "high"},
            ToolCall("c1", "book", {"seat": 3}, {"risk": "high"}),
        ),
        (
            {"id": "c2", "type": "function", "function": {"name": "book", "arguments": "{}"}},
            ToolCall("c2", "book", "{}", {"type": "function"}),
        ),
        (
            {"id": "c3", "type": "tool_use", "name": "book", "input": {}},
            ToolCall("c3", "book", {}, {"type": "tool_use"}),
        ),
        ({"tool_name": "book"}, ToolCall("tool_calls_pending[0]", "book", None, {})),
        ({"id": 5, "x": 1}, ToolCall("tool_calls_pending[0]", "unknown", None, {"id": 5, "x": 1})),
        ("book", ToolCall("tool_calls_pending[0]", "unknown", "book", {})),
    ],
)
def test_s0_pending_call(store: holdfast.Store, root: Path, call: Any, expected: ToolCall) -> None:
    checkpoint = one(store, root, S0, tool_calls_pending=[call])
    assert checkpoint.pending == (expected,)
    assert store.session(SESSION).load()["tool_calls_pending"] == [call]


def test_s0_checksum_that_does_not_match(store: holdfast.Store, root: Path) -> None:
    """One character of a message: still JSON, still of the right types."""
    text = json.dumps(with_checksum(s0_data(1))).replace("message 0", "massage 0")
    assert damaged(store, root, S0, text.encode()) == "its checksum does not match"


@pytest.mark.parametrize("number", ["1e-5", "1.0", "1e16", "0.30000000000000004", "-0.0", "5"])
def test_s0_checksum_over_numbers_as_they_are_written(
    store: holdfast.Store, root: Path, number: str
) -> None:
    """Another language writes 1e-5 where Python has 1e-05."""
    data = s0_data(1, cost_estimate="NUMBER")
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    checksum = hashlib.sha256(text.replace('"NUMBER"', number).encode()).hexdigest()
    data |= {"_checksum": checksum, "_version": "1.0"}
    write(s0_path(root, data), json.dumps(data).replace('"NUMBER"', number).encode())
    assert bring(store, root) == ImportResult(1, 1, 0, (), ())


@pytest.mark.parametrize(
    "checksum",
    [
        {"checksum": "abc"},
        {"_checksum": "abc", "_version": "1.0"},
        {"_checksum": "0" * 64, "_version": "2.0"},
        {"_checksum": "0" * 64},
        {},
    ],
    ids=["other name", "other algorithm", "other version", "no version", "none"],
)
def test_s0_checksum_that_is_unknown(
    store: holdfast.Store, root: Path, checksum: dict[str, str]
) -> None:
    data = s0_data(1) | checksum
    path = write(s0_path(root, data), data)
    for known in (0, 1):
        result = bring(store, root)
        assert result == ImportResult(1, 1 - known, known, (), (str(path.relative_to(root)),))
    [checkpoint] = tree(store)
    assert {k: v for k, v in checkpoint.meta.items() if k in checksum} == checksum


def test_s0_latest_is_not_imported_twice(store: holdfast.Store, root: Path) -> None:
    S0.fill(root, 3)
    assert (root / SESSION / "checkpoints" / "latest.json").is_symlink()
    assert bring(store, root) == ImportResult(1, 3, 0, (), ())


def test_s0_latest_that_was_copied_as_a_file(store: holdfast.Store, root: Path) -> None:
    paths = S0.fill(root, 3)
    latest = paths[0].with_name("latest.json")
    latest.unlink()
    write(latest, paths[2].read_bytes())
    assert bring(store, root) == ImportResult(1, 3, 0, (), ())


def test_s0_latest_that_leads_out(store: holdfast.Store, root: Path) -> None:
    paths = S0.fill(root, 2)
    outside = write(root.parent / "checkpoints" / "cp_x.json", with_checksum(s0_data(9)))
    latest = paths[0].with_name("latest.json")
    latest.unlink()
    latest.symlink_to(outside)
    result = bring(store, root)
    assert result.checkpoints == 2
    assert "leads out" in why(result, f"{SESSION}/checkpoints/latest.json")


def test_s0_latest_that_dangles(store: holdfast.Store, root: Path) -> None:
    paths = S0.fill(root, 2)
    paths[1].unlink()
    result = bring(store, root)
    assert result.checkpoints == 1
    assert "no checkpoint" in why(result, f"{SESSION}/checkpoints/latest.json")


def test_s0_backup_stands_in_for_a_damaged_one(store: holdfast.Store, root: Path) -> None:
    paths = S0.fill(root, 3)
    write(paths[1].with_name(paths[1].name + ".backup"), paths[1].read_bytes())
    write(paths[1], paths[1].read_bytes()[:-40])
    result = bring(store, root)
    assert result.checkpoints == 3
    assert [c.meta["iteration"] for c in tree(store)] == [0, 1, 2]
    assert why(result, str(paths[1].relative_to(root)))


def test_s0_backup_of_a_sound_one_is_no_second(store: holdfast.Store, root: Path) -> None:
    paths = S0.fill(root, 3)
    write(paths[0].with_name("latest.json.backup"), paths[1].read_bytes())
    assert bring(store, root) == ImportResult(1, 3, 0, (), ())


def test_s0_damaged_backup_is_listed(store: holdfast.Store, root: Path) -> None:
    paths = S0.fill(root, 1)
    write(paths[0].with_name("latest.json.backup"), b"{")
    result = bring(store, root)
    assert result.checkpoints == 1
    assert why(result, f"{SESSION}/checkpoints/latest.json.backup")


def test_s0_session_with_a_slash_lies_deeper(store: holdfast.Store, root: Path) -> None:
    S0.fill(root, 2, "team/trip")
    assert bring(store, root) == ImportResult(1, 2, 0, (), ())
    assert len(store.session("team/trip")) == 2


@pytest.mark.parametrize("below", [SESSION, f"{SESSION}/checkpoints"])
def test_s0_one_session_alone(store: holdfast.Store, root: Path, below: str) -> None:
    S0.fill(root, 2)
    assert bring(store, root / below) == ImportResult(1, 2, 0, (), ())


def test_s0_order_is_the_iteration_then_the_time(store: holdfast.Store, root: Path) -> None:
    late, early = "2025-03-01T10:00:00.000000002Z", "2025-03-01T10:00:00.000000001+00:00"
    data = [
        s0_data(2, checkpoint_id="d", created_at="2020-01-01T00:00:00Z"),
        s0_data(1, checkpoint_id="a", created_at=late),
        s0_data(1, checkpoint_id="z", created_at=early),
        s0_data(0, checkpoint_id="c", created_at="2030-01-01T00:00:00Z"),
    ]
    write_s0(root, *data)
    bring(store, root)
    assert [c.meta["checkpoint_id"] for c in tree(store)] == ["c", "z", "a", "d"]


# -- S1 ------------------------------------------------------------------------------------------


def test_s1_agent(store: holdfast.Store, root: Path) -> None:
    assert one(store, root, S1).agent == "researcher"
    assert [info.name for info in store.sessions(agent="researcher")] == [SESSION]


def test_s1_agent_without_a_name(store: holdfast.Store, root: Path) -> None:
    checkpoint = one(store, root, S1, agent_name="")
    assert (checkpoint.agent, checkpoint.meta["agent_name"]) == (None, "")


def test_s1_agents_in_turn(store: holdfast.Store, root: Path) -> None:
    names = ["a", "b", "b", "a"]
    write_s1(root, *[s1_data(n, agent_name=name) for n, name in enumerate(names)])
    bring(store, root)
    assert [c.agent for c in tree(store)] == names
    assert [c.step for c in tree(store)] == [1, 2, 3, 4]


def test_s1_step(store: holdfast.Store, root: Path) -> None:
    assert one(store, root, S1, step=41).meta["step"] == 41


def test_s1_timestamp(store: holdfast.Store, root: Path) -> None:
    meta = one(store, root, S1, timestamp=1_740_000_007).meta
    assert (meta["timestamp"], meta["created_at"]) == (1_740_000_007, 1_740_000_007)


@pytest.mark.parametrize(
    ("foreign", "expected"),
    [
        ("InProgress", ("in_progress", None)),
        ("Completed", ("completed", None)),
        ({"Failed": "out of memory"}, ("failed", "out of memory")),
        ({"Halted": "loop"}, ("halted", "loop")),
        ({"Failed": ""}, ("failed", None)),
    ],
)
def test_s1_status(store: holdfast.Store, root: Path, foreign: Any, expected: Any) -> None:
    checkpoint = one(store, root, S1, status=foreign)
    assert (checkpoint.status, checkpoint.reason) == expected
    assert checkpoint.meta.get("status") == (foreign if foreign == {"Failed": ""} else None)


def test_s1_pending_calls(store: holdfast.Store, root: Path) -> None:
    calls = [
        {"tool_name": "done", "arguments": "1", "result": "x", "success": True},
        {"tool_name": "failed", "arguments": "2", "result": "error", "success": False},
        {"tool_name": "silent", "arguments": "3", "result": None, "success": True},
        {"tool_name": "open", "arguments": "4", "result": None, "success": False, "risk": "high"},
        {"tool_name": "open too", "arguments": {"n": 5}, "success": False},
    ]
    checkpoint = one(store, root, S1, tool_calls=calls)
    assert checkpoint.pending == (
        ToolCall("tool_calls[3]", "open", "4", {"risk": "high"}),
        ToolCall("tool_calls[4]", "open too", {"n": 5}, {}),
    )
    assert store.session(SESSION).load()["tool_calls"] == calls


def test_s1_steps_are_numbers(store: holdfast.Store, root: Path) -> None:
    write_s1(root, s1_data(10), s1_data(9, timestamp=1_900_000_000), s1_data(100))
    result = bring(store, root)
    assert [c.meta["step"] for c in tree(store)] == [9, 10, 100]
    assert result.skipped == ()


def test_s1_sessions_that_begin_alike(store: holdfast.Store, root: Path) -> None:
    for name in ("s", "s_1", "s_1_2", "s_latest", "latest"):
        S1.fill(root, 2, name)
    assert bring(store, root) == ImportResult(5, 10, 0, (), ())
    assert {len(store.session(n)) for n in ("s", "s_1", "s_1_2", "s_latest", "latest")} == {2}


def test_s1_session_with_a_slash_lies_deeper(store: holdfast.Store, root: Path) -> None:
    for n in range(2):
        write(root / "team" / f"trip_{n}.json", s1_data(n, "team/trip"))
    write(root / "team" / "trip_latest.json", b"team/trip_1.json")
    assert bring(store, root) == ImportResult(1, 2, 0, (), ())


@pytest.mark.parametrize(
    ("pointer", "reason"),
    [
        (b"", "names ''"),
        (b"trip_9.json", "names 'trip_9.json'"),
        (b"../../../secret.json", "names '../../../secret.json'"),
        (b"trip_0.json\n", "names step 0; the head is step 2"),
        (b"\xff", "codec"),
    ],
    ids=["empty", "dangling", "outside", "stale", "binary"],
)
def test_s1_pointer(store: holdfast.Store, root: Path, pointer: bytes, reason: str) -> None:
    S1.fill(root, 3)
    write(root / f"{SESSION}_latest.json", pointer)
    result = bring(store, root)
    assert result.checkpoints == 3
    assert reason in why(result, f"{SESSION}_latest.json")
    head = store.session(SESSION).head
    assert head is not None
    assert head.meta["step"] == 2


# -- S2 ------------------------------------------------------------------------------------------


def child(n: int, parent: int | str | None, **more: Any) -> dict[str, Any]:
    id = S2.id(parent) if isinstance(parent, int) else parent
    return s2_data(n, metadata={"parent_checkpoint_id": id}, **more)


def family(store: holdfast.Store, session: str = SESSION) -> dict[int, int | None]:
    """Each checkpoint's number with its parent's."""
    number = {c.id: int(c.meta["id"][-12:]) for c in tree(store, session)}
    return {number[c.id]: number.get(c.parent or "") for c in tree(store, session)}


def test_s2_label(store: holdfast.Store, root: Path) -> None:
    assert one(store, root, S2, label="before the risk").label == "before the risk"
    assert store.session(SESSION).load("before the risk") == S2.state(s2_data(1))


def test_s2_empty_label(store: holdfast.Store, root: Path) -> None:
    checkpoint = one(store, root, S2, label="")
    assert (checkpoint.label, checkpoint.meta["label"]) == (None, "")


def test_s2_context_is_bytes(store: holdfast.Store, root: Path) -> None:
    one(store, root, S2, context=[*range(256)])
    assert store.session(SESSION).load()["context"] == bytes(range(256))


def test_s2_without_context(store: holdfast.Store, root: Path) -> None:
    one(store, root, S2, context=None)
    assert store.session(SESSION).load() == {"state": s2_data(1)["state"]}


@pytest.mark.parametrize("state", [None, 5, "text", [1, [2]], {}, {"state": {"state": 1}}])
def test_s2_state_of_any_kind(store: holdfast.Store, root: Path, state: Any) -> None:
    one(store, root, S2, state=state)
    assert store.session(SESSION).load()["state"] == state


def test_s2_metadata(store: holdfast.Store, root: Path) -> None:
    given = {
        "tasks_completed": 5,
        "token_count": 1234,
        "state_size_bytes": 99,
        "context_compressed": True,
        "extra": {"a": [1, None], "b": {"c": "d"}},
    }
    meta = one(store, root, S2, metadata={**given, "new": 1}).meta
    assert {name: meta[name] for name in given} == given
    assert meta["metadata"] == {"new": 1}


def test_s2_token_count_is_no_usage(store: holdfast.Store, root: Path) -> None:
    assert one(store, root, S2, metadata={"token_count": 1234}).usage.tokens == 0


def test_s2_tags_in_extra(store: holdfast.Store, root: Path) -> None:
    checkpoint = one(store, root, S2, metadata={"extra": {"tags": ["risky"]}})
    assert (checkpoint.tags, checkpoint.meta["extra"]) == (("risky",), {"tags": ["risky"]})


def test_s2_siblings_are_siblings(store: holdfast.Store, root: Path) -> None:
    write_s2(root, s2_data(0), s2_data(1), child(2, 0), s2_data(3), child(4, 0), child(5, 3))
    result = bring(store, root)
    assert result == ImportResult(1, 6, 0, (), ())
    assert family(store) == {0: None, 1: 0, 2: 0, 3: 2, 4: 0, 5: 3}
    assert [c.step for c in tree(store)] == [1, 2, 2, 3, 2, 4]
    assert tree(store)[2].meta["parent_checkpoint_id"] == S2.id(0)
    assert bring(store, root) == ImportResult(1, 0, 6, (), ())


def test_s2_head_is_the_newest(store: holdfast.Store, root: Path) -> None:
    write_s2(root, s2_data(0), s2_data(1), child(2, 0))
    bring(store, root)
    assert store.session(SESSION).load() == S2.state(s2_data(2))


def test_s2_parent_that_is_missing(store: holdfast.Store, root: Path) -> None:
    paths = write_s2(root, s2_data(0), s2_data(1), child(2, "gone"), child(3, 2))
    result = bring(store, root)
    assert family(store) == {0: None, 1: 0, 2: 1, 3: 2}
    reason = why(result, f"{paths[2].relative_to(root)}: parent 'gone'")
    assert f"follows {S2.id(1)!r}" in reason


def test_s2_parent_that_is_damaged(store: holdfast.Store, root: Path) -> None:
    paths = write_s2(root, s2_data(0), s2_data(1), s2_data(2), child(3, 1))
    write(paths[1], b"{")
    result = bring(store, root)
    assert family(store) == {0: None, 2: 0, 3: 2}
    assert why(result, str(paths[1].relative_to(root)))
    place = f"{paths[3].relative_to(root)}: parent {S2.id(1)!r}"
    assert S2.id(2) in why(result, place)


def test_s2_parent_that_the_store_refuses(store: holdfast.Store, root: Path) -> None:
    paths = write_s2(root, s2_data(0), s2_data(1, state=nested(70)), s2_data(2), child(3, 1))
    result = bring(store, root)
    assert family(store) == {0: None, 2: 0, 3: 0}
    assert "nested" in why(result, str(paths[1].relative_to(root)))
    assert S2.id(1) in why(result, str(paths[3].relative_to(root)))


def test_s2_parent_in_another_session(store: holdfast.Store, root: Path) -> None:
    write_s2(root, s2_data(0, "other"), s2_data(1), child(2, 0))
    result = bring(store, root)
    assert family(store) == {1: None, 2: 1}
    [(place, reason)] = result.skipped
    assert S2.id(0) in place
    assert "not in this session" in reason


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([child(0, 0)], {0: None}),
        ([child(0, 1), child(1, 0)], {1: None, 0: 1}),
        ([s2_data(0), child(1, 3), child(2, 1), child(3, 2)], {0: None, 2: 0, 3: 2, 1: 3}),
    ],
    ids=["itself", "two", "three"],
)
def test_s2_parents_in_a_circle(
    store: holdfast.Store, root: Path, data: list[dict[str, Any]], expected: dict[int, int | None]
) -> None:
    write_s2(root, *data)
    result = bring(store, root)
    assert family(store) == expected
    assert len(result.skipped) == 1
    assert "descends" in result.skipped[0][1]
    assert bring(store, root).known == len(data)


def test_s2_parent_that_is_younger_by_the_clock(store: holdfast.Store, root: Path) -> None:
    write_s2(root, s2_data(0), child(1, 3), s2_data(2), s2_data(3))
    result = bring(store, root)
    assert result == ImportResult(1, 4, 0, (), ())
    assert family(store) == {0: None, 3: 0, 1: 3, 2: 1}
    head = store.session(SESSION).head
    assert head is not None
    assert head.meta["id"] == S2.id(3)


def test_s2_long_line_of_parents_by_a_clock_that_runs_backwards(
    store: holdfast.Store, root: Path
) -> None:
    count = 1_200
    for n in range(count):
        at = f"2025-03-01T{10 - n // 600:02}:{(599 - n) % 60:02}:00.{count - n:06}Z"
        data = s2_data(n, created_at=at, state=n, context=None)
        data["metadata"]["parent_checkpoint_id"] = S2.id(n - 1) if n else None
        write(root / "sessions" / SESSION / f"{n}.json", data)
    assert import_(store, root) == ImportResult(1, count, 0, (), ())
    assert [c.step for c in tree(store)] == [*range(1, count + 1)]


def test_s2_index_that_is_torn(store: holdfast.Store, root: Path) -> None:
    S2.fill(root, 3)
    write(root / "index.json", b'{"0": {"id"')
    result = bring(store, root)
    assert result.checkpoints == 3
    assert "not JSON" in why(result, "index.json")


@pytest.mark.parametrize("index", [b"", b"[]", b"null", b'"x"'])
def test_s2_index_that_is_none(store: holdfast.Store, root: Path, index: bytes) -> None:
    S2.fill(root, 2)
    write(root / "index.json", index)
    result = bring(store, root)
    assert (result.checkpoints, len(result.skipped)) == (2, 1)


def test_s2_without_an_index(store: holdfast.Store, root: Path) -> None:
    S2.fill(root, 2)
    (root / "index.json").unlink()
    assert bring(store, root) == ImportResult(1, 2, 0, (), ())


def test_s2_file_that_the_index_lost(store: holdfast.Store, root: Path) -> None:
    S2.fill(root, 2)
    write(root / "index.json", {})
    assert bring(store, root) == ImportResult(1, 2, 0, (), ())


@pytest.mark.parametrize(
    "path", ["../secret.json", "/{root}/../secret.json", "sessions/../../secret.json"]
)
def test_row17_s2_index_with_a_path_that_leads_out(
    store: holdfast.Store, root: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    S2.fill(root, 2)
    secret = write(root.parent / "secret.json", s2_data(7))
    path = path.replace("/{root}", str(root))
    index = json.loads((root / "index.json").read_text())
    index["evil"] = index[S2.id(0)] | {"id": "evil", "path": path}
    write(root / "index.json", index)
    touched = []
    opened = os.open

    def watching(path: str, flags: int) -> int:
        touched.append(os.path.realpath(path))
        return opened(path, flags)

    monkeypatch.setattr(os, "open", watching)
    result = import_(store, root)
    assert result.checkpoints == 2
    assert "leads out" in why(result, "index.json: 'evil'")
    assert str(secret) not in touched
    assert len(touched) > 2


@pytest.mark.parametrize("entry", [None, 5, "x", [], {}, {"path": 5}, {"path": "a\0b"}])
def test_s2_index_with_a_hostile_entry(store: holdfast.Store, root: Path, entry: Any) -> None:
    S2.fill(root, 2)
    index = json.loads((root / "index.json").read_text())
    write(root / "index.json", index | {"odd": entry})
    result = bring(store, root)
    assert result.checkpoints == 2
    assert why(result, "index.json: 'odd'")


def test_s2_index_lists_what_is_gone(store: holdfast.Store, root: Path) -> None:
    paths = S2.fill(root, 3)
    paths[1].unlink()
    result = bring(store, root)
    assert result.checkpoints == 2
    assert "no file" in why(result, f"index.json: {S2.id(1)!r}")


# -- S3 ------------------------------------------------------------------------------------------


@pytest.fixture
def db(root: Path) -> Path:
    return root / "agents.db"


def fill_db(path: Path, count: int = 3, agent: str = SESSION) -> None:
    write_db(path, *[s3_data(n, agent) for n in range(count)]).close()


def test_s3_agent_is_session_and_agent(store: holdfast.Store, root: Path) -> None:
    checkpoint = one(store, root, S3)
    assert (checkpoint.session, checkpoint.agent) == (SESSION, SESSION)


def test_s3_iteration_and_metadata(store: holdfast.Store, root: Path) -> None:
    meta = one(store, root, S3, iteration=9, metadata={"a": "b"}).meta
    assert (meta["iteration"], meta["metadata"]) == (9, {"a": "b"})


def test_s3_conversation_of_unknown_fields(store: holdfast.Store, root: Path) -> None:
    conversation = {"turns": [[{"deep": None}]], "limit": 7}
    one(store, root, S3, conversation=conversation)
    assert store.session(SESSION).load() == {"conversation": conversation}


def test_s3_same_id_of_two_agents(store: holdfast.Store, root: Path) -> None:
    write_s3(root, s3_data(0, "a"), s3_data(0, "b"))
    assert bring(store, root) == ImportResult(2, 2, 0, (), ())


def test_s3_database(home: Home, db: Path) -> None:
    fill_db(db, 5)
    assert bring(home.store, db) == ImportResult(1, 5, 0, (), ())
    for n, checkpoint in enumerate(tree(home.store)):
        assert home.session(SESSION).load(checkpoint.id) == S3.state(s3_data(n))
        assert checkpoint.meta["created_at"] == 1_740_000_000 + n
        assert checkpoint.meta["metadata"] == {"model": "m"}
        assert (checkpoint.agent, checkpoint.meta["iteration"]) == (SESSION, n)
    assert bring(home.store, db) == ImportResult(1, 0, 5, (), ())


def test_s3_database_without_a_log(store: holdfast.Store, db: Path) -> None:
    write_db(db, s3_data(0), s3_data(1), wal=False).close()
    assert bring(store, db) == ImportResult(1, 2, 0, (), ())


def test_s3_database_with_rows_in_its_log(store: holdfast.Store, db: Path) -> None:
    """Copied while the writer is alive: all but the log is empty."""
    writer = write_db(db, *[s3_data(n) for n in range(4)])
    assert Path(f"{db}-wal").stat().st_size > 0
    assert bring(store, db) == ImportResult(1, 4, 0, (), ())
    writer.close()
    assert bring(store, db) == ImportResult(1, 0, 4, (), ())


def test_s3_database_with_a_hot_journal(store: holdfast.Store, root: Path, db: Path) -> None:
    """What a killed writer left half done is not what was committed."""
    writer = write_db(root.parent / "live.db", *[s3_data(n) for n in range(4)], wal=False)
    writer.execute(
        "BEGIN; UPDATE checkpoints SET agent_id = 'half done'; "
        "DELETE FROM checkpoints WHERE iteration = 2"
    )
    writer.cache_flush()
    for suffix in ("", "-journal"):
        shutil.copyfile(root.parent / f"live.db{suffix}", f"{db}{suffix}")
    writer.execute("ROLLBACK")
    writer.close()
    assert b"half done" in db.read_bytes()
    assert bring(store, db) == ImportResult(1, 4, 0, (), ())
    assert [info.name for info in store.sessions()] == [SESSION]


def test_s3_database_in_a_folder_that_nobody_may_write_to(store: holdfast.Store, db: Path) -> None:
    fill_db(db)
    db.chmod(0o400)
    db.parent.chmod(0o500)
    try:
        assert bring(store, db) == ImportResult(1, 3, 0, (), ())
    finally:
        db.parent.chmod(0o700)


def test_s3_database_with_a_log_that_is_a_link(store: holdfast.Store, db: Path) -> None:
    fill_db(db)
    target = write(db.parent.parent / "target", b"x" * 100)
    Path(f"{db}-wal").symlink_to(target)
    result = bring(store, db)
    assert result.checkpoints == 3
    assert "not followed" in why(result, f"{db.name}-wal")


def test_s3_database_that_is_written_to_meanwhile(
    store: holdfast.Store, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_db(db)
    rowids = untrusted.Table.rowids

    def late(self: untrusted.Table, *args: Any) -> list[int]:
        found = rowids(self, *args)
        write_db(db, s3_data(7)).close()
        return found

    monkeypatch.setattr(untrusted.Table, "rowids", late)
    with pytest.raises(Unavailable, match="written to"):
        import_(store, db)
    assert list(store.sessions()) == []


def test_s3_database_that_is_written_to_while_it_is_copied(
    store: holdfast.Store, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write_db(db, s3_data(0))
    copyfile = shutil.copyfile

    def late(*args: Any, **more: Any) -> None:
        copyfile(*args, **more)
        writer.execute("UPDATE checkpoints SET iteration = iteration + 1")

    monkeypatch.setattr(shutil, "copyfile", late)
    with pytest.raises(Unavailable, match="written to"):
        import_(store, db)
    assert list(store.sessions()) == []
    writer.close()


def test_s3_row_of_the_same_second(store: holdfast.Store, db: Path) -> None:
    """The order of the rows decides, where the clock was too coarse to."""
    writer = write_db(db)
    for id in ("z", "a", "m"):
        row = (id, SESSION, 0, b"{}", "{}", 1_740_000_000)
        writer.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", row)
    writer.close()
    bring(store, db)
    assert [c.meta["id"] for c in tree(store)] == ["z", "a", "m"]


ROWS: dict[str, tuple[Any, ...]] = {
    "id is null": (None, "a", 1, b"{}", "{}", 5),
    "id is bytes": (b"x", "a", 1, b"{}", "{}", 5),
    "id is empty": ("", "a", 1, b"{}", "{}", 5),
    "agent is a number": ("x", 5, 1, b"{}", "{}", 5),
    "agent is empty": ("x", "", 1, b"{}", "{}", 5),
    "iteration is a text": ("x", "a", "one", b"{}", "{}", 5),
    "iteration is negative": ("x", "a", -1, b"{}", "{}", 5),
    "iteration is a fraction": ("x", "a", 1.5, b"{}", "{}", 5),
    "conversation is torn": ("x", "a", 1, b'{"messages": [', "{}", 5),
    "conversation is a number": ("x", "a", 1, 7, "{}", 5),
    "conversation is a list": ("x", "a", 1, b"[]", "{}", 5),
    "metadata is torn": ("x", "a", 1, b"{}", "{", 5),
    "metadata is a list": ("x", "a", 1, b"{}", "[]", 5),
    "time is a text": ("x", "a", 1, b"{}", "{}", "yesterday"),
    "time is null": ("x", "a", 1, b"{}", "{}", None),
}


def loose_db(path: Path, more: str = "") -> apsw.Connection:
    """Without the constraints that keep wrong types out."""
    connection = apsw.Connection(str(path))
    connection.execute(f"CREATE TABLE checkpoints ({', '.join(COLUMNS)}{more})")
    return connection


@pytest.mark.parametrize("more", ["rowid TEXT", "RowId, _rowid_ DEFAULT 'x'", "oid AS (id)"])
def test_s3_columns_called_as_the_number_of_a_row_is(
    store: holdfast.Store, db: Path, more: str
) -> None:
    writer = loose_db(db, f", {more}")
    insert = f"INSERT INTO checkpoints ({', '.join(COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?)"
    for n in range(3):
        writer.execute(insert, (str(n), "a", n, b"{}", "{}", n))
    writer.close()
    assert bring(store, db) == ImportResult(1, 3, 0, (), ())


def test_s3_rows_that_have_no_number(store: holdfast.Store, db: Path) -> None:
    writer = loose_db(db, ", rowid, _rowid_, oid")
    writer.close()
    assert "the number of a row is missing" in why(bring(store, db, "s3"), "agents.db")


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_s3_damaged_row(store: holdfast.Store, db: Path, row: tuple[Any, ...]) -> None:
    writer = loose_db(db)
    for values in (("1", "a", 0, b"{}", "{}", 1), row, ("2", "a", 2, b"{}", "{}", 3)):
        writer.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", values)
    writer.close()
    result = bring(store, db)
    assert result.checkpoints == 2
    assert why(result, "agents.db: row 2")


def test_s3_row_with_damaged_text(store: holdfast.Store, db: Path) -> None:
    writer = loose_db(db)
    writer.execute("INSERT INTO checkpoints VALUES (CAST(x'ff' AS TEXT), 'a', 1, '{}', '{}', 1)")
    writer.execute("INSERT INTO checkpoints VALUES ('1', 'a', 1, '{}', '{}', 1)")
    writer.close()
    result = bring(store, db)
    assert result.checkpoints == 1
    assert "damaged" in why(result, "agents.db: row 1")


def test_s3_row_that_is_too_big(
    store: holdfast.Store, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrusted, "MAX_BYTES", 10_000)
    write_db(db, s3_data(0), s3_data(1, metadata={"x": "y" * 10_000})).close()
    result = bring(store, db)
    assert result.checkpoints == 1
    assert "more than 10000 bytes" in why(result, "agents.db: row 2")


def test_s3_row_without_metadata(store: holdfast.Store, db: Path) -> None:
    writer = write_db(db, s3_data(0))
    writer.execute("UPDATE checkpoints SET metadata = NULL")
    writer.close()
    assert bring(store, db).checkpoints == 1
    assert tree(store)[0].meta["metadata"] == {}


def test_s3_database_in_utf_16(store: holdfast.Store, db: Path) -> None:
    writer = apsw.Connection(str(db))
    writer.execute("PRAGMA encoding = 'UTF-16le'")
    writer.execute(SCHEMA)
    row = ("é", "ä", 1, '{"x": "ö"}', '{"y": "ü"}', 1)
    writer.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", row)
    writer.close()
    assert bring(store, db).checkpoints == 1
    assert store.session("ä").load() == {"conversation": {"x": "ö"}}


def big_db(path: Path, count: int = 60) -> int:
    """One row to a page or so; the size of a page."""
    conversation = {"messages": [{"role": "user", "content": "x" * 3_000}]}
    writer = write_db(path, *[s3_data(n, conversation=conversation) for n in range(count)])
    size: int = writer.pragma("page_size")
    writer.close()
    return size


def test_s3_database_with_a_damaged_page(store: holdfast.Store, db: Path) -> None:
    page = big_db(db)
    raw = bytearray(db.read_bytes())
    middle = raw.index(b"id-30trip") // page * page
    raw[middle : middle + page] = b"\xaa" * page
    db.write_bytes(raw)
    result = bring(store, db)
    found = [c.meta["iteration"] for c in tree(store)]
    assert found[0] == 0
    assert found[-1] == 59
    assert 50 <= len(found) < 60
    assert "damaged" in why(result, "agents.db")


def test_s3_database_with_a_damaged_index(store: holdfast.Store, db: Path) -> None:
    """The index on the ids is of no use to an import, so it does no harm."""
    big_db(db)
    connection = apsw.Connection(str(db))
    pages = {
        page
        for name, page in connection.execute("SELECT name, rootpage FROM sqlite_schema")
        if name != "checkpoints"
    }
    size: int = connection.pragma("page_size")
    connection.close()
    raw = bytearray(db.read_bytes())
    for page in pages:
        raw[(page - 1) * size : page * size] = b"\xaa" * size
    db.write_bytes(raw)
    assert bring(store, db, "s3") == ImportResult(1, 60, 0, (), ())


@pytest.mark.parametrize("length", [0, 50, 100, 5_000])
def test_s3_database_that_is_cut(store: holdfast.Store, db: Path, length: int) -> None:
    big_db(db)
    db.write_bytes(db.read_bytes()[:length])
    result = bring(store, db, "s3")
    assert result.skipped[0][0] == "agents.db"


def test_s3_what_is_no_database(store: holdfast.Store, db: Path) -> None:
    write(db, b"hello, I am a text " * 100)
    result = bring(store, db, "s3")
    assert result.checkpoints == 0
    assert "cannot be read" in why(result, "agents.db")


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE other (x)",
        "CREATE TABLE checkpoints (id, agent_id, iteration, conversation, metadata)",
        f"CREATE VIEW checkpoints AS SELECT {', '.join(f'1 {c}' for c in COLUMNS)}",
    ],
    ids=["other table", "other columns", "view"],
)
def test_s3_database_of_something_else(store: holdfast.Store, db: Path, sql: str) -> None:
    connection = apsw.Connection(str(db))
    connection.execute(sql)
    connection.close()
    result = bring(store, db, "s3")
    assert "of this format" in why(result, "agents.db")
    with pytest.raises(InvalidRequest):
        bring(store, db)


# -- which format it is --------------------------------------------------------------------------


@every_format
def test_format_is_recognised(store: holdfast.Store, root: Path, format: Format) -> None:
    format.fill(root, 2)
    bring(store, root)
    assert tree(store)[0].meta["imported"]["format"] == format.name


@every_format
def test_function_of_each_format(store: holdfast.Store, root: Path, format: Format) -> None:
    format.fill(root, 2)
    assert format.bring(store, root).checkpoints == 2
    assert import_(store, str(root), format.name).known == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("format", [S0, S1, S2], ids=["s0", "s1", "s2"])
def test_format_is_recognised_by_names_alone(
    store: holdfast.Store, root: Path, format: Format
) -> None:
    paths = format.fill(root, 2)
    for path in paths:
        write(path, b"torn")
    result = bring(store, root)
    assert (result.sessions, result.checkpoints) == (0, 0)
    for path in paths:
        assert why(result, str(path.relative_to(root)))


def test_two_formats_in_one_folder_are_refused(store: holdfast.Store, root: Path) -> None:
    S1.fill(root, 2)
    S3.fill(root, 2)
    with pytest.raises(InvalidRequest, match="s1 or s3") as caught:
        bring(store, root)
    assert caught.value.hint is not None
    for name in ("s0", "s1", "s2", "s3"):
        assert f'"{name}"' in caught.value.hint
    assert bring(store, root, "s1").checkpoints == 2


def nothing(root: Path) -> Path:
    return root


def a_text(root: Path) -> Path:
    return write(root / "x.txt", b"hello")


def other_json(root: Path) -> Path:
    return write(root / "package.json", {"name": "x"}).parent


@pytest.mark.parametrize("make", [nothing, a_text, other_json])
def test_no_format_is_refused(store: holdfast.Store, root: Path, make: Callable) -> None:
    with pytest.raises(InvalidRequest, match="none of the known formats") as caught:
        bring(store, make(root))
    assert '"s2"' in str(caught.value.hint)


@pytest.mark.parametrize("format", ["s4", "S0", "", 5])
def test_unknown_format_is_refused(store: holdfast.Store, root: Path, format: Any) -> None:
    with pytest.raises(InvalidRequest, match="unknown format"):
        import_(store, root, format)


@pytest.mark.parametrize("format", [None, "s0", "s1", "s2", "s3"])
def test_missing_path(store: holdfast.Store, root: Path, format: Any) -> None:
    with pytest.raises(NotFound):
        import_(store, root / "missing", format)


@pytest.mark.parametrize("path", ["", "a\0b", b"bytes"])
def test_no_path(store: holdfast.Store, path: Any) -> None:
    with pytest.raises(InvalidRequest):
        import_(store, path)


@pytest.mark.parametrize("format", ["s0", "s1", "s2"])
def test_file_where_a_folder_is_needed(store: holdfast.Store, root: Path, format: Any) -> None:
    with pytest.raises(InvalidRequest, match="not a folder"):
        import_(store, write(root / "x", b""), format)


def test_own_store_is_no_foreign_format(sqlite: Home, root: Path) -> None:
    sqlite.filled(1)
    sqlite.close()
    shutil.copyfile(sqlite.path, root / "own.db")
    with holdfast.open("memory:") as store, pytest.raises(InvalidRequest):
        bring(store, root / "own.db")


def test_root_may_be_a_link(store: holdfast.Store, root: Path) -> None:
    S1.fill(root, 2)
    link = root.parent / "link"
    link.symlink_to(root)
    assert bring(store, link) == ImportResult(1, 2, 0, (), ())


# -- whatever happens to a file ------------------------------------------------------------------


@contextmanager
def scratch() -> Iterator[tuple[Path, holdfast.Store]]:
    with tempfile.TemporaryDirectory() as folder, holdfast.open("memory:") as store:
        yield Path(folder) / "source", store


positions = st.floats(0, 1, exclude_max=True)


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    kind = draw(st.sampled_from(["cut", "flip", "put", "take", "swap"]))
    at, other = draw(positions), draw(positions)
    noise = draw(
        st.binary(min_size=1, max_size=6) | st.sampled_from([b'"', b"}", b"]", b",", b"0"])
    )

    def mutate(raw: bytes) -> bytes:
        a, b = sorted((int(at * len(raw)), int(other * len(raw))))
        match kind:
            case "cut":
                return raw[:a]
            case "flip":
                return raw[:a] + bytes([raw[a] ^ (1 << b % 8)]) + raw[a + 1 :]
            case "put":
                return raw[:a] + noise + raw[a:]
            case "take":
                return raw[:a] + raw[b:]
            case _:
                return raw[:a] + noise + raw[a + len(noise) :]

    return mutate


def strictly(raw: bytes) -> Any:
    """What the bytes hold, read by other means than the importer's; None if nothing."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


@every_format
@settings(max_examples=150)
@given(victim=st.integers(0, 3), mutate=mutations())
def test_any_damage_to_a_file(
    format: Format, victim: int, mutate: Callable[[bytes], bytes]
) -> None:
    with scratch() as (root, store):
        paths = format.fill(root, 4)
        sound = paths[victim].read_bytes()
        spoiled = mutate(sound)
        write(paths[victim], spoiled)
        result = bring(store, root, format.name)
        where = str(paths[victim].relative_to(root))
        found = {
            c.meta["imported"]["where"]: c
            for info in store.sessions()
            for c in tree(store, info.name)
        }
        assert len(found) == result.checkpoints
        for path in paths:
            if path != paths[victim]:
                assert str(path.relative_to(root)) in found
        assert (where in found) != (where in dict(result.skipped))
        data = strictly(spoiled)
        if where in found:
            state = store.session(found[where].session).load(found[where].id)
            assert state == format.state(data)
            original = format.state(json.loads(sound))
            assert format is not S0 or state == original or where in result.unverified
        else:
            assert data != json.loads(sound)


@every_format
@settings(max_examples=40)
@given(at=positions)
def test_a_file_that_is_cut_is_always_listed(format: Format, at: float) -> None:
    with scratch() as (root, store):
        paths = format.fill(root, 3)
        raw = paths[1].read_bytes()
        write(paths[1], raw[: int(at * len(raw))])
        result = bring(store, root, format.name)
        assert result.checkpoints == 2
        assert why(result, str(paths[1].relative_to(root)))


@settings(max_examples=150)
@given(mutate=mutations(), wal=st.booleans())
def test_any_damage_to_a_database(mutate: Callable[[bytes], bytes], wal: bool) -> None:
    with scratch() as (root, store):
        db = root / "agents.db"
        writer = write_db(db, *[s3_data(n) for n in range(12)])
        if wal:  # as a killed process leaves it
            for suffix in ("", "-wal"):
                shutil.copyfile(f"{db}{suffix}", f"{root}/copy.db{suffix}")
        writer.close()
        if wal:
            db.unlink()
            db = root / "copy.db"
        target = Path(f"{db}-wal") if wal else db
        write(target, mutate(target.read_bytes()))
        result = bring(store, db, "s3")
        assert result.checkpoints <= 12
        assert all(where.startswith(db.name) for where, _ in result.skipped)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=9))
def test_any_tree_of_parents_arrives_whole(shape: list[tuple[int, int]]) -> None:
    """Times in any order, parents anywhere, circles included: nothing is lost, nothing twice."""
    with scratch() as (root, store):
        data = []
        for n, (second, parent) in enumerate(shape):
            data.append(child(n, parent if parent != n else None))
            data[-1]["created_at"] = f"2025-03-01T10:00:{second:02}Z"
        write_s2(root, *data)
        result = bring(store, root)
        assert result.checkpoints == len(shape)
        names = family(store)
        blamed = {where.partition(":")[0] for where, _ in result.skipped}
        for n, (_, parent) in enumerate(shape):
            honest = parent == n or f"sessions/{SESSION}/{S2.id(n)}.json" in blamed
            assert honest or names[n] == parent
        newest = max(data, key=lambda d: (d["created_at"], d["id"]))
        assert store.session(SESSION).load() == S2.state(newest)
        assert bring(store, root).known == len(shape)


def test_errors_are_always_ours(root: Path) -> None:
    """Random bytes under all names that mean something."""
    rng = random.Random(5)
    names = [
        "index.json", "latest.json", "a_latest.json", "a_1.json", "sessions/a/b.json",
        "checkpoints/cp_1_2.json", "s/checkpoints/cp_1_2.json.backup", "x.db", "x.db-wal",
    ]  # fmt: skip
    for _ in range(60):
        shutil.rmtree(root)
        for name in rng.sample(names, rng.randrange(1, len(names))):
            noise = rng.choice([b"", b"{}", b"[]", b'{"id":', rng.randbytes(rng.randrange(200))])
            write(root / name, noise)
        for format in (None, "s0", "s1", "s2", "s3"):
            for path in (root, *root.rglob("*.db")):
                with holdfast.open("memory:") as store, suppress(HoldfastError):
                    bring(store, path, format)


def test_page_on_importing_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "importing.md"
    assert run_page("importing.md", page.read_text("utf-8")) == []
