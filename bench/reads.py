"""Latency of load, fork, diff and history."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import ormsgpack

import holdfast

from .lab import Lab, Row
from .latency import WARM_UP
from .messages import Writer
from .peer import Peer, as_objects
from .raw import RawStore
from .stores import open_store, opened
from .timing import Arm, Ratio, duration, interleave


def load(lab: Lab) -> list[Row]:
    size, rounds = lab.pick(1_000, 100), lab.pick(60, 10)
    messages = list(Writer(30).conversation(size))
    state = {"messages": messages}
    path = lab.path("load")
    raw = RawStore(lab.path("load-raw"))
    row = raw.put_state(state)
    peer = Peer(lab.path("load-peer"))
    peer.put("loads", as_objects(messages))()
    peer.put("dicts", messages)()
    with opened(path) as store:
        session = store.session("loads")
        for message in messages:
            session.append("messages", message)
        _check_decodes(session, state)
        handles: list[holdfast.Store] = []

        def cold(_: int) -> Callable[[], object]:
            if handles:
                handles.pop().close()
            handles.append(open_store(path))
            return lambda: handles[0].session("loads").load()

        taken = interleave(
            rounds,
            warm=lambda _: session.load,
            blob=lambda _: lambda: raw.get_state(row),
            peer=lambda _: lambda: peer.get("loads"),
            dicts=lambda _: lambda: peer.get("dicts"),
            cold=cold,
        )
        handles.pop().close()
    raw.close()
    peer.close()
    floor, cold_floor = (Ratio.of(taken[arm], taken["blob"]) for arm in ("warm", "cold"))
    share, with_dicts = (Ratio.of(taken["warm"], taken[arm]) for arm in ("peer", "dicts"))
    measure = f"`load()` of {size:,} messages, digests checked"
    return [
        lab.row(
            measure,
            "≤ 1.5 × reading, hashing and decoding the same state from one zstd blob row",
            f"{floor} ({duration(taken['warm'])} / {duration(taken['blob'])}); "
            f"from a store just opened {cold_floor}",
            passed=floor.middle <= 1.5,
        ),
        lab.row(
            measure,
            "faster than the peer's get_tuple",
            f"{share} its time ({duration(taken['warm'])}; peer {duration(taken['peer'])}); "
            f"peer with plain dicts {with_dicts}, {duration(taken['dicts'])}",
            passed=share.middle < 1,
        ),
    ]


def _check_decodes(session: holdfast.Session, state: object) -> None:
    """Check that each load returns a new object: a change of one does not affect the next."""
    first = session.load()
    first["messages"][0]["content"] = "changed by the caller"
    first["messages"].pop()
    if session.load() != state:
        raise AssertionError("a load returned an object shared with another one")


def fork(lab: Lab) -> list[Row]:
    rounds = lab.pick(200, 20)
    raw = RawStore(lab.path("fork-raw"))
    with opened(lab.long.path) as long_store, opened(lab.path("fork-short")) as short_store:
        long, short = long_store.session("long"), short_store.session("short")
        fresh = Writer(31).conversation(1_000_000)
        for _ in range(100):
            short.append("messages", next(fresh))
        data = [ormsgpack.packb(next(fresh)) for _ in range(rounds)]
        for i in range(lab.pick(WARM_UP, 50)):
            raw.commit(data[i % rounds])
        taken = interleave(
            rounds,
            long=lambda i: lambda: long.fork(f"fork-{i}"),
            short=lambda i: lambda: short.fork(f"fork-{i}"),
            raw=lambda i: lambda: raw.commit(data[i]),
        )
        size = len(long)
    raw.close()
    cost, growth = Ratio.of(taken["long"], taken["raw"]), Ratio.of(taken["long"], taken["short"])
    return [
        lab.row(
            f"`fork` of a {size:,}-message session",
            "≤ 3 × a raw commit",
            f"{cost} ({duration(taken['long'])} / {duration(taken['raw'])})",
            passed=cost.middle <= 3,
        ),
        lab.row(
            f"`fork` of a {size:,}-message session",
            "independent of size (≤ 1.5 × the time at 100)",
            f"{growth} ({duration(taken['long'])} / {duration(taken['short'])})",
            passed=growth.middle <= 1.5,
        ),
    ]


def diff(lab: Lab) -> list[Row]:
    rounds = lab.pick(200, 20)
    with opened(lab.long.path) as long_store, opened(lab.path("diff-short")) as short_store:
        long, short = long_store.session("long"), short_store.session("short")
        for message in Writer(32).conversation(100):
            short.append("messages", message)
        size = len(long)
        newest = interleave(rounds, long=_diffs(long, 1), short=_diffs(short, 1))
        spread = interleave(rounds, long=_diffs(long, size), short=_diffs(short, 100))
    bar = "independent of length (≤ 1.5 × the time at 100)"
    rows = []
    for where, taken in (("the newest", newest), ("anywhere in it", spread)):
        ratio = Ratio.of(taken["long"], taken["short"])
        measured = f"{ratio} ({duration(taken['long'])} / {duration(taken['short'])})"
        measure = f"diff of two adjacent checkpoints of a {size:,}-message session, {where}"
        rows.append(lab.row(measure, bar, measured, passed=ratio.middle <= 1.5))
    return rows


def _diffs(session: holdfast.Session, among: int) -> Arm:
    """Return an arm that diffs two adjacent checkpoints, chosen among the newest ones."""
    ids = [checkpoint.id for checkpoint in session.history()][: among + 1]
    choice = random.Random(32)

    def arm(_: int) -> Callable[[], object]:
        at = choice.randrange(len(ids) - 1)
        return lambda: session.diff(ids[at + 1], ids[at])

    return arm


def history(lab: Lab) -> list[Row]:
    growth = lab.growth
    listed = growth.steps // 2
    peer, dict_peer = Peer(growth.peer_path), Peer(lab.path("history-peer-dicts"))
    messages = list(Writer(33).conversation(listed))
    for length in range(1, listed + 1):
        dict_peer.put("grown", messages[:length])()
    with opened(lab.long.path) as store:
        session = store.session("long")
        size = len(session)
        assert sum(1 for _ in session.history()) == size
        taken = interleave(
            lab.pick(2, 1),
            ours=lambda _: lambda: list(session.history()),
            peer=lambda _: lambda: peer.walk("grown", before=growth.peer_middle),
            dicts=lambda _: lambda: dict_peer.walk("grown"),
        )
    peer.close()
    dict_peer.close()
    ratio = Ratio.of(taken["peer"], taken["ours"], blocks=2)
    with_dicts = Ratio.of(taken["dicts"], taken["ours"], blocks=2)
    return [
        lab.row(
            f"`history()` of {size:,} checkpoints, metadata only",
            f"≤ 1/20 of the time of the peer's list at {listed:,}",
            f"1/{ratio.middle:.0f} ({duration(taken['ours'])}; peer {duration(taken['peer'])}); "
            f"peer with plain dicts 1/{with_dicts.middle:.0f}, {duration(taken['dicts'])}",
            passed=ratio.middle >= 20,
        )
    ]


def summaries(lab: Lab) -> list[Row]:
    """The newest 50 rows of a long session, with and without what each checkpoint changed."""
    rounds = lab.pick(60, 10)
    with opened(lab.long.path) as store:
        session = store.session("long")

        def page(of: Callable[..., Iterator[holdfast.Checkpoint]]) -> Callable[[], object]:
            return lambda: list(islice(of(), 50))

        tree = partial(session.tree, newest_first=True)
        taken = interleave(
            rounds,
            history=lambda _: page(session.history),
            told=lambda _: page(partial(session.history, summary=True)),
            tree=lambda _: page(tree),
            tree_told=lambda _: page(partial(tree, summary=True)),
        )
        size = len(session)
    return [
        lab.row(
            f"50 rows with summaries, of a session of {size:,} checkpoints",
            "≤ 3 × the rows without",
            f"tree {(tree_cost := Ratio.of(taken['tree_told'], taken['tree']))} "
            f"({duration(taken['tree_told'])}); history "
            f"{(cost := Ratio.of(taken['told'], taken['history']))} ({duration(taken['told'])})",
            passed=max(tree_cost.middle, cost.middle) <= 3,
        )
    ]
