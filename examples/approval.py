"""An agent asks a person for approval, and its process ends.

Hours later a person answers, in another process. Then the agent is started again and continues.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import holdfast


def offer() -> int:
    print("agent: I have looked for an offer")
    return 850


def book(price: int) -> str:
    print(f"agent: I have booked for {price}")
    return "booking 4711"


def agent(path: Path) -> None:
    with holdfast.open(path) as store:
        with store.session("trip").run() as run:
            price = run.step("offer", offer)
            if run.wait_for("approval", prompt=f"Book it for {price}?"):  # halts here at first
                run.state["booked"] = run.step("book", book, price)
            else:
                run.state["booked"] = None
        head = store.session("trip").get()
        print(f"agent: {head.status}" + (f", {head.reason}" if head.reason else ""))


def start_agent(path: Path) -> None:
    """Run the agent in a separate process, and wait for its end."""
    done = subprocess.run(
        [sys.executable, __file__, path], stdout=subprocess.PIPE, text=True, check=True
    )
    print(done.stdout, end="")


def main(path: Path) -> None:
    start_agent(path)
    with holdfast.open(path) as store:
        [asked] = store.pending()
        print(f"person: {asked.session!r} asks {asked.arguments!r}. Yes.")
        store.session(asked.session).answer(asked.key, value=True)
    start_agent(path)
    with holdfast.open(path) as store:
        print(f"The state is {store.session('trip').load()}, and {len(store.pending())} wait.")


if __name__ == "__main__":
    if sys.argv[1:]:
        agent(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            main(Path(folder) / "agent.db")
