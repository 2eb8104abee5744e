"""What docs/format.md says is true: a reader written from it alone agrees in every checkpoint."""

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast import ids
from holdfast.backends import sqlite_file
from holdfast.codec import nodes, records, values
from tests.exact import same
from tests.format_reader import Bad, Store
from tests.golden.content import ESSAY, FILES, NESTED, TEXT, VALUES, message

GOLDEN = Path(__file__).parent / "golden"


def compare(path: Path) -> set[str]:
    """Read every checkpoint both ways; what parts of the format were met."""
    reader = Store(path)
    try:
        with holdfast.open(path, durability="normal", cache_bytes=0) as store:
            infos = {info.name: info for info in store.sessions()}
            assert reader.sessions().keys() == infos.keys()
            for name, number in reader.sessions().items():
                session = store.session(name)
                mine = list(reader.checkpoints(name))
                theirs = list(session.tree())
                assert len(mine) == len(theirs) == len(session)
                assert session.head is not None
                assert reader.head(number)[1] == session.head.seq
                assert reader.agent(number) == infos[name].agent
                assert [(n, k, d) for n, k, d in reader.operations(number)] == [
                    (o.number, o.kind, o.details) for o in session.ops()
                ]
                for a, b in zip(mine, theirs, strict=True):
                    check(reader, session, a, b)
    finally:
        reader.close()
    return reader.seen


def check(reader: Store, session: holdfast.Session, a: Any, b: holdfast.Checkpoint) -> None:
    value, state_hash = reader.state(a)
    assert same(value, session.load(b))
    assert state_hash.hex() == b.state_hash
    assert reader.record_hash(a, state_hash) == a.hash == bytes.fromhex(b.hash)
    about = (a.id, a.seq, a.step, a.operation, a.size, a.added, a.label, tuple(a.tags))
    assert about == (b.id, b.seq, b.step, b.operation, b.size, b.added, b.label, b.tags)
    fields = {"t": b.trigger, "r": b.reason, "a": b.agent, "h": b.hint, "k": b.key}
    for short, expected in fields.items():
        assert a.fields.get(short) == expected
    assert a.fields.get("s", "in_progress") == b.status
    assert a.fields.get("m", {}) == b.meta
    assert a.fields.get("o", a.session if a.parent else None) == b.parent_session
    pending = [[p.id, p.name, p.arguments, p.meta] for p in b.pending]
    assert a.fields.get("p", []) == pending
    assert a.fields.get("u", [0, 0.0]) == [b.usage.tokens, b.usage.cost]
    assert a.created_us == round(b.created_at.timestamp() * 1_000_000)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


@pytest.fixture
def store(path):
    with holdfast.open(path, durability="normal") as store:
        yield store


def test_conversations(store, path):
    talk = store.session("talk", agent="a")
    talk.save({"messages": [message(n) for n in range(100)], "n": 0}, label="start", tags=["x"])
    for n in range(100, 170):
        talk.append("messages", message(n), tags=[f"t{n}"] if n % 20 == 0 else [])
    state = talk.load()
    for at in (3, 50, 120, 7):  # edits, reordering, compaction, a sliding window
        state["messages"][at] = message(1000 + at)
        talk.save(state)
    state["messages"].reverse()
    talk.save(state, label="reversed")
    state["messages"][:90] = [{"role": "system", "content": "summary"}]
    talk.save(state)
    for n in range(5):
        state["messages"] = [*state["messages"][1:], message(n)]
        talk.save(state)
    assert {"rope 0", "extents", "edits", "pack"} <= compare(path)


def test_nested_ropes_blobs_and_references_inside_items(store, path):
    session = store.session("nested")
    state = copy.deepcopy(NESTED)
    session.save(state)
    session.append(("channels", "log"), [message(1), TEXT * 300])  # an item that holds a blob
    session.append(("channels", "log"), {"files": FILES, "list": [message(n) for n in range(40)]})
    state = session.load()
    state["channels"]["log"][-1]["list"].append(message(41))
    state["channels"]["log"][-1]["files"]["src/file3.py"] = "short"
    session.save(state)
    state["channels"]["log"].insert(4, [TEXT * 60] * 3)
    session.save(state)
    found = compare(path)
    assert {"rope 0", "rope 1", "nested rope", "blob", "refs"} <= found


def test_dicts_and_growing_text(store, path):
    session = store.session("work")
    state: dict[str, Any] = {"files": dict(FILES), "essay": ESSAY, "numbers": list(range(4000))}
    session.save(state)
    for n in range(12):
        state["files"][f"src/file{n}.py"] = f"# rewritten {n}\n{TEXT * 11}"
        state["essay"] += f"Line {n}. {TEXT}"
        state["numbers"][7 * n] = -n
        session.save(state)
    state["essay"] = state["essay"].replace("Chapter 20", "Chapter twenty")
    session.save(state)
    session.patch(drop=[("files", "src/file1.py")], set={("files", "new"): TEXT})
    session.save({"essay": state["essay"].encode(), "wide": {f"k{n}": n for n in range(3000)}})
    assert {"rope 1", "rope 2", "extents", "edits"} <= compare(path)


def test_values_fields_and_names(store, path):
    session = store.session("values")
    session.save(VALUES)
    session.save([VALUES, [VALUES] * 3])
    deep: Any = [TEXT * 12] * 4
    for _ in range(60):
        deep = [deep]
    session.save({"deep": deep, "more": {"deep": deep}})
    odds: list[Any] = [None, 7, "text", "\ud800", b"", (), {}, [], {1: 2}, {"a": {}}, TEXT * 200]
    for odd in odds:
        session.save(odd)
    for name in ("\ud800", "a/b", "x" * 9000, "😀"):
        store.session(name).save({"name": name}, meta={"tuple": (1, 2), "set": {3}}, key=name)
    every = store.session("fields", agent="planner")
    every.save(
        {},
        label="l",
        tags=["b", "a"],
        trigger="manual",
        status="failed",
        reason="why",
        usage=holdfast.Usage(10, 0.5),
        pending=[holdfast.ToolCall("1", "f", {"x": (1,)}, {"y": 2})],
        hint="go on",
        meta={"k": [1]},
        key="the key",
    )
    every.label("@", "another")
    every.tag("@", "c")
    compare(path)


def test_forks_rewinds_and_siblings(store, path):
    talk = store.session("talk", agent="a")
    talk.save({"messages": [message(n) for n in range(30)]}, label="base")
    talk.append("messages", message(30))
    fork = talk.fork("fork", at="base")
    fork.append("messages", message(99))
    grandchild = fork.fork("fork of a fork")
    grandchild.append("messages", message(100), message(101))
    talk.rewind("base")
    talk.append("messages", message(31))
    talk.save({"messages": []}, parent="base")
    for n in range(40):
        talk.append("few", message(n))
    assert "pack" in compare(path)


@pytest.mark.parametrize("seed", range(4))
def test_random_states(store, path, seed):
    rng = random.Random(seed)

    def thing(depth: int) -> Any:
        kind = rng.random()
        if depth > 3 or kind < 0.3:
            odd = [None, 1, -5, 2**80, 1.5, "x", TEXT, TEXT * 30, TEXT * 100, b"\xc1" * 50, (1, 2)]
            return rng.choice([*odd, {3, 4}, "\ud800", {1: TEXT}])
        size = rng.choice([0, 1, 3, 8])
        if kind < 0.65:
            return [thing(depth + 1) for _ in range(size)]
        return {f"k{n}": thing(depth + 1) for n in range(size)}

    session = store.session("s")
    state = {f"k{n}": thing(0) for n in range(rng.choice([3, 10, 70]))}
    for _ in range(8):
        state[rng.choice(list(state))] = thing(0)
        for value in state.values():
            if isinstance(value, list):
                value.append(thing(3))
        session.save(state)
    compare(path)


def test_the_reader_notices_damage(store, path):
    """Or its agreement would prove little: every row that a state needs is checked."""
    session = store.session("s")
    session.save({"messages": [message(n) for n in range(70)], "big": TEXT * 200}, tags=["t"])
    session.rewind("@")
    store.close()
    db = apsw.Connection(str(path))
    for table in ("sessions", "heads", "checkpoints", "items", "blobs", "marks", "operations"):
        before = db.execute(f"SELECT body FROM {table} LIMIT 1").get
        for at in (0, 8, len(before) - 1):
            body = before[:at] + bytes((before[at] ^ 1,)) + before[at + 1 :]
            db.execute(f"UPDATE {table} SET body = ? WHERE body = ?", (body, before))
            reader = Store(path)
            with pytest.raises(Bad):
                for name, number in reader.sessions().items():
                    reader.operations(number)
                    for checkpoint in reader.checkpoints(name):
                        reader.state(checkpoint)
            reader.close()
            db.execute(f"UPDATE {table} SET body = ? WHERE body = ?", (before, body))
    db.close()
    compare(path)


def test_the_page_has_the_numbers():
    """What is copied into the page, from the code that it is copied from."""
    page = (GOLDEN.parent.parent / "docs/format.md").read_text("utf-8")
    guide = (GOLDEN.parent.parent / "docs/guide.md").read_text("utf-8")
    for text in (page, guide):
        assert f"{values.MAX_DEPTH} levels" in text
        assert f"{values.MAX_VALUE >> 20} MiB" in text
    for sql in sqlite_file.SCHEMA.values():
        assert f"\n{sql};\n" in page
    assert f"version **{sqlite_file.FORMAT}**" in page
    assert f"{sqlite_file.APPLICATION_ID:#010X}".replace("X", "x") in page
    assert f"|*E*\\| > {nodes.LIST_FLAT} and \\|*E*\\| ≥ {nodes.LIST_ITEM} *n*" in page
    assert f"|*E*\\| > {nodes.DICT_FLAT} and \\|*E*\\| ≥ {nodes.DICT_ITEM} *n*" in page
    assert f"*n* ≤ {nodes.ROOT_KEYS}," in page
    for name, short in records.FIELDS.items():
        assert f"| `{short}` | {name} |" in page
    assert ids.ALPHABET in page


# -- golden stores: what an older version wrote always loads ---------------------------------------

TALK = [message(n) for n in range(68)]
EDITED = [*TALK[:40], TALK[40] | {"content": "edited"}, *TALK[41:]]
SUMMARY = {"role": "system", "content": "A summary."}
LOG = NESTED["channels"]["log"]  # type: ignore[index]
WORK = {"files": FILES, "essay": ESSAY, "nested": NESTED, "numbers": [*range(1600)]}
FILES_2 = FILES | {"src/file5.py": f"# new\n{TEXT * 12}"}
NESTED_2 = NESTED | {"channels": {"log": [*LOG, [message(99), TEXT * 40]]}}
EXPECTED: list[tuple[str, str, Any]] = [
    ("talk", "start", {"messages": TALK[:1], "budget": 900}),
    ("talk", "@", {"messages": TALK[:2], "budget": 1}),
    ("talk/other", "start", {"messages": TALK[:1], "budget": 900}),
    ("talk/other", "step:50", {"messages": TALK[:50], "budget": 900}),
    ("talk/other", "edited", {"messages": EDITED, "budget": 850}),
    ("talk/other", "@", {"messages": [*EDITED, message(68)], "budget": 850}),
    ("values", "@", VALUES),
    ("\ud800 work", "@~4", WORK),
    ("\ud800 work", "@~3", WORK | {"files": FILES_2}),
    ("\ud800 work", "@~2", WORK | {"files": FILES_2, "essay": f"{ESSAY}The end. {TEXT}"}),
    ("\ud800 work", "@", {
        "files": FILES_2, "essay": f"{ESSAY}The end. {TEXT}", "nested": NESTED_2,
    }),
    ("list", "@", [TEXT * 50, 1, [2]]),
    ("scalar", "@", 7),
]  # fmt: skip


@pytest.fixture(params=["v1"])
def golden(request, tmp_path):
    path = tmp_path / "golden.db"
    shutil.copy(GOLDEN / f"{request.param}.db", path)
    return path


def test_golden_store_loads(golden):
    with holdfast.open(golden, create=False) as store:
        for name, revision, state in EXPECTED:
            assert same(store.session(name).load(revision), state), (name, revision)
        talk = store.session("talk")
        by_label = {c.label: c for c in talk.tree() if c.label}
        compacted = {"messages": [SUMMARY, *EDITED[60:]], "budget": 850}
        assert same(talk.load(by_label["compacted"].id), compacted)
        assert [c.label for c in talk.history()] == [None, "start"]
        assert talk.get("start").tags == ("a", "kept", "ä")
        assert [o.kind for o in talk.ops()] == ["label", "rewind", "tag"]
        patched = talk.get("key:external-1")
        assert patched.step == 67
        assert (patched.trigger, patched.status, patched.reason) == ("manual", "halted", "asked to")
        assert patched.usage == holdfast.Usage(1200, 0.25)
        assert patched.pending == (holdfast.ToolCall("call-1", "search", {"q": "x"}, {"try": 1}),)
        assert (patched.hint, patched.agent) == ("go on", "golden")
        assert patched.meta == {"user": "u1", "when": (1, 2)}
        assert store.verify(read_data=True).ok


def test_golden_store_goes_on(golden):
    with holdfast.open(golden, create=False) as store:
        other = store.session("talk/other")
        other.append("messages", message(69))
        assert other.load()["messages"] == [*EDITED, message(68), message(69)]
        assert store.verify(read_data=True).ok


def test_golden_store_by_the_page_alone(golden):
    compare(golden)


def test_golden_stores_are_small():
    sizes = {p.name: p.stat().st_size for p in GOLDEN.glob("*.db")}
    assert sizes
    assert max(sizes.values()) < 100_000, sizes
