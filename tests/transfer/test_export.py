"""Exports and imports: one file, or a folder, and all of it back."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard

import holdfast
from holdfast.errors import HoldfastError, InvalidRequest, NotFound, UnsupportedFormat
from holdfast.format import portable
from holdfast.transfer import copy as transfer_copy
from holdfast.transfer import export
from holdfast.transfer import items as transfer_data
from tests.support.stores import TEXT, Home
from tests.transfer.test_copy import facts, life

FORMS = ["all.jsonl", "all.jsonl.zst", "folder"]


def fresh() -> holdfast.Store:
    return holdfast.open("memory:")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(2))
def test_there_and_back(home: Home, tmp_path: Path, form: str, seed: int) -> None:
    life(random.Random(seed), home.store, 40)
    home.session("odd \udc80 / ../name").save({"x": float("nan"), "b": b"\0", 7: (1, {2})})
    done = home.store.export(tmp_path / form)
    assert done.skipped == ()
    with fresh() as copy:
        copy.import_exported(tmp_path / form)
        assert repr(facts(copy)) == repr(facts(home.store))
        report = copy.verify(read_data=True)
        assert report.ok, str(report)
        again = copy.import_exported(tmp_path / form)
        assert (again.sessions, again.skipped) == (0, ())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([form, "home"])


def test_some_sessions(memory: Home, tmp_path: Path) -> None:
    for name in "abc":
        memory.filled(2, name)
    memory.store.export(tmp_path / "x.jsonl", sessions=["a", "b"])
    with fresh() as copy:
        copy.import_exported(tmp_path / "x.jsonl", sessions=["b"])
        assert [info.name for info in copy.sessions()] == ["b"]


def test_a_file_is_lines_of_json(memory: Home, tmp_path: Path) -> None:
    memory.filled(3, label="here")
    memory.store.export(tmp_path / "x.jsonl")
    first, *rest = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert first == {"holdfast": "export", "format": 1, "sessions": ["s"]}
    assert {entry["in"].split("/")[-1] for entry in rest} >= {"log.jsonl", "session.json"}
    items = [e["is"]["item"] for e in rest if "/streams/" in e["in"]]
    assert any("quick brown fox" in str(item) for item in items)


def test_a_folder_is_a_store(memory: Home, tmp_path: Path) -> None:
    memory.filled(3)
    memory.store.export(tmp_path / "folder")
    with holdfast.open(f"files:{tmp_path / 'folder'}") as store:
        store.session("s").append("log", "more")
        assert store.verify(read_data=True).ok


def test_refused(memory: Home, tmp_path: Path) -> None:
    memory.filled(1)
    (tmp_path / "taken.jsonl").write_text("mine")
    with pytest.raises(InvalidRequest):
        memory.store.export(tmp_path / "taken.jsonl")
    assert (tmp_path / "taken.jsonl").read_text() == "mine"
    with pytest.raises(HoldfastError):
        memory.store.export(tmp_path / "no" / "x.jsonl")
    with pytest.raises(NotFound):
        memory.store.import_exported(tmp_path / "nowhere.jsonl")
    for text in ("", "mine", "{}", '{"holdfast":"export","format":2,"sessions":[]}', "\x28\xb5"):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(UnsupportedFormat):
            memory.store.import_exported(tmp_path / "bad.jsonl")


@pytest.mark.parametrize("form", FORMS[:2])
def test_a_file_that_appears_meanwhile_is_left_alone(
    memory: Home, tmp_path: Path, form: str
) -> None:
    memory.filled(1)
    with pytest.raises(InvalidRequest, match="exists already"):
        memory.store.export(tmp_path / form, progress=lambda *_: put(tmp_path / form))
    assert (tmp_path / form).read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == [form, "home"]


def put(path: Path) -> None:
    path.write_text("mine")


@pytest.mark.parametrize("form", FORMS)
def test_a_name_as_long_as_names_can_be(memory: Home, tmp_path: Path, form: str) -> None:
    """Its bytes count, not its characters."""
    path = tmp_path / ("漢" * 80 + "." + form)
    memory.filled(1)
    memory.store.export(path)
    with fresh() as copy:
        assert copy.import_exported(path).checkpoints == 1
    assert sorted(tmp_path.iterdir()) == sorted([path, tmp_path / "home"])


@pytest.mark.parametrize("form", FORMS)
def test_an_error_of_who_is_told_of_progress(memory: Home, tmp_path: Path, form: str) -> None:
    memory.filled(1)
    gone = BrokenPipeError("the terminal is gone")

    def tell(*_: int) -> None:
        raise gone

    with pytest.raises(BrokenPipeError) as caught:
        memory.store.export(tmp_path / form, progress=tell)
    assert caught.value is gone
    memory.store.export(tmp_path / form)
    with fresh() as copy, pytest.raises(BrokenPipeError) as caught:
        copy.import_exported(tmp_path / form, progress=tell)
    assert caught.value is gone
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([form, "home"])


@pytest.mark.parametrize("compressed", [False, True])
def test_cut_short_anywhere(memory: Home, tmp_path: Path, compressed: bool) -> None:
    """What is whole comes in, what is not is told of, and nothing is wrong."""
    for n, name in enumerate(["a", "b", "c"]):
        memory.filled(n + 2, name)
    path = tmp_path / ("x.jsonl.zst" if compressed else "x.jsonl")
    memory.store.export(path)
    data, want = path.read_bytes(), facts(memory.store)
    rng = random.Random(3)
    for cut in sorted(rng.sample(range(len(data)), 25)):
        path.write_bytes(data[:cut])
        _check(path, want)


def test_changed_anywhere(memory: Home, tmp_path: Path) -> None:
    for n, name in enumerate(["a", "b", "c"]):
        memory.filled(n + 2, name, label="l", tags=["t"])
    path = tmp_path / "x.jsonl"
    memory.store.export(path)
    data, want = path.read_bytes(), facts(memory.store)
    rng = random.Random(4)
    for at in sorted(rng.sample(range(len(data)), 60)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        _check(path, want)


def test_no_line_is_lost_in_silence(
    memory: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the last one of a log or of a journal either, which nothing behind it could miss."""
    monkeypatch.setattr(transfer_data, "CHUNK_BYTES", 500)
    monkeypatch.setattr(transfer_copy, "CHUNK_BYTES", 500)
    session = memory.filled(2, "a")
    for n in range(9):
        session.append("log", f"{n} {TEXT}")
    with session.run() as run:
        run.step("model", lambda: 1)
    path = tmp_path / "x.jsonl"
    memory.store.export(path)
    lines, want = path.read_bytes().splitlines(keepends=True), facts(memory.store)
    chosen = [n for n, line in enumerate(lines) if b"/log.jsonl" in line or b"/journal.j" in line]
    assert len(chosen) > 4
    for n in chosen:
        damaged = lines[n].replace(b'"sum":"', b'"sum":"0', 1)
        for instead in ([damaged], []):
            path.write_bytes(b"".join([*lines[:n], *instead, *lines[n + 1 :]]))
            with fresh() as copy:
                told = [name for name, _ in copy.import_exported(path).skipped]
                assert told == ["a"]
            _check(path, want)


def _check(path: Path, want: dict[str, Any]) -> None:
    with fresh() as copy:
        try:
            done = copy.import_exported(path)
        except HoldfastError:
            assert list(copy.sessions()) == []
            return
        assert copy.verify(read_data=True).ok
        have = facts(copy)
        told = {name for name, _ in done.skipped}
        for name in want.keys() - {"found"}:
            if name in have:
                assert have[name][2:4] == want[name][2:4] or name in told
            else:
                assert name in told


@pytest.mark.parametrize(
    "place",
    ["../x.json", "/etc/x.json", "sessions/../../x/log.jsonl", "sessions/a/../../../x.json",
     "blobs/ab/../../x.json", "holdfast.json", "sessions/a/lock", "counters.json", 7, None],
)  # fmt: skip
def test_nothing_is_written_elsewhere(memory: Home, tmp_path: Path, place: Any) -> None:
    lines = [
        {"holdfast": "export", "format": 1, "sessions": ["a"]},
        {"in": place, "is": {"evil": True}},
    ]
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = sorted(tmp_path.rglob("*"))
    done = memory.store.import_exported(inner / "x.jsonl")
    assert [name for name, _ in done.skipped] == ["a", "x.jsonl"]
    assert sorted(tmp_path.rglob("*")) == before


FIRST = b'{"holdfast":"export","format":1,"sessions":[]}\n'


def bomb(path: Path, lines: bytes) -> Path:
    path.write_bytes(zstandard.ZstdCompressor().compress(FIRST + lines))
    return path


def in_place(place: str, text: bytes) -> bytes:
    return b'{"in":"%b","is":%b}\n' % (place.encode(), text)


BLOB = f"blobs/00/{'0' * 64}.json"
LOG = "sessions/x/log.jsonl"
BOMBS = {
    "a long line": b"0" * (1 << 20),
    "empty lists": in_place(BLOB, b"[%b0]" % (b"[]," * 40_000)),
    "empty dicts": in_place(LOG, b"[%b0]" % (b"{}," * 40_000)),
    "keys": in_place(BLOB, b"[%b0]" % (b'{"":{}},' * 20_000)),
    "wide text": in_place(BLOB, b'"%b\\ud83d\\ude00"' % (b"x" * 300_000)),
    "a log": in_place(LOG, b"1") * 20_000,
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_is_refused(memory: Home, tmp_path: Path, what: str) -> None:
    path = bomb(tmp_path / "x.jsonl.zst", BOMBS[what])
    assert path.stat().st_size < 2000
    with holdfast.memory_limit(1_000_000):
        with pytest.raises(holdfast.TooBig, match="more than 1,000,000 bytes") as refusal:
            memory.store.import_exported(path)
        assert "memory_limit" in (refusal.value.hint or "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "x.jsonl.zst"]
    memory.store.import_exported(path)


def test_a_bomb_is_refused_in_asyncio(tmp_path: Path) -> None:
    path = bomb(tmp_path / "x.jsonl.zst", BOMBS["empty lists"])

    async def read() -> None:
        async with await holdfast.aopen("memory:") as store:
            with holdfast.memory_limit(1_000_000), pytest.raises(holdfast.TooBig):
                await store.import_exported(path)
            await store.import_exported(path)

    asyncio.run(read())


def test_a_checkpoint_is_one_line(memory: Home, tmp_path: Path) -> None:
    """Else many short lines would make a file that is read whole."""
    line = in_place("sessions/x/checkpoints/1.json", b"1")
    done = memory.store.import_exported(bomb(tmp_path / "x.jsonl.zst", 3 * line))
    assert done.skipped == (("x.jsonl.zst", "line 3 of the file is damaged, and 1 more"),)


def test_text_that_looks_like_lists_is_text(memory: Home, tmp_path: Path) -> None:
    memory.session("s").save({"code": "[],{}:" * 30_000, "quotes": '"\\' * 10_000})
    memory.store.export(tmp_path / "x.jsonl")
    with holdfast.memory_limit(3_000_000), holdfast.open("memory:") as other:
        assert other.import_exported(tmp_path / "x.jsonl").checkpoints == 1


def test_a_bomb_that_expands_too_much_is_refused(memory: Home, tmp_path: Path) -> None:
    path = bomb(tmp_path / "x.jsonl.zst", b"0" * (17 << 20))
    with pytest.raises(holdfast.Corrupt, match="more than its size allows"):
        memory.store.import_exported(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "x.jsonl.zst"]


def test_what_compresses_all_too_well_is_no_bomb(
    memory: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever export writes, import reads."""
    monkeypatch.setattr(export, "SMALL", 16 << 10)
    monkeypatch.setattr(export, "_CHUNK", 4 << 10)
    monkeypatch.setattr(export, "_ROOM", 100)
    for n in range(3):
        memory.session(f"s{n}").save({"doc": f"{n}" * 900_000})
    path = tmp_path / "x.jsonl.zst"
    memory.store.export(path)
    assert path.stat().st_size < 10_000
    with fresh() as copy:
        assert copy.import_exported(path).checkpoints == 3
        assert facts(copy) == facts(memory.store)
    packed = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True)
    plain = packed.read()
    path.write_bytes(zstandard.ZstdCompressor().compress(plain))
    with fresh() as copy:
        with pytest.raises(holdfast.Corrupt, match="more than its size allows") as refusal:
            copy.import_exported(path)
        assert "zstd -d" in (refusal.value.hint or "")
        (tmp_path / "x.jsonl").write_bytes(plain)  # as that hint says
        assert copy.import_exported(tmp_path / "x.jsonl").checkpoints == 3


def test_a_line_for_which_memory_is_short(
    memory: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.filled(1, "a")
    memory.filled(1, "b")
    memory.store.export(tmp_path / "x.jsonl")
    loads = portable.loads

    def short(text: bytes) -> Any:
        if b"sessions/a/log.jsonl" in text:
            raise MemoryError
        return loads(text)

    monkeypatch.setattr(portable, "loads", short)
    with fresh() as copy:
        done = copy.import_exported(tmp_path / "x.jsonl")
        assert [name for name, _ in done.skipped] == ["a", "x.jsonl"]
        assert [info.name for info in copy.sessions()] == ["b"]


@pytest.mark.parametrize("form", FORMS)
def test_what_runs_have_called_goes_along(home: Home, tmp_path: Path, form: str) -> None:
    with home.session("s").run() as run:
        run.tool(
            {"id": "c1", "name": "pay", "input": {"amount": 7}}, lambda amount: f"paid {amount}"
        )
    home.store.export(tmp_path / form)
    with fresh() as copy:
        assert copy.import_exported(tmp_path / form).skipped == ()
        assert copy.session("s").tool_calls() == home.session("s").tool_calls() != []
