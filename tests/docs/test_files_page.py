"""docs/files.md: what it tells people to type gives what they saved."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import holdfast

PAGE = Path(__file__).parents[2] / "docs" / "files.md"
TEXT = "Zwölf Boxkämpfer jagen Eva quer über den großen Sylter Deich – für \u200bimmer 🚀. "


def state(n: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "n": i, "content": f"{i} {TEXT}"} for i in range(n * 9)],
        "files": {f"file {i}": f"{i * n} {TEXT * 30}" for i in range(40)},
        "plan": TEXT * 900 + str(n),
        "blob": "x" * 9000,
        "small": [1, 2.5, None, True, "two\nlines"],
    }


def odd(n: int) -> dict[str, Any]:
    """What many readers of JSON refuse: everywhere where it can lie."""
    lone = f"\\ {n} \ud800 \udc00 \ud83d"
    return {"small": lone, "list": [lone + TEXT] * 40, "blob": lone * 2000, "keys": {lone: 1}}


@pytest.mark.tools("jq")
@pytest.mark.parametrize("name", ["trip-42", "fork", "it's a trip"])
def test_jq_gives_the_state(tmp_path: Path, name: str) -> None:
    with holdfast.open(f"files:{tmp_path / 'agents'}") as store:
        session = store.session("trip-42")
        for n in range(1, 4):
            session.save(state(n))
        fork = session.fork("fork", "@~1")
        edited = state(2)
        edited["plan"] = edited["plan"].replace("Eva", "Adam", 3)
        edited["messages"][3]["content"] = "edited"
        fork.save(edited)
        fork.append("messages", {"role": "user", "content": "more"})
        store.session("odd").save(odd(1))
        store.session("odd").save(odd(2))
        another = store.session("it's a trip")
        for n in range(5, 2, -1):
            another.save(state(n))
        want = store.session(name).load()
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    script = blocks[-1].replace("trip-42", name).replace("/tmp/", f"{tmp_path}/")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path / "agents", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == want
    log = subprocess.run(
        ["bash", "-c", blocks[0]], cwd=tmp_path / "agents", capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert [json.loads(line)["checkpoint"][0] for line in log.stdout.splitlines()] == [1, 2, 3]
