"""Writes a golden store: `python -m tests.golden.make tests/golden/v2.db`.

`v2.tar.xz` packs a store of plain files, `v2.jsonl` is an export.

Run once for each version of a format, when it is released. A golden store is never written again:
that today's code makes the same file proves nothing, that it reads an old one does.
"""

import sys
import tarfile
import tempfile
from pathlib import Path

import holdfast
from holdfast import ToolCall, Usage
from tests.golden.content import ESSAY, FILES, NESTED, TEXT, TINY, VALUES, message


def write(path: Path) -> None:
    assert not path.exists(), "a golden store is never written again"
    with tempfile.TemporaryDirectory() as folder:
        match "".join(path.suffixes):
            case ".db":
                make(str(path))
            case ".tar.xz":
                make(f"files:{folder}/files")
                with tarfile.open(path, "w:xz") as packed:
                    packed.add(f"{folder}/files", "files", filter=_anonymous)
            case ".jsonl":
                make(f"{folder}/store.db")
                with holdfast.open(f"{folder}/store.db") as store:
                    store.export(path)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    return info.replace(uid=0, gid=0, uname="", gname="", deep=False)


def make(address: str) -> None:
    with holdfast.open(address, create=True) as store:
        talk = store.session("talk", agent="golden")
        talk.save({"messages": [message(0)], "budget": 900}, label="start", tags=["a", "ä"])
        for n in range(1, 66):
            talk.append("messages", message(n))
        talk.patch(
            set={"budget": 850},
            append={"messages": [message(66), message(67)]},
            trigger="manual",
            status="halted",
            reason="asked to",
            usage=Usage(tokens=1200, cost=0.25),
            pending=[ToolCall("call-1", "search", {"q": "x"}, {"try": 1})],
            hint="go on",
            meta={"user": "u1", "when": (1, 2)},
            key="external-1",
        )
        state = talk.load()
        state["messages"][40]["content"] = "edited"
        talk.save(state)
        talk.label("@", "edited")
        state["messages"][:60] = [{"role": "system", "content": "A summary."}]
        talk.save(state, label="compacted")

        other = talk.fork("talk/other", at="edited")
        other.append("messages", message(68))
        talk.rewind("start")
        talk.save({"messages": [message(0), message(1)], "budget": 1})
        talk.tag("start", "kept")

        store.session("values").save(VALUES)

        work = store.session("\ud800 work")
        work.save({"files": FILES, "essay": ESSAY, "nested": NESTED, "numbers": [*range(1600)]})
        work.patch(set={("files", "src/file5.py"): f"# new\n{TEXT * 12}"})
        work.patch(set={"essay": f"{ESSAY}The end. {TEXT}"})
        work.append(("nested", "channels", "log"), [message(99), TEXT * 40])
        work.patch(drop=["numbers"])
        store.session("list").save([TEXT * 50, 1, [2]])
        store.session("scalar").save(7)
        tiny = store.session("tiny")
        tiny.save({"log": TINY[:-1]})
        tiny.append("log", TINY[-1])
        runs(store)
        deletions(store)


def runs(store: holdfast.Store) -> None:
    """One that is completed, and one of a child that waits, with a call that has failed."""
    with store.session("run").run(name="golden", state={"n": 0}) as run:
        for turn in run.turns(limit=2):
            run.state["n"] += run.step("add", lambda a, b: a + b, turn, 1)
            run.tool(
                {"id": f"call-{turn}", "name": "double", "input": {"n": turn}}, lambda n: 2 * n
            )
            run.add_usage(tokens=10)
    with store.session("run/child", parent="run").run(state={"n": 1}) as run:
        run.state["n"] = run.step("once", lambda: 7)
        run.step("skipped", lambda: None)
        try:
            run.step("bad", lambda: 1 // 0)
        except ZeroDivisionError:
            run.checkpoint()
        run.wait_for("approval", prompt={"price": 100})


def deletions(store: holdfast.Store) -> None:
    """A freed stretch, in a fork too, then what waits for gc: a checkpoint, a session; an undo."""
    pruned = store.session("pruned", agent="golden")
    for n in range(7):
        pruned.append("messages", message(n), label=f"l{n}", tags=["t"], trigger="tool_call")
    pruned.fork("pruned/fork", at="l3")
    for label in ("l1", "l2", "l3"):
        pruned.delete(label)
    store.gc()
    pruned.delete("l5")
    pruned.append("messages", message(7), status="completed", key="undone")
    pruned.undo()

    undone = store.session("undone")
    undone.save({"n": 1})
    undone.undo()
    deleted = store.session("deleted", agent="other")
    deleted.save({"x": TEXT * 20}, label="gone")
    deleted.delete()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
