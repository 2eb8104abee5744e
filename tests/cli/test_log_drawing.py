"""The picture that `holdfast log` draws of a tree."""

from __future__ import annotations

import itertools
import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import Retention
from holdfast.cli.output import CUT, GONE, NODE, Lanes
from tests.support.terminal import foreseeable

Tree = dict[str, str | None]
"""Each checkpoint's parent, the newest first."""


def drawn(tree: Tree) -> list[str]:
    lanes = Lanes()
    return [row for id, parent in tree.items() for row in lanes.row(id, parent)]


# -- by hand ---------------------------------------------------------------------------------------


def test_a_line():
    assert drawn({"c": "b", "b": "a", "a": None}) == ["○", "○", "○"]


def test_two_branches():
    assert drawn({"d": "b", "c": "b", "b": "a", "a": None}) == ["○", "│ ○", "├─╯", "○", "○"]


def test_three_branches_from_one():
    assert drawn({"d": "a", "c": "a", "b": "a", "a": None}) == [
        "○",
        "│ ○",
        "│ │ ○",
        "├─┴─╯",
        "○",
    ]


def test_a_branch_that_crosses_another():
    """e and c come from a, d from b: a's lanes meet across that of b."""
    assert drawn({"e": "a", "d": "b", "c": "a", "b": "0", "a": "0", "0": None}) == [
        "○",
        "│ ○",
        "│ │ ○",
        "│ ○ │",
        "├─┼─╯",
        "○ │",
        "├─╯",
        "○",
    ]


def test_a_lane_that_has_ended_is_used_again():
    """d is a root between two branches of a, and leaves its lane to b."""
    assert drawn({"f": "a", "e": "d", "c": "a", "d": None, "b": "a", "a": None}) == [
        "○",
        "│ ○",
        "│ │ ○",
        "│ ○ │",
        "│ ○ │",
        "├─┴─╯",
        "○",
    ]


def test_below_and_cut():
    lanes = Lanes()
    assert lanes.row("d", "b") == [NODE]
    assert lanes.below() == GONE
    assert lanes.row("c", "b", "✗") == ["│ ✗"]
    assert lanes.below() == f"│ {GONE}"
    assert lanes.cut() == f"{CUT} {CUT}"
    assert lanes.row("b", None) == ["├─╯", NODE]
    assert lanes.below("╵") == "╵"
    assert lanes.cut() == ""


# -- any tree --------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Newest first, each with a parent among the older ones, or with none; some are not drawn."""
    count = draw(st.integers(1, 25))
    tree: Tree = {}
    for n in range(count, 0, -1):
        parent = draw(st.one_of(st.none(), st.integers(1, n - 1))) if n > 1 else None
        tree[str(n)] = None if parent is None else str(parent)
    return tree


class Picture:
    """The rows again, read as a person would."""

    def __init__(self, tree: Tree) -> None:
        self.rows: list[str] = []
        self.node: dict[str, tuple[int, int]] = {}
        """Row and column of each checkpoint."""
        lanes = Lanes()
        for id, parent in tree.items():
            self.rows += lanes.row(id, parent)
            assert self.rows[-1].count(NODE) == 1
            self.node[id] = len(self.rows) - 1, self.rows[-1].index(NODE)

    def at(self, row: int, column: int) -> str:
        return self.rows[row][column : column + 1] or " "

    def follow(self, row: int, column: int) -> tuple[int, int] | None:
        """Down from a node to the next one."""
        while True:
            row += 1
            if row == len(self.rows):
                return None
            sign = self.at(row, column)
            if sign in "╯┴":
                while self.at(row, column) != "├":
                    column -= 1
                    assert self.at(row, column) in "─┴┼├"
            elif sign == NODE:
                return row, column
            else:
                assert sign in "│┼├", f"the lane ends at {row}, {column}"


@given(trees())
def test_every_checkpoint_has_one_row(tree):
    picture = Picture(tree)
    assert len({row for row, _ in picture.node.values()}) == len(tree)
    assert sum(row.count(NODE) for row in picture.rows) == len(tree)


@given(trees())
def test_lanes_lead_from_child_to_parent(tree):
    picture = Picture(tree)
    for id, parent in tree.items():
        if parent is not None:
            assert picture.follow(*picture.node[id]) == picture.node[parent]


@given(trees())
def test_nothing_comes_from_nowhere(tree):
    """What is below a sign that goes down has one above it; a root has nothing below."""
    picture = Picture(tree)
    roots = {picture.node[id] for id, parent in tree.items() if parent is None}
    for n, (above, row) in enumerate(pairwise(picture.rows)):
        for column, sign in enumerate(row):
            up = above[column : column + 1] or " "
            if sign in "│├┼┴╯":
                assert up in f"│├┼{NODE}"
            if (n, column) in roots:
                assert sign in " ─" + NODE
            elif up in f"│├┼{NODE}":
                assert sign in f"│├┼┴╯{NODE}", "a lane goes on until it meets another"


@given(trees())
def test_a_joint_is_followed_by_its_checkpoint(tree):
    picture = Picture(tree)
    for row, below in pairwise(picture.rows):
        if "├" in row:
            assert (row.count("├"), row.count("╯")) == (1, 1)
            assert below[row.index("├")] == NODE
            assert row.index("├") < row.index("╯")


@given(trees(), st.data())
def test_a_picture_can_be_cut_anywhere(tree, data):
    """As many lanes are left open as there are parents to come, each child with its own."""
    shown = dict([*tree.items()][: data.draw(st.integers(1, len(tree)))])
    lanes = Lanes()
    for id, parent in shown.items():
        lanes.row(id, parent)
    waiting = [parent for parent in shown.values() if parent not in {None, *shown}]
    assert lanes.cut().count(CUT) == len(waiting)


@given(st.integers(2, 60))
def test_many_lanes(count):
    rows = drawn({str(n): "root" for n in range(count)} | {"root": None})
    assert rows[-2:] == ["├─" + "┴─" * (count - 2) + "╯", NODE]
    assert rows[count - 1] == "│ " * (count - 1) + NODE


# -- in a log --------------------------------------------------------------------------------------


def graph(text: str) -> list[str]:
    """What is left of the ids, without the session's title."""
    return [line.split("  ")[0].rstrip() for line in text.splitlines()[1:]]


def test_the_log_of_a_tree(terminal, monkeypatch):
    foreseeable(monkeypatch)
    with terminal.store() as store:
        s = store.session("s")
        for n in range(6):
            s.save({"n": n})
        s.rewind("step:3")
        s.save({"n": "b"})
        s.rewind("step:3")
        s.save({"n": "c"})
        s.save({"n": "d"})
        s.fork("t", at="step:2").save({"n": "t"})
    assert graph(terminal.good("log s").out) == [
        "◉", "○", "│ ○", "│ │ ○", "│ │ ○", "│ │ ○", "├─┴─╯", "○", "○", "○",
    ]  # fmt: skip
    assert graph(terminal.good("log t").out) == ["◉", "○", "╵"]
    assert "↳ from s at" in terminal.good("log t").out
    assert graph(terminal.good("log s -n 4").out) == ["◉", "○", "│ ○", "│ │ ○", "⋮ ⋮ ⋮"]
    assert "↳ t" in terminal.good("log s").out
    with terminal.store() as store:
        store.session("s").prune(Retention(keep_last=1))
    told = terminal.good("log s").out
    assert graph(told) == ["◉", "┆", "○", "┆"]
    assert "2 checkpoints pruned" in told
    assert len(terminal.good("log s -n 2 --json").lines) == 2


def test_the_limit_is_of_each_session(terminal, monkeypatch):
    ticks = itertools.count(time.time_ns(), 2_000_000)  # ids of one millisecond have no order
    monkeypatch.setattr(time, "time_ns", lambda: next(ticks))
    with terminal.store() as store:
        for name in ("a", "b", "c"):
            for n in range(3):
                store.session(name).save({"n": n})
    assert [row["session"] for row in terminal.good("log -n 1 --json").lines] == ["c"]
    assert [row["session"] for row in terminal.good("log -n 4 --json").lines] == [*"cccbbb"]
    assert len(terminal.good("log --all -n 1 --json").lines) == 9
    assert len(terminal.good("log -n 0 --json").lines) == 9


def test_a_long_log(terminal):
    with holdfast.open(terminal.path, durability="normal") as store:
        for n in range(40):
            store.session("s").save({"n": n})
    told = terminal.good("log s").out.splitlines()
    assert len(told) == 32
    assert told[-1] == "⋮  more; --limit 0 shows all"
    assert len(terminal.good("log s -n 0").out.splitlines()) == 41
