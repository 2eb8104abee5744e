"""gc removes deleted text from the bytes on the disk."""

from __future__ import annotations

import datetime as dt
import random
import re
import string
import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, ClassVar

import apsw
import pytest
import zstandard

import holdfast
from holdfast.history import search_index
from holdfast.model import ToolCall
from holdfast.storage import changes
from holdfast.storage.files import store_folder
from holdfast.storage.sqlite import erase as sqlite_erase
from holdfast.storage.sqlite import schema
from holdfast.storage.sqlite import search_index as sqlite_index
from tests.support import postgres
from tests.support import stores as homes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LETTERS = string.ascii_letters + string.digits
_LENGTH = 16
_WORD = re.compile(b"[A-Za-z0-9]{%d,}" % _LENGTH)
_PAGE = 4096


class Home(homes.Home):
    """Closed at the end of a test. It has a search index, which must forget as well."""

    opened: ClassVar[list[Home]] = []

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__(kind, folder)
        self.store.index()
        self.opened.append(self)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while Home.opened:
        Home.opened.pop().give_back()


class Secrets:
    """Random words. None of them is in a store by chance."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.all: dict[bytes, str] = {}
        """Each word, and where it was put."""

    def __call__(self, where: str) -> str:
        word = "".join(self._random.choices(_LETTERS, k=_LENGTH))
        self.all[word.encode()] = where
        return word

    def text(self, where: str, words: int = 12) -> str:
        """A text that zstd compresses: some of it is the same everywhere."""
        return " ".join(f"the next secret of them all is {self(where)}" for _ in range(words))


def found(secrets: Secrets, folder: Path) -> dict[str, int]:
    """How many secrets are in the raw files and their names, by where they had been put."""
    words: set[bytes] = set()
    for path in folder.rglob("*"):
        for text in [str(path).encode(), *(texts_of(path) if path.is_file() else [])]:
            for run in _WORD.findall(text):
                words.update(run[n : n + _LENGTH] for n in range(len(run) - _LENGTH + 1))
    left: dict[str, int] = {}
    for word, where in secrets.all.items():
        if word in words or word.lower() in words:  # the search index has it in lower case
            left[where] = left.get(where, 0) + 1
    return left


def texts_of(path: Path) -> Iterator[bytes]:
    """The bytes of a file, and what the zstd frames in them hold, be they in free pages or not."""
    data = path.read_bytes()
    yield data
    at = data.find(zstandard.FRAME_HEADER)
    while at >= 0:
        for chain in chains(data, at):
            with suppress(zstandard.ZstdError):
                yield zstandard.ZstdDecompressor().decompressobj().decompress(chain)
                break
        at = data.find(zstandard.FRAME_HEADER, at + 1)


def chains(data: bytes, at: int) -> Iterator[bytes]:
    """Candidates for the rest of a row: the bytes as they lie there, or with overflow pages.

    In SQLite a long row ends with the number of its first overflow page. Each overflow page begins
    with the number of the next one.
    """
    yield data[at : at + 65_536]
    pages = range(2, len(data) // _PAGE + 1)
    for cut in range(at + 8, at - at % _PAGE + _PAGE - 3):
        number = int.from_bytes(data[cut : cut + 4])
        if number in pages:
            chain, seen = data[at:cut], set[int]()
            while number in pages and number not in seen:
                seen.add(number)
                begin = (number - 1) * _PAGE
                chain += data[begin + 4 : begin + _PAGE]
                number = int.from_bytes(data[begin : begin + 4])
            yield chain


def fill(store: holdfast.Store, secret: Secrets, n: int) -> holdfast.Session:
    """A session with secrets in everything that can be said of it."""
    session = store.session(secret("session's name"), agent=secret("agent"))
    state: dict[str, Any] = {
        "messages": [{"role": "user", "content": secret.text("first message", 2)}],
        "big": secret.text("blob", 50),
        secret("key of a dict"): 1,
        "files": {f"file {i}": secret.text("dict", 1) + "." * 700 for i in range(10)},
    }
    session.save(
        state,
        label=secret("label"),
        tags=[secret("tag")],
        trigger=secret("trigger"),
        reason=secret("reason"),
        hint=secret("hint"),
        meta={"note": secret("meta")},
        key=secret("key"),
        pending=[ToolCall("1", "search", {"for": secret("pending call")})],
    )
    for i in range(n):
        session.append("messages", {"role": "user", "content": secret.text("message", 1 + i % 3)})
    session.label(None, secret("label, later"))
    session.label(None, secret("label, replaced"))
    session.tag(None, secret("tag, later"))
    session.undo()
    session.patch(set={"big": secret.text("blob, later", 40)}, drop=["files"])
    with session.run(name=secret("run")) as run:
        run.step(secret("step"), lambda: secret.text("result of a step"))
        call = ToolCall(secret("id of a call"), "buy", {"what": secret("argument")})
        run.tool(call, lambda what: secret.text(f"result of a tool {what and ''}"))
        run.wait_for("approval", prompt=secret("prompt"))
    session.answer("approval", secret("answer"))
    return session


def plain(store: holdfast.Store, name: str) -> holdfast.Session:
    """A session that stays."""
    session = store.session(name)
    session.save({"messages": [], "big": "x" * 3_000}, label="mine", tags=["t"], key="k")
    for i in range(30):
        session.append("messages", {"role": "user", "content": f"{i} nothing to hide " * 5})
    return session


KINDS = pytest.mark.parametrize("kind", ["sqlite", "files"])


@KINDS
def test_nothing_of_deleted_sessions_is_in_the_files_after_gc(kind: str, tmp_path: Path) -> None:
    home, secret = Home(kind, tmp_path), Secrets(1)
    sessions = []
    for n in range(12):
        sessions.append(fill(home.store, secret, 10 * n))
        plain(home.store, f"mine {n}")
    assert len(secret.all) > 1_000
    home.store.index()
    index = home.folder / f"{home.path.name}-search"
    held = index.read_bytes()
    assert sum(word.lower() in held for word in secret.all) > 500
    for session in sessions:
        session.delete()
    assert not home.store.gc().blocked
    assert found(secret, home.folder) == {}
    assert home.store.verify().ok
    home.store.backup(tmp_path / "copy")
    home.close()
    assert found(secret, tmp_path) == {}
    assert index.exists()


def live(home: Home, seed: int) -> dict[str, int]:
    """Sessions come and go among others; what is left of them in the end."""
    rng, secret = random.Random(seed), Secrets(seed)
    stay = [home.store.session(f"stay {n}") for n in range(20)]
    for session in stay:
        session.save({"messages": []})
    there: list[holdfast.Session] = []
    for n in range(400):
        what = rng.random()
        if what < 0.1 or not there:
            session = home.store.session(secret("name"), agent=secret("agent"))
            state = {"messages": [], "text": secret.text("inline", rng.choice([1, 3]))}
            session.save(state, label=secret("label"), key=secret("key"), trigger=secret("trigger"))
            there.append(session)
        elif what < 0.6:
            item = {"content": secret.text("message", rng.choice([1, 1, 2, 5, 30]))}
            fields: dict[str, Any] = {"label": secret("label"), "tags": [secret("tag")]}
            rng.choice(there).append("messages", item, key=secret("key"), **fields)
        elif what < 0.9:
            fields = {"label": f"l{n}", "key": f"k{n}", "tags": [f"t{n}"]} if n % 2 else {}
            rng.choice(stay).append("messages", "nothing " * rng.choice([1, 5, 50]), **fields)
        else:
            there.pop(rng.randrange(len(there))).delete()
        if n % 50 == 0:
            home.store.index()
    for session in there:
        session.delete()
    list(home.store.search("secret"))  # this changes the index as well
    home.store.gc()
    assert home.store.verify().ok
    return found(secret, home.folder)


SEEDS = [3, 42]


@KINDS
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_left_where_rows_moved_between_pages(
    kind: str, seed: int, tmp_path: Path
) -> None:
    home = Home(kind, tmp_path)
    assert live(home, seed) == {}


@pytest.mark.parametrize("guard", ["overwriting", "scrubbing"])
def test_sqlite_needs_both_guards(
    guard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if guard == "scrubbing":
        monkeypatch.setattr(sqlite_erase.Pages, "scrub", lambda *_: False)
    else:
        monkeypatch.setattr(schema, "connect", careless)
    assert any(live(Home("sqlite", tmp_path / str(seed)), seed) for seed in SEEDS)


def test_gc_removes_what_the_index_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_index, "forget", lambda _: True)
    assert any(live(Home("sqlite", tmp_path / str(seed)), seed) for seed in SEEDS)


def test_gc_says_that_the_index_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_index, "_PATIENCE_MS", 10)
    home, secret = Home("sqlite", tmp_path), Secrets(8)
    session = home.store.session("s")
    session.save({"text": secret("text")})
    home.store.index()
    session.delete()
    with closing(apsw.Connection(f"{home.path}-search")) as other:
        other.execute("BEGIN IMMEDIATE")
        assert home.store.gc().blocked
        assert found(secret, home.folder)
        other.execute("ROLLBACK")
    assert not home.store.gc().blocked
    assert found(secret, home.folder) == {}


def test_gc_removes_a_damaged_index(tmp_path: Path) -> None:
    home, secret = Home("sqlite", tmp_path), Secrets(9)
    home.store.session("s").save({"text": secret("text")})
    home.store.index()
    index = home.folder / f"{home.path.name}-search"
    index.write_bytes(b"torn" + index.read_bytes()[4:])
    home.store.session("s").delete()
    assert not home.store.gc().blocked
    assert not index.exists()
    assert found(secret, home.folder) == {}


def careless(*args: Any, connect: Any = schema.connect, **options: Any) -> apsw.Connection:
    """A connection that leaves deleted rows where they are, as in older versions."""
    connection: apsw.Connection = connect(*args, **options)
    connection.execute("PRAGMA secure_delete = 0")
    return connection


def test_a_page_that_looks_damaged_is_left_alone(tmp_path: Path) -> None:
    """Else one flipped bit in its header would cost the rows in it."""
    home = Home("sqlite", tmp_path)
    plain(home.store, "s")
    home.store.gc()
    home.close()
    whole = home.path.read_bytes()
    leaves = [at for at in range(_PAGE, len(whole), _PAGE) if whole[at] in (10, 13)]
    touched = 0
    for page in leaves:
        for bit in range(32):  # in the number of cells, and in the place of the first of them
            data = bytearray(whole)
            data[page + 3 + bit // 8] ^= 1 << bit % 8
            home.path.write_bytes(data)
            with closing(sqlite_erase.Pages(home.path, _PAGE)) as pages:
                pages.scrub(pages.groups())
            cells = int.from_bytes(whole[page + 5 : page + 7])
            after = home.path.read_bytes()
            assert after[page + cells : page + _PAGE] == data[page + cells : page + _PAGE]
            touched += after != data
    assert len(leaves) > 5
    assert touched < len(leaves)  # only where a damaged header may be a sound one


@KINDS
@pytest.mark.parametrize("erase", [True, False])
def test_nothing_of_deleted_checkpoints_is_in_the_files_after_gc(
    kind: str, erase: bool, tmp_path: Path
) -> None:
    """The session stays, and later saves append to the same streams."""
    home, secret, rng = Home(kind, tmp_path), Secrets(2), random.Random(2)
    for n in range(6):
        session = home.store.session(f"s{n}")
        files = {f"f{i}": "text " * 100 for i in range(rng.randrange(1, 30))}
        old = [{"content": "plain " * rng.randrange(100)} for _ in range(rng.randrange(1, 80))]
        session.save({"messages": old, "files": files, "raw": "x" * 20_000})
        for i in range(rng.randrange(2, 12)):
            fields: dict[str, Any] = {"label": secret("label"), "tags": [secret("tag")]}
            fields |= {"key": secret("key"), "trigger": secret("trigger")}
            fields["meta"] = {"note": secret("meta")}
            item = {"content": secret.text("message", rng.choice([1, 2, 20]))}
            session.append("messages", item, **fields if i % 2 else {})
            session.append("messages", {"content": "plain " * 10})
        session.patch(set={"files": {**files, secret("name of a file"): secret.text("file", 50)}})
        session.patch(set={"raw": "x" * 20_000 + secret.text("raw", 5), "blob": secret("x") * 300})
        with session.run() as run:
            for _ in range(3):
                run.step(secret("step"), lambda: secret.text("result of a step"))
        session.refresh()
        state = session.load()
        state |= {"messages": [m for m in state["messages"] if "secret" not in m["content"]]}
        session.save(state | {"files": files, "raw": "x" * 20_000, "blob": None})
        home.store.index()
        for checkpoint in [*session.history()][1:]:
            session.delete(checkpoint.id)
    home.store.gc(erase=erase)
    left = found(secret, home.folder)
    assert left.keys() <= (set() if erase else {"message", "result of a step"})
    for n in range(6):
        session = home.store.session(f"s{n}")
        for _ in range(70):
            session.append("messages", {"content": "plain"})
        assert "secret" not in str(session.load())
    assert home.store.verify().ok
    assert not any(home.store.gc(erase=erase)[:2])
    assert found(secret, home.folder).keys() <= left.keys()


@KINDS
def test_a_fork_keeps_what_it_shares_and_nothing_else(kind: str, tmp_path: Path) -> None:
    home, secret = Home(kind, tmp_path), Secrets(3)
    session = home.store.session(secret("name"))
    for n in range(30):
        session.append("messages", {"content": f"{n} is shared " * 5}, label=secret("label"))
    fork = session.fork("fork")
    further = fork.fork("further")
    home.store.session("fork").delete()
    for _ in range(30):
        session.append("messages", {"content": secret.text("message", 2)})
    home.store.index()
    assert session.delete().forks == ("further",)
    home.store.gc()
    assert found(secret, home.folder) == {}
    assert len(further.load()["messages"]) == 30
    assert home.reopened().verify().ok
    further = home.store.session("further")
    further.append("messages", {"content": "more"})
    assert home.store.session("further").delete().forks == ()
    home.store.gc()
    assert home.store.verify().ok


def test_delete_names_the_forks_of_a_checkpoint(tmp_path: Path) -> None:
    with holdfast.open("memory:") as store:
        session = store.session("s")
        first, second = session.save({"n": 1}), session.save({"n": 2})
        session.save({"n": 3})
        session.fork("of the first", first.id).fork("of the fork")
        session.fork("of the second", second.id)
        assert session.delete(second.id).forks == ("of the second",)
        assert session.delete(first.id).forks == ("of the first", "of the fork")
        assert session.operations()[-1].forks == ()


@KINDS
def test_erase_frees_what_is_held_back_by_its_age(kind: str, tmp_path: Path) -> None:
    home, secret = Home(kind, tmp_path), Secrets(4)
    for n in range(3):
        session = home.store.session(f"s{n}")
        for _ in range(5):
            session.save({"text": secret.text("state", 100)})
        session.save({"text": "plain"})
        home.store.index()
        at_once = dt.timedelta(microseconds=1)
        old = holdfast.Retention(session_ttl=at_once) if n else holdfast.Retention(max_age=at_once)
        session.prune(old)
    held = home.store.gc()
    assert held.held
    assert not held.sessions
    done = home.store.gc(erase=True)
    assert (done.held, done.sessions, done.blocked) == (0, 2, False)
    assert found(secret, home.folder) == {}
    assert home.store.session("s0").load() == {"text": "plain"}


def test_erase_clears_a_store_of_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "connect", careless)
        home = Home("sqlite", tmp_path)
        secret = Secrets(5)
        sessions = [fill(home.store, secret, 20) for _ in range(3)]
        plain(home.store, "mine")
        for session in sessions:
            session.delete()
        home.store.gc()
        assert found(secret, home.folder)
        home.close()
    store = home.reopened()
    assert not store.gc(erase=True).blocked
    assert found(secret, home.folder) == {}
    assert store.verify().ok
    assert len(store.session("mine").load()["messages"]) == 30


@KINDS
def test_gc_says_that_a_reader_is_in_the_way(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_folder, "_PATIENCE", 0.01)
    home, secret = Home(kind, tmp_path), Secrets(6)
    session = fill(home.store, secret, 5)
    reading, done = threading.Event(), threading.Event()

    def read() -> None:
        with home.another()._repository.reader() as reader:
            reader.sessions(None, 1)
            reading.set()
            done.wait(30)

    thread = threading.Thread(target=read)
    thread.start()
    reading.wait(30)
    session.delete()
    assert home.store.gc().blocked
    assert found(secret, home.folder)
    done.set()
    thread.join(30)
    assert not home.store.gc().blocked
    assert found(secret, home.folder) == {}


def test_gc_says_that_it_has_skipped_a_session(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process saves between the plan and the write, each time."""
    session = home.filled(3)
    session.delete("@~2")
    sweep = changes.sweep

    def outrun(backend: Any, sweeps: Any) -> list[bool]:
        home.another().session("s").append("log", 1)
        return sweep(backend, sweeps)

    monkeypatch.setattr(changes, "sweep", outrun)
    assert home.store.gc()[:2] == (0, 0)
    assert home.store.gc().blocked
    monkeypatch.undo()
    done = home.store.gc()
    assert (done.checkpoints, done.blocked) == (1, False)


def test_gc_says_that_it_cannot_read_a_session(home: Home) -> None:
    home.filled(3).delete("@~2")
    home.spoil_head(b"torn")
    assert home.reopened().gc().blocked


def test_erase_clears_the_tables_of_postgresql(tmp_path: Path) -> None:
    """This is about the files of tables and indexes, not about the server's log."""
    home, secret = Home("postgres", tmp_path), Secrets(7)
    sessions = [fill(home.store, secret, 20) for _ in range(3)]
    plain(home.store, "mine")
    for session in sessions:
        session.delete()
    for erase in (False, True):
        assert not home.store.gc(erase=erase).blocked
        tables = home.folder / f"tables {erase}"
        tables.mkdir()
        with postgres.admin(search=home.schema) as link:
            link.execute("CHECKPOINT")
            for table, data in link.execute(
                "SELECT relname, pg_read_binary_file(pg_relation_filepath(oid), true) "
                "FROM pg_class WHERE relkind IN ('r', 'i', 't') AND oid IN (SELECT unnest("
                "ARRAY[c.oid, c.reltoastrelid] || ARRAY(SELECT indexrelid FROM pg_index "
                "WHERE indrelid = c.oid)) FROM pg_class c "
                "WHERE relnamespace = quote_ident(current_schema())::regnamespace)"
            ):
                (tables / table).write_bytes(data or b"")
        assert bool(found(secret, tables)) is not erase
    assert home.store.verify().ok
