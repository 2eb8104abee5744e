"""The contract of stores: what users see, over any backend."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from holdfast.errors import (
    AmbiguousRevision,
    CheckpointNotFound,
    HeadMoved,
    InvalidRequest,
    KeyTaken,
    NotFound,
    NotSerializable,
    SessionExists,
    SessionNotFound,
)
from holdfast.model import ToolCall, Usage
from holdfast.testing.checks import equal, expect, raises

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.store import Store


class StoreContract:
    """The behaviour that users see, the same over every backend."""

    durable = True

    def open_store(self, folder: Path) -> Store:
        raise NotImplementedError

    def test_save_and_load(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            session = store.session("s")
            expect(not session.exists() and session.head is None and len(session) == 0)
            equal(session.step, 0)
            with raises(SessionNotFound):
                session.load()
            first = session.save({"n": 1})
            second = session.save({"n": 2, "big": "x" * 9000})
            equal(session.load(), {"n": 2, "big": "x" * 9000})
            equal(session.load(first.id), {"n": 1})
            equal((first.seq, first.step, second.seq, second.step), (1, 1, 2, 2))
            equal(second.parent, first.id)
            equal(first.parent, None)
            expect(first.id < second.id, "ids must sort by time")
            expect(session.exists() and session.head == second and len(session) == 2)
            expect(store.verify().ok)

    def test_any_state(self, tmp_path: Path) -> None:
        states: list[Any] = [None, 0, "", [], {}, [1, [2]], "x" * 10_000, b"\0" * 10_000, (1, 2)]
        with self.open_store(tmp_path) as store:
            session = store.session("s")
            for state in states:
                session.save(state)
                equal(session.load(), state)
                expect(type(session.load()) is type(state))
            equal(len(session), len(states))

    def test_fields(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            session = store.session("s", agent="planner")
            saved = session.save(
                {},
                label="plan ready",
                tags=["b", "a", "b"],
                trigger="manual",
                status="failed",
                reason="no budget",
                usage=Usage(1000, 200, cost=0.01, model="large"),
                pending=[ToolCall("c1", "search", {"q": [1]}, {"n": 1})],
                hint="ask first",
                meta={"user": "u1", "deep": {"x": (1,)}},
                key="ext-1",
            )
            for found in (saved, session.head, session.get("key:ext-1"), store.get(saved.id)):
                expect(found is not None)
                if found is None:
                    continue
                equal((found.label, set(found.tags)), ("plan ready", {"a", "b"}))
                equal(
                    (found.trigger, found.status, found.reason), ("manual", "failed", "no budget")
                )
                equal(
                    (found.usage, found.hint),
                    (Usage(1000, 200, cost=0.01, model="large"), "ask first"),
                )
                equal(found.pending, (ToolCall("c1", "search", {"q": [1]}, {"n": 1}),))
                equal(found.meta, {"user": "u1", "deep": {"x": (1,)}})
                equal((found.agent, found.key, found.session), ("planner", "ext-1", "s"))
                equal(found.created_at, saved.created_at)
                equal((found.hash, found.state_hash), (saved.hash, saved.state_hash))
            with raises(KeyTaken):
                session.save({}, key="ext-1")
            plain = session.save({})
            equal((plain.label, plain.tags, plain.meta, plain.key), (None, (), {}, None))
            equal(plain.status, "in_progress")

    def test_bad_requests_write_nothing(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            session: Any = store.session("s")
            session.save({"messages": [], "n": 1})
            bad: list[Any] = [
                lambda: session.save({"x": object()}),
                lambda: session.save({}, meta={"x": object()}),
                lambda: session.save({}, status="done"),
                lambda: session.save({}, tags="one"),
                lambda: session.save({}, label=""),
                lambda: session.save({}, colour="red"),
                lambda: session.save({}, usage=3),
                lambda: session.append("messages"),
                lambda: session.append("n", 1),
                lambda: session.append("messages", {1, 2}, object()),
                lambda: session.append(("messages", "x"), 1),
                lambda: session.append(3, 1),
                lambda: session.patch(drop=["nothing"]),
                lambda: session.patch(set={"a": 1}, drop=["a"]),
                lambda: session.patch(set={"n": 1, ("n", "x"): 2}),
                lambda: session.patch(append={"messages": "text"}),
                lambda: session.patch(set={("no", "such"): 1}),
                lambda: session.patch(set={"no.such": 1}),
                lambda: session.patch(set={"n": 1, "n.x": 2}),
                lambda: session.patch(drop=["messages.0"]),
                lambda: session.append("messages.0", 1),
                lambda: session.append("", 1),
                lambda: session.append("n[None]", 1),
                lambda: store.session(""),
                lambda: session.load("@x"),
            ]
            for call in bad:
                try:
                    call()
                except (InvalidRequest, NotSerializable, NotFound) as e:
                    expect(str(e))
                else:
                    raise AssertionError("a bad request was accepted")
            equal(len(session), 1)
            session.save({"messages": [], "n": 2})
            equal(session.load(), {"messages": [], "n": 2})
            expect(store.verify().ok)

    def test_append_and_patch(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            session = store.session("s")
            session.append("messages", {"role": "user"})
            session.append("messages", 1, 2, 3)
            session.patch(append={"messages": [4]}, set={"step": 7, "draft": "x"})
            session.patch(set={("inner"): {"log": [1]}}, drop=["draft"])
            last = session.append(("inner", "log"), 2)
            equal(last.operation, "append")
            wanted = {
                "messages": [{"role": "user"}, 1, 2, 3, 4],
                "step": 7,
                "inner": {"log": [1, 2]},
            }
            equal(session.load(), wanted)
            equal(list(session.load()), ["messages", "step", "inner"])
            other = store.session("t")
            equal(other.save(wanted).state_hash, last.state_hash)

    def test_dots_lead_into_dicts(self, tmp_path: Path) -> None:
        """As they do for blame(). A key with a dot in it is in brackets, or in a tuple."""
        with self.open_store(tmp_path) as store:
            session = store.session("s")
            plan = {"budget": 1, "items": [1], "none": None}
            state: dict[Any, Any] = {"plan": plan, "a.b": {"c": [1]}, "codes": {"007": 1, "3": [1]}}
            session.save(state | {"numbers": {3: [1], "4": 1}})
            session.patch(
                set={"plan.budget": 2, "plan['x.y']": 3, "numbers.4": 2},
                append={"['a.b'].c": [2], "plan.new": [1]},
                drop=["codes.007", ("plan", "none")],
            )
            session.append("plan.items", 2)
            session.append("codes.3", 2)
            session.append("numbers[3]", 2)
            last = session.append(("a.b", "c"), 3)
            wanted: dict[Any, Any] = {
                "plan": {"budget": 2, "items": [1, 2], "x.y": 3, "new": [1]},
                "a.b": {"c": [1, 2, 3]},
                "codes": {"3": [1, 2]},
                "numbers": {3: [1, 2], "4": 2},
            }
            equal(session.load(), wanted)
            equal(session.blame("['a.b'].c").id, last.id)
            equal(session.blame("plan.budget").step, 2)
            with raises(InvalidRequest, "['a.b']"):
                session.append("a.b", 4)

    def test_an_append_goes_to_the_same_list_when_it_is_quick(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            for key in ("a.b", "a[0]", ""):
                session = store.session(f"s {key}")
                for n in range(20):
                    session.append((key,), {"n": n, "text": "x" * 100})
                with raises(InvalidRequest, ""):
                    session.append(key, {"n": 20})
                equal(len(session.load()[key]), 20)

    def test_conflicts(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            one, two = store.session("s"), store.session("s")
            first = one.save({"n": 1})
            with raises(HeadMoved, first.id):
                two.save({"n": 2})
            expect(two.head == first, "reading the head shows it")
            with raises(HeadMoved):
                two.save({"n": 2})  # and does not change what is expected
            equal(two.load(), {"n": 1})
            two.save({"n": 2})
            with raises(HeadMoved):
                one.append("messages", 1)
            one.refresh()
            one.save({"n": 3})
            equal([c.step for c in one.history()], [3, 2, 1])

    def test_a_tag_by_another_handle_is_no_conflict(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            one, two = store.session("s"), store.session("s")
            one.save({"n": 1})
            two.refresh()
            two.tag("@", "seen")
            one.save({"n": 2})
            equal(one.load("tag:seen"), {"n": 1})

    def test_revisions(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            session = store.session("s")
            made = [session.save({"n": n}, label=f"l{n % 3}", tags=[f"t{n}"]) for n in range(6)]
            equal(session.load("@"), {"n": 5})
            equal(session.load("@~2"), {"n": 3})
            equal(session.load("l1"), {"n": 4})
            equal(session.load("label:l0"), {"n": 3})
            equal(session.load("tag:t2"), {"n": 2})
            equal(session.load("step:1"), {"n": 0})
            equal(session.load(made[2]), {"n": 2})
            equal(session.load(made[2].id[:20]), {"n": 2})
            equal(session.load(made[2].id.upper()), {"n": 2})
            equal(store.get(made[3].id).seq, 4)
            with raises(AmbiguousRevision):
                session.get("0")
            for missing in ("@~9", "label:no", "tag:no", "key:no", "step:99", "zzz", "no such"):
                with raises(CheckpointNotFound):
                    session.get(missing)
            session.rewind(made[1])
            for elsewhere in ("tag:t4", "label:l2", "l2"):  # not among the head's ancestors
                at = made[4] if elsewhere == "tag:t4" else made[5]
                with raises(CheckpointNotFound, at.id):
                    session.get(elsewhere)
            fork = session.fork("fork", made[0])
            with raises(CheckpointNotFound, made[5].id):
                fork.get("l2")
            session.delete(made[5])
            with raises(CheckpointNotFound, made[2].id):
                session.get("l2")
            equal(session.get(made[4].id).tags, ("t4",))

    def test_rewind_keeps_the_future(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            session = store.session("s")
            made = [session.append("log", n) for n in range(5)]
            equal(session.rewind(made[1]), made[1])
            equal(session.load(), {"log": [0, 1]})
            sibling = session.append("log", "other")
            equal(sibling.step, made[2].step)
            equal(sibling.parent, made[1].id)
            equal(session.load(), {"log": [0, 1, "other"]})
            equal(session.load(made[4].id), {"log": [0, 1, 2, 3, 4]})
            equal([c.id for c in session.tree()], [*(c.id for c in made), sibling.id])
            equal([c.id for c in session.history()], [sibling.id, made[1].id, made[0].id])
            equal([op.kind for op in session.operations()], ["rewind"])
            again = session.save({"log": ["sibling"]}, parent=made[3])
            equal((again.parent, again.step), (made[3].id, 5))
            equal(session.head, again)

    def test_forks(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            session = store.session("s", agent="a")
            made = [session.append("log", {"n": n, "text": "x" * 300}) for n in range(30)]
            fork = session.fork("t", at=made[9])
            equal(fork.load(), session.load(made[9]))
            equal((fork.head and fork.head.parent), made[9].id)
            equal((fork.head and fork.head.parent_session), "s")
            for n in range(12):
                fork.append("log", {"fork": n, "text": "y" * 300})
                session.append("log", {"main": n, "text": "z" * 300})
            equal(len(fork.load()["log"]), 22)
            equal(len(session.load()["log"]), 42)
            equal(len(list(fork.history())), 12 + 1 + 10)
            equal(fork.load(made[3].id), session.load(made[3].id))
            with raises(SessionExists):
                session.fork("t")
            with raises(InvalidRequest):
                fork.rewind(made[2].id)
            equal([i.name for i in store.sessions()], ["s", "t"])
            expect(store.verify().ok)

    def test_annotations(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            session = store.session("s")
            first = session.save({}, label="old", tags=["x"])
            session.save({"n": 2})
            equal(session.label(first, "new").label, "new")
            equal(set(session.tag(first, "y", "x").tags), {"x", "y"})
            equal(session.get("new"), first)
            with raises(CheckpointNotFound):
                session.get("label:old")
            hashes = {c.id: c.hash for c in session.tree()}
            equal(hashes[first.id], first.hash)
            expect(store.verify().ok)

    def test_diff_and_blame(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            session = store.session("s")
            state: dict[str, Any] = {"plan": {"budget": 10, "days": 3}, "messages": []}
            first = session.save(state)
            state["messages"] = [{"role": "user", "content": f"{n} " * 200} for n in range(20)]
            second = session.save(state)
            state["plan"]["budget"] = 20
            state["messages"][4]["content"] = "edited"
            third = session.save(state)
            del state["plan"]["days"]
            session.save(state)
            equal(session.diff(first, first), ())
            changes = session.diff(second, third)
            paths = {c.path: c for c in changes}
            equal(set(paths), {("plan", "budget"), ("messages", 4, "content")})
            equal(paths["plan", "budget"][2:], (10, 20))
            equal([c.kind for c in session.diff(third)], ["removed"])
            equal(len(session.diff(first, second)), 20)
            expect("messages[4]" in str(changes))
            equal(session.blame("plan.budget"), third)
            equal(session.blame("messages.4.content"), third)
            equal(session.blame(("messages", 3)), second)
            with raises(NotFound):
                session.blame("plan.no")

    def test_sessions(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            for name, agent in (("b", "x"), ("a", "y"), ("a_b", None), ("latest", "x")):
                store.session(name, agent=agent).save({"name": name}, status="completed")
            store.session("b").save({}, status="failed", reason="r")
            store.session("never saved")
            equal([i.name for i in store.sessions()], ["a", "a_b", "b", "latest"])
            equal([i.name for i in store.sessions(agent="x")], ["b", "latest"])
            equal([i.name for i in store.sessions(status="failed")], ["b"])
            equal([i.checkpoints for i in store.sessions()], [1, 1, 2, 1])

    def test_hashes_depend_on_the_value_alone(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            grown, whole = store.session("grown"), store.session("whole")
            messages = [{"role": "user", "content": f"{n} " * 150} for n in range(100)]
            for m in messages:
                last = grown.append("messages", m)
            equal(whole.save({"messages": messages}).state_hash, last.state_hash)
            swapped = whole.save({"messages": [messages[1], messages[0], *messages[2:]]})
            expect(swapped.state_hash != last.state_hash)
            expect(
                whole.save({"a": 1, "b": 2}).state_hash != whole.save({"b": 2, "a": 1}).state_hash
            )

    def test_threads_on_their_own_sessions(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            errors: list[BaseException] = []

            def work(name: str) -> None:
                try:
                    session = store.session(name)
                    for n in range(40):
                        session.append("log", {"n": n, "text": name * 100})
                    equal([m["n"] for m in session.load()["log"]], list(range(40)))
                except BaseException as e:  # noqa: BLE001 - carried to the main thread
                    errors.append(e)

            threads = [threading.Thread(target=work, args=(f"s{n}",)) for n in range(8)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            equal(errors, [])
            expect(store.verify().ok)

    def test_threads_on_one_handle(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as store:
            session = store.session("s")
            threads = [
                threading.Thread(
                    target=lambda n=n: [session.append("log", [n, i]) for i in range(20)]
                )
                for n in range(6)
            ]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            equal(len(session.load()["log"]), 120)
            equal([c.step for c in session.history()], list(range(120, 0, -1)))

    def test_reopening(self, tmp_path: Path) -> None:
        if not self.durable:
            return
        for n in range(12):
            with self.open_store(tmp_path) as store:
                session = store.session("s")
                equal(session.step, n * 20)
                for i in range(20):
                    session.append("log", {"n": n, "i": i, "text": "t" * 200})
        with self.open_store(tmp_path) as store:
            log = store.session("s").load()["log"]
            equal([(m["n"], m["i"]) for m in log], [(n, i) for n in range(12) for i in range(20)])
            expect(store.verify().ok)

    def test_a_closed_store_says_so(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path)
        session = store.session("s")
        session.save({})
        store.close()
        store.close()
        for call in (lambda: session.save({}), session.load, lambda: store.session("t")):
            with raises(InvalidRequest, "closed"):
                call()
