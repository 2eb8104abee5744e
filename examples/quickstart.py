"""Save, kill, load, rewind and fork, with a store in a temporary folder."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import holdfast

BOLD, DIM, RESET = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
if "NO_COLOR" in os.environ:
    BOLD = DIM = RESET = ""


def section(title: str, why: str) -> None:
    print(f"\n{BOLD}{title}{RESET}\n{DIM}{why}{RESET}")


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def show(session: holdfast.Session) -> None:
    for c in session.history():
        print(f"  {c.id[:12]}  step {c.step:<4} {c.operation:<7} {c.label or ''}".rstrip())


def save(store: holdfast.Store) -> holdfast.Session:
    section("Save", "Every step is a checkpoint. Save the whole state, or say what changed.")
    trip = store.session("trip-42", agent="planner")
    state: dict[str, Any] = {
        "messages": [message("user", "Three days in Lisbon, please.")],
        "budget": 900,
    }
    trip.save(state, label="asked")
    state["messages"].append(message("assistant", "A hotel by the river, 850 in all."))
    state["budget"] = 850
    trip.save(state, label="offered")
    trip.append("messages", message("user", "Fine. And the flights?"))
    show(trip)
    print(f"What the second save changed:\n{trip.diff('asked', 'offered')}")
    return trip


def kill(store: holdfast.Store, path: Path) -> None:
    section("Kill", "Another process appends as fast as it can, until SIGKILL hits it mid-write.")
    child = subprocess.Popen(
        [sys.executable, __file__, "--write", str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    printed = [child.stdout.readline() for _ in range(100)]  # now it is writing
    child.kill()
    printed += child.stdout.read().splitlines(keepends=True)
    child.wait()
    acknowledged = len([line for line in printed if line.endswith("\n")])

    worker = store.session("worker")
    kept = len(worker.load()["messages"])
    how = "by SIGKILL" if child.returncode == -getattr(signal, "SIGKILL", 9) else "when killed"
    print(f"The writer ended {how} after {acknowledged} acknowledged checkpoints.")
    print(f"The store holds {kept} (one more may be on disk whose number was not printed).")
    if not acknowledged <= kept <= acknowledged + 1:
        sys.exit("an acknowledged checkpoint was lost: please report this")
    print(f"Every digest and hash: {store.verify(read_data=True)}")
    worker.append("messages", message("worker", "The work continues."))
    print(f"The next append made step {worker.step}: nothing to repair.")


def write(path: str) -> None:
    """Append without end; the child process runs this."""
    with holdfast.open(path) as store:
        worker = store.session("worker")
        worker.save({"messages": []})
        n = 0
        while True:
            n += 1
            worker.append("messages", message("worker", f"Item {n}. " + "Some more words. " * 20))
            print(n, flush=True)  # acknowledged: the checkpoint must not be lost any more


def load(store: holdfast.Store) -> None:
    section("Load", "In any process, at any time: the saved state, with the same types.")
    trip = store.session("trip-42")
    for m in trip.load()["messages"]:
        print(f"  {m['role']}: {m['content']}")
    print(f"Two steps back, the budget was {trip.load('@~2')['budget']}.")


def rewind(store: holdfast.Store) -> None:
    section("Rewind", "Move the head back and continue from there. Nothing is deleted.")
    trip = store.session("trip-42")
    trip.rewind("asked")
    trip.append("messages", message("assistant", "A room near the castle, 700 in all."))
    show(trip)
    print(f"The session's tree still has all {len(trip)} checkpoints.")


def fork(store: holdfast.Store) -> None:
    section("Fork", "A new session that shares all earlier data. No data is copied.")
    worker = store.session("worker")
    other = worker.fork("worker-2", at="@~1")
    other.append("messages", message("worker", "Another way."))
    size, added = other.get("@").size, sum(c.added for c in other.tree())
    print(f"The fork's state has {size:,} bytes; it and one more step added {added:,}.")
    for info in store.sessions():
        print(f"  {info.name:<10} {info.checkpoints:>5} checkpoints")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        path = Path(folder) / "agent.db"
        with holdfast.open(path) as store:
            save(store)
            kill(store, path)
            load(store)
            rewind(store)
            fork(store)
        print(f"\nAll of that, on disk: {path.stat().st_size:,} bytes.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(sys.argv[2])
    else:
        main()
