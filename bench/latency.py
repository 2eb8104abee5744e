"""Latency of appends and full saves, against raw commits, encoding and the peer."""

from __future__ import annotations

from collections.abc import Callable

import ormsgpack

from .lab import Lab, Row
from .messages import Writer
from .peer import Peer, as_objects
from .raw import RawStore, Statements
from .stores import Durability, opened
from .timing import Ratio, added, duration, interleave

# Before timing, both sides commit until their write-ahead logs are reused from the start. Until
# then the log grows, which makes fsync slower. A store is rarely in that state.
WARM_UP = 500


def append_by_length(lab: Lab) -> list[Row]:
    rounds, sessions = lab.pick(400, 40), lab.pick(20, 2)
    with opened(lab.long.path) as long_store, opened(lab.path("short")) as short_store:
        long = long_store.session("long")
        short = [short_store.session(f"short-{i}") for i in range(sessions)]
        fresh = Writer(20).conversation(1_000_000)
        for session in short:
            for _ in range(100):
                session.append("messages", next(fresh))
        for _ in range(lab.pick(WARM_UP, 50)):
            long.append("messages", next(fresh))
        steps = len(long)

        def at_100(i: int) -> Callable[[], object]:
            session, message = short[i % sessions], next(fresh)
            return lambda: session.append("messages", message)

        def at_end(_: int) -> Callable[[], object]:
            message = next(fresh)
            return lambda: long.append("messages", message)

        taken = interleave(rounds, short=at_100, long=at_end)
    ratio = Ratio.of(taken["long"], taken["short"])
    return [
        lab.row(
            f"`append` p50 at step {steps:,} against step 100",
            "≤ 1.3 ×",
            f"{ratio} ({duration(taken['long'])} / {duration(taken['short'])})",
            passed=ratio.middle <= 1.3,
        )
    ]


def append_tiny(lab: Lab) -> list[Row]:
    """Measure appends of items of about 20 bytes, to a short list and to a long one."""
    rounds, counts = lab.pick(400, 40), (1_000, lab.pick(1_000_000, 20_000))
    with opened(lab.path("tiny")) as store:
        sessions = [store.session(f"of {count}") for count in counts]
        for session, count in zip(sessions, counts, strict=True):
            session.save({"log": [f"item {n:014d}" for n in range(count)]})
            for n in range(lab.pick(WARM_UP, 50)):
                session.append("log", f"more {n:014d}")
        short, long = (
            lambda i, to=session: lambda: to.append("log", f"next {i:014d}") for session in sessions
        )
        taken = interleave(rounds, short=short, long=long)
    ratio = Ratio.of(taken["long"], taken["short"])
    return [
        lab.row(
            f"`append` p50 of a 20-byte item to a list of {counts[1]:,} against {counts[0]:,}",
            "≤ 1.5 ×",
            f"{ratio} ({duration(taken['long'])} / {duration(taken['short'])})",
            passed=ratio.middle <= 1.5,
        )
    ]


def append_against_raw(lab: Lab) -> list[Row]:
    return [
        _append_against_raw(lab, "full", bar=1.3, rounds=lab.pick(500, 50)),
        _append_against_raw(lab, "normal", bar=4, rounds=lab.pick(2_000, 100)),
    ]


def _append_against_raw(lab: Lab, durability: Durability, bar: float, rounds: int) -> Row:
    raw = RawStore(lab.path(f"raw-{durability}"), durability)
    bare = Statements(lab.path(f"statements-{durability}"), durability)
    with opened(lab.path(f"append-{durability}"), durability) as store:
        session = store.session("appends")
        fresh = Writer(21).conversation(1_000_000)
        for _ in range(lab.pick(WARM_UP, 50)):
            message = next(fresh)
            session.append("messages", message)
            raw.commit(ormsgpack.packb(message))
            bare.of(message)()
        messages = [next(fresh) for _ in range(rounds)]

        def append(i: int) -> Callable[[], object]:
            message = messages[i]
            return lambda: session.append("messages", message)

        def commit(i: int) -> Callable[[], object]:
            data = ormsgpack.packb(messages[i])
            return lambda: raw.commit(data)

        taken = interleave(
            rounds, append=append, raw=commit, statements=lambda i: bare.of(messages[i])
        )
    raw.close()
    bare.close()
    ratio, least = (Ratio.of(taken[arm], taken["raw"]) for arm in ("append", "statements"))
    return lab.row(
        f"`append` p50 against a raw one-row commit of the same bytes, {durability.upper()}",
        f"≤ {bar} ×",
        f"{ratio} ({duration(taken['append'])} / {duration(taken['raw'])}); "
        f"its statements alone {least} ({duration(taken['statements'])})",
        passed=ratio.middle <= bar,
    )


def save_large(lab: Lab) -> list[Row]:
    size, rounds = lab.pick(1_000, 100), lab.pick(100, 20)
    peer, dict_peer = Peer(lab.path("save-peer")), Peer(lab.path("save-peer-dicts"))
    with opened(lab.path("save")) as store, opened(lab.path("save-append")) as append_store:
        saver, appender = store.session("saves"), append_store.session("appends")
        base = list(Writer(22).conversation(size))
        fresh = list(Writer(23).conversation(rounds + 50))
        saved = list(base)
        objects = as_objects(base)
        new_objects = as_objects(fresh)
        saver.save({"messages": saved})
        appender.save({"messages": base})
        for message in fresh[rounds:]:
            appender.append("messages", message)

        def save(i: int) -> Callable[[], object]:
            saved.append(fresh[i])
            return lambda: saver.save({"messages": saved})

        def encode(_: int) -> Callable[[], object]:
            state = {"messages": saved}
            return lambda: ormsgpack.packb(state)

        def append(i: int) -> Callable[[], object]:
            return lambda: appender.append("messages", fresh[i])

        def put(i: int) -> Callable[[], object]:
            objects.append(new_objects[i])
            return peer.put("saves", objects)

        def put_dicts(_: int) -> Callable[[], object]:
            return dict_peer.put("saves", saved)

        taken = interleave(
            rounds, save=save, encode=encode, append=append, peer=put, dicts=put_dicts
        )
    peer.close()
    dict_peer.close()
    floor = Ratio.of(taken["save"], added(taken["encode"], taken["append"]))
    faster, with_dicts = (Ratio.of(taken[arm], taken["save"]) for arm in ("peer", "dicts"))
    measure = f"`save` of a full {size:,}-message state, one message new"
    return [
        lab.row(
            measure,
            "≤ 1.4 × (encoding that state once in C + one `append`)",
            f"{floor} ({duration(taken['save'])} / "
            f"{duration(taken['encode'])} + {duration(taken['append'])})",
            passed=floor.middle <= 1.4,
        ),
        lab.row(
            measure,
            "≥ 5 × faster than the peer's put",
            f"{faster} faster ({duration(taken['save'])}; peer {duration(taken['peer'])}); "
            f"peer with plain dicts {with_dicts}, {duration(taken['dicts'])}",
            passed=faster.middle >= 5,
        ),
    ]


def save_small(lab: Lab) -> list[Row]:
    rounds = lab.pick(300, 30)
    peer, dict_peer = Peer(lab.path("small-peer")), Peer(lab.path("small-peer-dicts"))
    runs = [list(Writer(24 + i).conversation(10)) for i in range(rounds)]
    with opened(lab.path("small")) as store:
        # Each round uses a new conversation and times the save of its tenth message.
        def save(i: int) -> Callable[[], object]:
            session = store.session(f"small-{i}")
            session.save({"messages": runs[i][:9]})
            return lambda: session.save({"messages": runs[i]})

        def put(i: int) -> Callable[[], object]:
            objects = as_objects(runs[i])
            peer.put(f"small-{i}", objects[:9])()
            return peer.put(f"small-{i}", objects)

        def put_dicts(i: int) -> Callable[[], object]:
            dict_peer.put(f"small-{i}", runs[i][:9])()
            return dict_peer.put(f"small-{i}", runs[i])

        def first_save(i: int) -> Callable[[], object]:
            session = store.session(f"first-{i}")
            return lambda: session.save({"messages": runs[i]})

        taken = interleave(rounds, save=save, peer=put, dicts=put_dicts, first=first_save)
    peer.close()
    dict_peer.close()
    ratio, with_dicts = (Ratio.of(taken["save"], taken[arm]) for arm in ("peer", "dicts"))
    first = Ratio.of(taken["first"], taken["peer"])
    return [
        lab.row(
            "`save` of a 10-message state",
            "≤ 1.1 × the peer's put",
            f"{ratio} ({duration(taken['save'])}; peer {duration(taken['peer'])}); "
            f"as the first of a session {first}; peer with plain dicts {with_dicts}",
            passed=ratio.middle <= 1.1,
        )
    ]
