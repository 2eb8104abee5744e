"""An agent is killed during a tool call, and is started again.

It does not repeat calls that have returned, and asks the bank about the call in doubt. The model is
scripted, so this example needs no network.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import holdfast


def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    print("  the model is asked", flush=True)
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": "The room is reserved and paid."}
    calls = [
        {"id": "call_1", "function": {"name": "reserve", "arguments": '{"room": 7}'}},
        {"id": "call_2", "function": {"name": "pay", "arguments": '{"amount": 120}'}},
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


class Bank:
    """The outside world, where a payment is final. The bank stores the key of each payment."""

    def __init__(self, folder: Path, *, hangs: bool = False) -> None:
        self.book, self.hangs = folder / "bank.txt", hangs
        self.book.touch()

    def payments(self) -> list[list[str]]:
        return [line.split() for line in self.book.read_text().splitlines()]

    def pay(self, amount: int) -> str:
        with self.book.open("a") as book:
            print(holdfast.current_key(), amount, file=book)
        print(f"  paid {amount}", flush=True)
        if self.hangs:
            sys.stdin.read()  # the bank never answers, and the process is killed here
        return f"paid {amount}"

    def verify(self, key: str) -> holdfast.Done | None:
        """Return the result of the payment with this key if it was made, or else None."""
        found = [amount for known, amount in self.payments() if known == key]
        print(f"  was it paid? The bank says: {'yes' if found else 'no'}")
        return holdfast.Done(f"paid {found[0]}") if found else None


def reserve(room: int) -> str:
    print(f"  reserved room {room}", flush=True)
    return f"room {room} is reserved"


def work(folder: Path, *, hangs: bool = False) -> None:
    """The agent. The same code starts and resumes its run."""
    bank = Bank(folder, hangs=hangs)
    tools = {"reserve": (reserve, None), "pay": (bank.pay, bank.verify)}
    question = {"role": "user", "content": "Reserve room 7 and pay for it."}
    with holdfast.open(folder / "agent.db") as store:
        with store.session("trip").run(state={"messages": [question]}) as run:
            talk = run.state["messages"]
            for _ in run.turns():
                talk.append(run.step("model", model, talk))
                if "tool_calls" not in talk[-1]:
                    break
                for call in talk[-1]["tool_calls"]:
                    tool, verify = tools[call["function"]["name"]]
                    out = run.tool(call, tool, verify=verify)
                    talk.append({"role": "tool", "tool_call_id": call["id"], "content": out})
        print(f"  {store.session('trip').load()['messages'][-1]['content']}")


def main(folder: Path) -> None:
    print("The agent works, until it is killed")
    command = [sys.executable, __file__, str(folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        print(line, end="")
        if "paid" in line:
            child.kill()
    child.communicate()
    print(f"  (its exit status is {child.returncode})\nWhat it has left")
    with holdfast.open(folder / "agent.db") as store:
        for made in store.session("trip").tool_calls():
            print(f"  {made.name}: {made.result if made.success else 'begun, and in doubt'}")
    print("The same code again")
    work(folder)
    print(f"The bank has {len(Bank(folder).payments())} payment.")


if __name__ == "__main__":
    if sys.argv[1:]:
        work(Path(sys.argv[1]), hangs=True)
    else:
        with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
            main(Path(name))
