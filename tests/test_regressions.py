"""Defects that were found once, each by its smallest case."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import os
import re
import sys
import zoneinfo
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import apsw
import ormsgpack
import pytest

import holdfast
from holdfast import growth, ids, revisions, writing
from holdfast.backends import disk, files_home
from holdfast.backends.files_ledger import Ledger
from holdfast.backends.memory import MemoryBackend
from holdfast.codec import records, rows, values
from holdfast.errors import Corrupt, Unavailable
from holdfast.model import ToolCall, Usage
from tests.faults.bitrot import flip
from tests.home import TEXT, Home
from tests.plainstore import PlainStore

if TYPE_CHECKING:
    from pathlib import Path


def test_a_counter_set_back_is_noticed(tmp_path: Path) -> None:
    """Else a fork gets a number that its origin uses, and both write to one stream."""
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        store.session("s").append("log", "x" * 2000)
    connection = apsw.Connection(str(path))
    body = connection.execute("SELECT body FROM counters WHERE space = 'stream'").get
    assert records.unseal_counter("stream", body) > 1
    forged = records.seal_counter("stream", 1)[8:]
    connection.execute("UPDATE counters SET body = ? WHERE space = 'stream'", (body[:8] + forged,))
    connection.close()
    with holdfast.open(path) as store, pytest.raises(holdfast.Corrupt, match="counter"):
        store.session("s").fork("t")


def test_a_machine_without_zones_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    berlin = dt.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    with holdfast.open("memory:", cache_bytes=0) as store:
        session = store.session("s")
        session.save({"t": berlin, "m": ["a"], "in": {"t": berlin}})
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(values, "_known_zones", frozenset)
            assert store.verify().ok
            session.append("m", "b")
            session.patch(set={("in", "x"): 1})
            assert store.verify().ok
            assert session.load()["t"] == berlin
        assert session.load()["t"].tzinfo == berlin.tzinfo
        assert session.load()["in"]["t"].tzinfo == berlin.tzinfo


class Lists(Enum):
    LONG = ["y" * 300] * 5


def test_an_enum_of_a_list_hashes_like_the_list() -> None:
    with holdfast.open("memory:", cache_bytes=0) as store:
        by_enum = store.session("a").save({"m": [Lists.LONG, ["z" * 3000] * 3]})
        by_list = store.session("b").save({"m": [["y" * 300] * 5, ["z" * 3000] * 3]})
        assert by_enum.state_hash == by_list.state_hash
        assert store.verify().ok


def test_equal_items_do_not_share_the_end_of_a_stream() -> None:
    """Each of two equal items with a long list inside grows on its own."""
    store = PlainStore()
    log = [{"n": n, "text": "t" * 300} for n in range(40)]

    def item(*more: int) -> dict[str, Any]:
        return {"log": [*log, *({"n": n, "text": "m" * 300} for n in more)]}

    first, other = {"text": "a" * 2000}, {"text": "b" * 2000}
    node = None
    for state in (
        {"items": [first, item(), first]},
        {"items": [other, item(), item(), other]},
        {"items": [other, item(1), item(), other]},
        {"items": [other, item(1), item(2), other]},
        {"items": [other, item(1, 3), item(2, 4), other]},
    ):
        node = store.save(state, node, line=1)
        assert store.load(node) == state
        assert store.load(store.cold(node)) == state


def test_a_session_whose_name_is_damaged_is_not_new(tmp_path: Path) -> None:
    """Wherever a bit of its name is flipped, in the table or in the index."""
    path = tmp_path / "store.db"
    name = "a name that is found nowhere else"
    with holdfast.open(path) as store:
        store.session(name).save({"n": 1})
    sound = path.read_bytes()
    places = [m.start() for m in re.finditer(name.encode(), sound)]
    assert len(places) >= 2, "in the table and in its index"
    for place in places:
        damaged = bytearray(sound)
        damaged[place + 5] ^= 4
        path.write_bytes(damaged)
        with holdfast.open(path) as store:
            try:
                loaded = store.session(name).load()
            except holdfast.Corrupt:
                continue
            assert loaded == {"n": 1}


def test_a_history_that_runs_in_a_circle_ends() -> None:
    """Records made by someone who can seal: each names the other as its parent."""
    with holdfast.open("memory:") as store:
        session = store.session("s")
        for n in range(3):
            session.save({"n": n})
        backend = store.backend
        assert isinstance(backend, MemoryBackend)
        rows = backend._checkpoints[1]
        second = records.unseal_checkpoint(1, 2, *rows[2])
        third = records.unseal_checkpoint(1, 3, *rows[3])
        fields = values.decode(second.meta)
        fields[3:5] = [3, third.record.id]
        r = second.record
        body = records.seal_checkpoint(
            1, 2, r.id, values.encode(fields), r.hash, second.line, r.size, r.added, second.root, 3
        )
        rows[2] = (r.id, body)
        history = list(itertools.islice(session.history(), 100))
        assert [c.seq for c in history[:2]] == [3, 2]
        assert len(history) <= 4
        assert history[-1].damaged
        assert not store.verify().ok


UNREADABLE: list[dict[str, Any]] = [
    *[{"usage": Usage(tokens=n)} for n in (None, 1.5, "7", True, [1])],  # type: ignore[arg-type]
    *[{"usage": Usage(cost=n)} for n in (None, "1", Decimal("0.1"), False, math.nan, math.inf)],  # type: ignore[arg-type]
    *[{"pending": p} for p in (5, ToolCall("1", "t"), "ab", [None], {"a": 1})],
    {"pending": [ToolCall("1", "t", meta=None)]},  # type: ignore[arg-type]
]


@pytest.mark.parametrize("fields", UNREADABLE, ids=str)
def test_a_record_that_would_not_be_read_again_is_not_acknowledged(
    home: Home, fields: dict[str, Any]
) -> None:
    session = home.session()
    session.save({"n": 1}, usage=Usage(tokens=7, cost=1))
    for save in (session.save, lambda _, **more: session.append("log", 1, **more)):
        with pytest.raises(holdfast.InvalidRequest):
            save({"n": 2}, **fields)
    assert home.reopened().session("s").load() == {"n": 1}
    assert home.store.verify().ok


def test_usage_of_a_run_is_looked_at_when_it_is_given(memory: Home) -> None:
    with memory.session().run() as run:
        for wrong in (None, "7", 1.5):
            with pytest.raises(holdfast.InvalidRequest, match="tokens"):
                run.add_usage(tokens=wrong)  # type: ignore[arg-type]
        run.add_usage(tokens=7)
    assert memory.session().usage().path == Usage(7)


@pytest.mark.parametrize("digits", ["9" * 19, "9" * 5000], ids=len)
def test_numbers_that_python_does_not_read(memory: Home, digits: str) -> None:
    session = memory.filled(2)
    for revision in (f"@~{digits}", f"step:{digits}"):
        with pytest.raises((holdfast.InvalidRequest, holdfast.CheckpointNotFound)):
            session.load(revision)
    with pytest.raises(holdfast.NotFound):
        session.blame(f"log.{digits}")


@pytest.mark.parametrize("name", ["log.jsonl", "journal.jsonl"])
def test_a_line_with_a_number_that_python_does_not_read(tmp_path: Path, name: str) -> None:
    with holdfast.open(f"files:{tmp_path}/store") as store, store.session("s").run() as run:
        run.step("a", lambda: 1)
    [path] = tmp_path.glob(f"store/sessions/*/{name}")
    path.write_bytes(path.read_bytes() + b'{"n":' + b"9" * 5000 + b",\n")
    with holdfast.open(f"files:{tmp_path}/store") as store:
        assert store.session("s").head is not None
        assert [call.name for call in store.session("s").calls()] == ["a"]


@pytest.mark.parametrize("url", ["agent.db", "files:agents"])
def test_a_relative_address_means_the_same_place_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """A connection that is opened later must not end up in the store of another folder."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with holdfast.open(url) as store:
            store.session("s").save({"in": name})
    monkeypatch.chdir(tmp_path / "here")
    with holdfast.open(url) as store:
        session = store.session("s")
        monkeypatch.chdir(tmp_path / "there")
        with store.backend.reader(), store.backend.reader():
            assert session.load() == {"in": "here"}
        child = os.fork()  # afterwards both have connections of their own
        if not child:
            ok = session.patch(set={"by": "child"}).step == 2
            os._exit(0 if ok and session.load() == {"in": "here", "by": "child"} else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert session.load() == {"in": "here", "by": "child"}
        session.patch(set={"by": "parent"})
        assert store.verify().ok
    with holdfast.open(url) as store:
        assert store.session("s").load() == {"in": "there"}


# -- a disk that fails once ----------------------------------------------------------------------


class Shaky(apsw.VFS):
    """A file system whose next read of a page fails."""

    def __init__(self) -> None:
        super().__init__("shaky", "")
        self.fails = False

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802 - apsw's name
        shaky = self

        class File(apsw.VFSFile):
            def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
                if shaky.fails and amount >= 4096:
                    shaky.fails = False
                    raise apsw.IOError("injected")
                return super().xRead(amount, offset)

        return File("", name, flags)


def test_a_read_that_fails_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home("sqlite", tmp_path)
    for n in range(20):
        home.session().save({"log": [os.urandom(999).hex()], "n": n})
    shaky, real = Shaky(), apsw.Connection
    monkeypatch.setattr(apsw, "Connection", partial(real, vfs="shaky"))
    session = home.reopened().session("s")
    shaky.fails = True
    with pytest.raises(Unavailable, match="injected"):
        session.load("step:3")
    assert session.load("step:3")["n"] == 2
    home.give_back()
    shaky.unregister()


# -- an interrupt in the middle of something -----------------------------------------------------


def interrupted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let the next call of a function be interrupted."""
    real = getattr(owner, name)

    def interrupt(*args: Any, **more: Any) -> Any:
        patch.setattr(owner, name, real)
        raise KeyboardInterrupt

    patch.setattr(owner, name, interrupt)


# A ledger learns of a change that brings a label in another way than of most.
MOMENTS = [
    ("memory", MemoryBackend, "_write_row", None), ("files", Ledger, "add", None),
    ("files", Ledger, "add", "label"), ("files", Ledger, "_apply_sweep", "label"),
    ("files", files_home.Home, "tell", None), ("files", disk.Batch, "put", None),
    ("files", disk, "write_all", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "owner", "name", "label"), MOMENTS, ids=lambda part: getattr(part, "__name__", part)
)
def test_an_interrupted_save_is_there_or_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    owner: Any,
    name: str,
    label: str | None,
) -> None:
    home = Home(kind, tmp_path)
    session, log = home.session(), [f"{n} {TEXT}" for n in range(9)]
    session.save({"log": log})
    interrupted(monkeypatch, owner, name)
    with pytest.raises(KeyboardInterrupt):
        session.append("log", TEXT, label=label)
    monkeypatch.undo()
    for store in (home.store, home.another()):
        assert store.session("s").load()["log"] in (log, [*log, TEXT])
    session.refresh()
    for n in range(3):
        session.append("log", n)
    for reopen in (lambda: home.store, home.reopened):
        found = reopen().session("s").load()["log"]
        assert (found[:9], found[-3:]) == (log, [0, 1, 2])
        assert home.store.verify().ok
    home.give_back()


def test_an_interrupt_while_decoding_is_not_taken_for_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It strikes as the hook is called, before any of its lines; C code then drops what it was."""
    data, real = values.encode([(1, 2), {3}]), values._unpackb
    failures = itertools.chain([True], itertools.repeat(False))

    def unpack(data: bytes, **more: Any) -> Any:
        if next(failures):
            raise ValueError("ext_hook failed")
        return real(data, **more)

    monkeypatch.setattr(values, "_unpackb", unpack)
    with pytest.raises(KeyboardInterrupt):
        values.decode(data)
    assert values.decode(data) == [(1, 2), {3}]


def test_the_words_of_the_decoder_when_a_hook_fails() -> None:
    def fail(tag: int, data: bytes) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(ValueError, match=f"^{values._HOOK_FAILED}$"):
        ormsgpack.unpackb(values.encode((1,)), ext_hook=fail)
    with pytest.raises(KeyboardInterrupt):
        values.decode(values.encode((1,)), fail)


def test_how_long_integers_may_be_is_up_to_each_process(tmp_path: Path) -> None:
    state = {"big": 10**700, "bigger": -(10**5000)}
    url = f"files:{tmp_path}/store"
    holdfast.open(url).session("s").save(state)
    before = sys.get_int_max_str_digits()
    try:
        for limit in (640, 0):
            sys.set_int_max_str_digits(limit)
            with holdfast.open(url) as store:
                session = store.session("s")
                assert session.load() == state
                session.save(state)
    finally:
        sys.set_int_max_str_digits(before)
    with holdfast.open(url) as store:
        assert store.session("s").load() == state
        assert store.verify().ok


@pytest.mark.parametrize("scheme", ["", "files:"])
def test_an_address_that_is_too_long(scheme: str) -> None:
    with pytest.raises(holdfast.Unavailable):
        holdfast.open(f"{scheme}{'x' * 5000}")


def crowded(home: Home, patch: pytest.MonkeyPatch) -> tuple[str, holdfast.Session]:
    """A prefix that far more ids share than are asked for at a time, and who made the last one."""
    made = (ids.from_text(f"06a2yjva0wchkawcxr3f2d{n:02d}") for n in range(100))
    patch.setattr(revisions, "_PAGE", 3)
    patch.setattr(ids, "new_id", lambda *_: next(made))
    one, two = home.session("one"), home.session("two")
    one.save({"n": 0})
    for n in range(12):
        home.session("crowd").save({"n": n})
    one.save({"n": 1})
    two.save({"n": 2})
    return "06a2yjva0w", two


def test_a_prefix_means_the_same_however_many_share_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, two = crowded(home, monkeypatch)
    assert two.load(prefix) == {"n": 2}
    with pytest.raises(holdfast.AmbiguousRevision):
        home.session("one").load(prefix)
    with pytest.raises(holdfast.AmbiguousRevision):
        home.store.get(prefix)
    with pytest.raises(holdfast.CheckpointNotFound):
        two.load("06a2yjva0wchkawcxr3f2dzz")


def test_mutant_that_asks_for_one_page(memory: Home, mutant: Any) -> None:
    real = revisions._beginning
    mutant(revisions, "_beginning", lambda *of: itertools.islice(real(*of), 3))
    with pytest.raises(holdfast.NotFound), pytest.MonkeyPatch.context() as patch:
        test_a_prefix_means_the_same_however_many_share_it(memory, patch)


def test_a_prefix_means_what_is_not_deleted(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one session or of all: the store's own search took the deleted ones for candidates."""
    prefix, two = crowded(home, monkeypatch)
    for name in ("one", "crowd"):
        home.session(name).delete()
    assert home.store.get(prefix).id == two.get(prefix).id == two.get("@").id


def test_what_a_checkpoint_says_does_not_change(home: Home) -> None:
    """Whatever is done to what it hands out."""
    call = ToolCall("1", "pay", {"to": ["a"]}, {"n": [1]})
    saved = home.session().save({}, meta={"a": [1], "b": {"c": {}}}, pending=[call])
    for checkpoint in (saved, home.session().head):
        assert checkpoint is not None
        checkpoint.meta["a"].append(2)
        checkpoint.meta["b"]["c"]["d"] = 1
        checkpoint.pending[0].arguments["to"].append("b")
        assert checkpoint.meta == {"a": [1], "b": {"c": {}}}
        assert checkpoint.pending == (call,)


def said(checkpoint: holdfast.Checkpoint) -> dict[str, Any]:
    names = [n for n in dir(holdfast.Checkpoint) if not n.startswith("_")]
    return {n: getattr(checkpoint, n) for n in names if not callable(getattr(checkpoint, n))}


def test_a_checkpoint_as_bytes(home: Home) -> None:
    """Everything that it says, to the bit, and no other checkpoint whatever happens to them."""
    session = home.session("odd \ud800 name")
    session.save({"n": 1})
    session.save({"n": 2})
    full = session.save(
        {"n": 3}, label="l", tags=["a", "b"], trigger="t", status="failed", reason="r", key="k",
        usage=Usage(7, 0.5), pending=[ToolCall("1", "pay", {"to": b"\0", "n": 2**70})], hint="h",
        meta={"when": dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "set": {1, 2}},
    )  # fmt: skip
    session.delete("@~1")
    fork = session.fork("fork").head
    assert fork is not None
    for checkpoint in (full, fork, *session.history()):
        data = checkpoint.to_bytes()
        again = holdfast.Checkpoint.from_bytes(data)
        assert said(again) == said(checkpoint)
        assert again == checkpoint
    for n in range(len(data) * 8):
        with pytest.raises((Corrupt, holdfast.UnsupportedFormat)):
            holdfast.Checkpoint.from_bytes(flip(data, *divmod(n, 8)))
    for wrong in (b"", data[:-1], data + b"x", b"{}", "text", None):
        with pytest.raises((Corrupt, holdfast.UnsupportedFormat)):
            holdfast.Checkpoint.from_bytes(wrong)  # type: ignore[arg-type]
    made_up: list[Any] = [[], [1], [2, 3], {}, [1, *range(18)]]
    for fields in made_up:
        with pytest.raises((Corrupt, holdfast.UnsupportedFormat)):
            holdfast.Checkpoint.from_bytes(rows.seal(rows.LOOSE, 0, values.encode(fields)))


def test_another_checkpoint_of_the_same_number_is_another_head(home: Home) -> None:
    """As after a crash that lost ours, with `durability="normal"`: to try again would not end."""
    session = home.session()
    session.save({"n": 1})
    writer = session._writer
    assert writer.tip is not None
    writer.tip = writer.tip._replace(id=ids.new_id(writer.tip.id))
    home.store.session("s").tag("@", "t")  # the head's row is another
    with pytest.raises(holdfast.HeadMoved):
        session.save({"n": 2})
    session.refresh()
    session.save({"n": 3})
    assert [home.store.session("s").load(c)["n"] for c in session.history()] == [3, 1]


@pytest.mark.parametrize("hot", [False, True])
def test_what_a_handle_knows_half_way_is_looked_up(sqlite: Home, *, hot: bool) -> None:
    """A process that is forked off while a thread saves has a handle between two assignments."""
    session = sqlite.session()
    session.save({"log": [TEXT] * 9})
    session.append("log", TEXT)
    code = (growth.grow if hot else writing.Writer._seal).__code__
    writer = session._writer
    seen = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line":
            seen.append((writer.head.last, writer.tip and writer.tip.place.seq))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        session.append("log", TEXT, label=None if hot else "x")
    finally:
        sys.settrace(before)
    assert {head - (tip or 0) for head, tip in seen} == {0, -1}  # never a tip that is behind


MADE_UP: list[tuple[int, Any]] = [
    # by the number of the field: what to_bytes() never writes there
    (2, b""), (2, bytes(14)), (4, 1 << 80), (4, -(1 << 62)), (6, bytes(16)), (17, (1,)),
    (18, ()), (18, (1,)), (18, (None, None)), (18, (1, b"short")), (18, (1, "text")),
    *[(8, {name: 3}) for name in ("usage", "pending", "run", "meta", "trigger", "key")],
    (8, {"pending": [3]}), (8, {"usage": [1]}), (8, {"run": ["r", "1", None]}),
]  # fmt: skip


@pytest.mark.parametrize(("n", "value"), MADE_UP, ids=str)
def test_bytes_that_no_checkpoint_says(memory: Home, n: int, value: Any) -> None:
    """Refused at once, though their digest is right, and not when somebody asks for a field."""
    checkpoint = memory.session().save({"n": 1}, tags=["t"], meta={"k": 1})
    fields = values.decode(rows.unseal(rows.LOOSE, 0, checkpoint.to_bytes(), "it")[1])
    fields[n] = value
    with pytest.raises(Corrupt):
        holdfast.Checkpoint.from_bytes(rows.seal(rows.LOOSE, 0, values.encode(fields)))


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_bytes_of_other_types(memory: Home, kind: Any) -> None:
    checkpoint = memory.session().save({"n": 1})
    again = holdfast.Checkpoint.from_bytes(kind(checkpoint.to_bytes()))
    assert said(again) == said(checkpoint)


def test_a_damaged_checkpoint_as_bytes(home: Home) -> None:
    session = home.filled(3)
    home.spoil_checkpoint(2)
    for checkpoint in session.tree():
        assert said(holdfast.Checkpoint.from_bytes(checkpoint.to_bytes())) == said(checkpoint)
