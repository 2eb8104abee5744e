"""PostgreSQL: a save against a raw insert, many workers against pgbench, and against the peer.

All measures use a temporary server on this machine, with all settings for crash safety on. Each
worker appends to a separate session as fast as it can. The workers are threads of one process with
one store, or processes with one store each. pgbench inserts rows of the same length as an append,
with the same number of clients. It also sends the statement of an append: this is the most that
the server makes of it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from tests.support.postgres import Server, programs

import holdfast
from holdfast.format.item_streams import RowWrite
from holdfast.storage.changes import Change
from holdfast.storage.postgres.writer import Statement
from holdfast.storage.rows import CheckpointRef, CheckpointRow

from .lab import Lab, Row
from .messages import Message, Writer, corpus
from .report import table
from .timing import Ratio, duration, interleave, number

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORKERS = (1, 8, 32, 64)
_SIZE = 1_000
"""Bytes of a message."""


@contextmanager
def server() -> Iterator[str]:
    """Start a temporary server and yield its address."""
    own = Server("max_wal_size=4GB", "shared_buffers=256MB", "autovacuum=on")
    try:
        yield own.url
    finally:
        own.stop()


def _open(url: str, schema: str, **options: Any) -> holdfast.Store:
    return holdfast.open(url, schema=schema, create=True, **options)


def append_against_raw(lab: Lab) -> list[Row]:
    """Measure saves at step 1 000 of a session, against an insert of one row of the same length.

    The limit concerns the one statement of an incremental save (an append). A save of all messages
    is listed too. It sends the same statement, after it has encoded and compared all messages.
    """
    before, rounds = lab.pick((1_000, 1_000), (100, 100))
    messages = list(Writer(1).conversation(before + rounds, _SIZE))
    with server() as url, _open(url, "append") as store, psycopg.connect(url) as raw:
        session = store.session("s")
        for message in messages[:before]:
            session.append("messages", message)
        whole = store.session("whole")
        state = {"messages": messages[:before]}
        whole.save(state)
        raw.autocommit = True
        raw.execute("CREATE TABLE raw (n bigint PRIMARY KEY, body bytea NOT NULL)")
        insert = "INSERT INTO raw VALUES (%s, %s)"
        for n in range(20):
            raw.execute(insert, (-n, b"warm"), prepare=True)
        bodies = [repr(m).encode() for m in messages]

        def append(i: int) -> Callable[[], object]:
            return lambda: session.append("messages", messages[before + i])

        def put(i: int) -> Callable[[], object]:
            return lambda: raw.execute(insert, (i + 1, bodies[i]), prepare=True)

        def save(i: int) -> Callable[[], object]:
            state["messages"].append(messages[before + i])
            return lambda: whole.save(state)

        taken = interleave(rounds, append=append, raw=put)
        full = interleave(rounds // 5, save=save, raw=lambda i: put(rounds + i))
    ratio = Ratio.of(taken["append"], taken["raw"])
    return [
        lab.row(
            "PostgreSQL: the one statement of an incremental save (`append`) at step 1 000, p50, "
            "against one raw single-row INSERT",
            "≤ 1.6 ×",
            f"{ratio}: {duration(taken['append'])} against {duration(taken['raw'])}; a `save` of "
            f"all messages, one of them new, {Ratio.of(full['save'], full['raw'])}: "
            f"{duration(full['save'])}, most of which encodes and compares them",
            passed=ratio.middle <= 1.6,
        )
    ]


def _append_for(store: holdfast.Store, worker: int, seconds: float, gate: Any) -> list[float]:
    """Return the duration of each append. The workers start together."""
    messages = list(Writer(worker).conversation(200, _SIZE))
    session = store.session(f"{worker} {os.urandom(4).hex()}")
    for message in messages[:20]:
        session.append("messages", message)
    gate.wait()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        session.append("messages", messages[len(taken) % 200])
        taken.append(time.perf_counter() - start)
    return taken


def _in_threads(url: str, workers: int, seconds: float) -> list[float]:
    """Run the workers as threads of one process, with one store and a session each."""
    gate = threading.Barrier(workers)
    with _open(url, "workers") as store, ThreadPoolExecutor(workers) as pool:
        each = [pool.submit(_append_for, store, n, seconds, gate) for n in range(workers)]
        return [t for done in each for t in done.result()]


def _in_processes(url: str, workers: int, seconds: float) -> list[float]:
    """Run the workers as processes, each with a store, a session and one connection that saves."""
    context = multiprocessing.get_context("fork")
    gate, out = context.Barrier(workers), context.Queue()

    def work(n: int) -> None:
        with _open(url, "workers", pool_size=1) as store:
            out.put(_append_for(store, n, seconds, gate))

    children = [context.Process(target=work, args=(n,)) for n in range(workers)]
    for child in children:
        child.start()
    series = [out.get() for _ in children]
    for child in children:
        child.join()
    return [t for each in series for t in each]


def _pgbench(url: str, workers: int, seconds: float, script: Path) -> float:
    """Return the transactions per second."""
    command = [
        str(programs() / "pgbench"), "--no-vacuum", "--protocol=prepared", f"--file={script}",
        f"--client={workers}", f"--jobs={min(workers, os.cpu_count() or 1)}",
        f"--time={seconds:.0f}", f"--define=n={time.monotonic_ns() // 1000 % 2**31}", url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"tps = ([0-9.]+)", done)
    assert found, done
    return float(found[1])


_KINDS: dict[str, Callable[[str, int, float], list[float]]] = {
    "threads": _in_threads,
    "processes": _in_processes,
}


def many_workers(lab: Lab) -> list[Row]:
    """Measure all counts and kinds in every round, so that a slow moment affects all of them."""
    seconds, rounds, counts = lab.pick((2.0, 3, _WORKERS), (1.0, 1, (1, 8)))
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    slowest: dict[tuple[str, int], list[float]] = defaultdict(list)
    corpus()  # built once for all children
    with server() as url, tempfile.TemporaryDirectory() as folder:
        script, own = _insert(url, Path(folder)), _append(url, Path(folder))
        inside = f"{url}?options=-csearch_path%3Dworkers"
        for _ in range(rounds):
            for count in counts:
                for kind, run in _KINDS.items():
                    taken = sorted(run(url, count, seconds))
                    rates[kind, count].append(len(taken) / seconds)
                    slowest[kind, count].append(taken[len(taken) * 99 // 100])
                rates["pgbench", count].append(_pgbench(url, count, seconds, script))
                rates["same statement", count].append(_pgbench(inside, count, seconds, own))
    return [
        _row(lab, kind, count, rates, slowest[kind, count]) for kind in _KINDS for count in counts
    ]


def _row(
    lab: Lab,
    kind: str,
    count: int,
    rates: dict[tuple[str, int], list[float]],
    slowest: list[float],
) -> Row:
    ours, raw = rates[kind, count], rates["pgbench", count]
    gain = Ratio.of(ours, rates[kind, 1])
    share = Ratio.of(ours, raw)
    same = Ratio.of(ours, rates["same statement", count])
    judged = count == 32
    return lab.row(
        f"PostgreSQL: appends of {count} workers ({kind})",
        "≥ 8 × one worker, or ≥ 70 % of pgbench" if judged else "–",
        f"{statistics.median(ours):,.0f}/s, p99 {duration(slowest)}; {gain} one; "
        f"{share.middle:.0%} of pgbench ({statistics.median(raw):,.0f}/s), {same.middle:.0%} of "
        "pgbench with the same statement",
        passed=(gain.middle >= 8 or share.middle >= 0.7) if judged else None,
    )


def _insert(url: str, folder: Path) -> Path:
    """Write a script for pgbench that inserts one row, as long as the rows of an append."""
    with _open(url, "workers") as store:
        session = store.session("size")
        added = [session.append("m", m).added for m in Writer(0).conversation(100, _SIZE)]
    with psycopg.connect(url, autocommit=True) as link:
        link.execute("CREATE TABLE bench (n bigserial PRIMARY KEY, body bytea NOT NULL)")
    script = folder / "insert.sql"
    body = os.urandom(int(statistics.mean(added))).hex()
    script.write_text(f"INSERT INTO bench (body) VALUES ('\\x{body}'::bytea);\n")
    return script


def _append(url: str, folder: Path) -> Path:
    """Write a script for pgbench that sends the statement of an append to a session per client."""
    session, head = 1 << 20, b"h" * 15
    rows = [RowWrite(1, 0, 0, b"row")]
    change = Change(session, head, head, None, CheckpointRow(1, b"id", b"body"), rows)
    change.parent = CheckpointRef(1, b"id")
    text = Statement(change.batch()).text
    body, item, record = (f"'\\x{part.hex()}'::bytea" for part in (head, b"i" * 700, b"c" * 150))
    place = ":pos::bigint"
    for value in (body, ":session::bigint", body, ":root::bigint", "int8send(:root::bigint)",
                  place, item, place, f"int8send({place})", record):  # fmt: skip
        text = text.replace("%s", value, 1)
    with psycopg.connect(url, autocommit=True) as link:
        link.execute("SET search_path = workers")
        numbers = f"FROM generate_series({session}, {session + max(_WORKERS)}) n"
        link.execute(f"INSERT INTO heads SELECT n, {body} {numbers}".encode())
        root = "n::bigint << 32, int8send(n::bigint << 32)"
        link.execute(f"INSERT INTO checkpoints SELECT {root}, {record} {numbers}".encode())
    script = folder / "append.sql"
    script.write_text(
        f"\\set n :n + 1\n\\set session {session} + :client_id\n"
        f"\\set root :session * 4294967296\n\\set pos :root + :n\n{' '.join(text.split())};\n"
    )
    return script


class Peer:
    """LangGraph's PostgreSQL saver, called as LangGraph's runtime calls it."""

    def __init__(self, url: str) -> None:
        from langgraph.checkpoint.base import empty_checkpoint
        from langgraph.checkpoint.postgres import PostgresSaver
        from psycopg.rows import dict_row

        self._empty = empty_checkpoint
        self.link = psycopg.connect(
            url,
            autocommit=True,
            prepare_threshold=0,
            row_factory=dict_row,
        )
        self._saver = PostgresSaver(self.link)
        self._saver.setup()
        self._version: Any = None
        self._step = -1
        self._config: dict[str, Any] = _config(None)

    def put(self, messages: list[object]) -> Callable[[], object]:
        from langgraph.checkpoint.base.id import uuid6

        self._version = version = self._saver.get_next_version(self._version, None)
        self._step += 1
        checkpoint = self._empty()
        checkpoint["id"] = str(uuid6(clock_seq=self._step))
        checkpoint["ts"] = datetime.now(UTC).isoformat()
        checkpoint["channel_values"] = {"messages": messages}
        checkpoint["channel_versions"] = {"messages": version}
        checkpoint["versions_seen"] = {"agent": {"messages": version}}
        parent, self._config = self._config, _config(checkpoint["id"])
        metadata: Any = {"source": "loop", "step": self._step, "parents": {}}
        return lambda: self._saver.put(parent, checkpoint, metadata, {"messages": version})  # type: ignore[arg-type]


def _config(checkpoint: str | None) -> dict[str, Any]:
    configurable = {"thread_id": "s", "checkpoint_ns": ""}
    return {"configurable": configurable | ({"checkpoint_id": checkpoint} if checkpoint else {})}


def _size(link: psycopg.Connection[Any], schema: str) -> int:
    """Return the bytes of all tables and indexes."""
    found = link.execute(
        "SELECT sum(pg_total_relation_size(c.oid))::bigint AS size FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND relkind = 'r'",
        (schema,),
    ).fetchone()
    assert found is not None
    return int(found["size"])


def against_the_peer(lab: Lab) -> list[Row]:
    """Save the full state of a growing conversation at every step, on both sides."""
    from langchain_core.messages import convert_to_messages

    steps = lab.pick(1_000, 100)
    messages: list[Message] = list(Writer(2).conversation(steps))
    objects: list[object] = list(convert_to_messages(messages))
    with server() as url, _open(url, "ours") as store:
        peer = Peer(url)
        session = store.session("s")

        def save(i: int) -> Callable[[], object]:
            return lambda: session.save({"messages": messages[: i + 1]})

        taken = interleave(steps, ours=save, peer=lambda i: peer.put(objects[: i + 1]))
        ours, theirs = _size(peer.link, "ours"), _size(peer.link, "public")
        peer.link.close()
    last = steps // 10
    ratio = Ratio.of(taken["peer"][-last:], taken["ours"][-last:])
    return [
        lab.row(
            f"PostgreSQL: {steps:,} full states, size against langgraph-checkpoint-postgres",
            "≥ 50 × smaller",
            f"{number(theirs / ours)} ×: {ours / 1e6:.1f} MB against {theirs / 1e6:.0f} MB",
            passed=theirs >= 50 * ours,
        ),
        lab.row(
            "PostgreSQL: a put at the end against the peer's",
            "≥ 10 × faster",
            f"{ratio}: {duration(taken['ours'][-last:])} against {duration(taken['peer'][-last:])}",
            passed=ratio.middle >= 10,
        ),
    ]


def memory_of_history(lab: Lab) -> list[Row]:
    """Check that the memory of history() does not grow with the number of checkpoints.

    A list of all of them is measured too, to prove that the measure can exceed the limit.
    """
    few, many = lab.pick((1_000, 10_000), (100, 1_000))
    with server() as url, _open(url, "history") as store:
        with holdfast.open("memory:") as made:
            session = made.session("s")
            saved = [session.append("log", n).id for n in range(many)]
            made.copy(store)
        session = store.session("s")
        _count(session, saved[few - 1])  # leave out what is allocated only once
        short = _peak(lambda: _count(session, saved[few - 1]))
        long = _peak(lambda: _count(session, saved[many - 1]))
        kept = _peak(lambda: list(session.history()))
    return [
        lab.row(
            f"PostgreSQL: memory of history() over {many:,} checkpoints against {few:,}",
            "≤ 2 MB more",
            f"{(long - short) / 1e6:.1f} MB more ({long / 1e6:.1f} MB against {short / 1e6:.1f}); "
            f"with all of them in a list, {(kept - short) / 1e6:.1f} MB more",
            passed=long - short <= 2e6,
        )
    ]


def _count(session: holdfast.Session, revision: str) -> int:
    return sum(1 for _ in session.history(revision))


def _peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


MEASURES: dict[str, Callable[[Lab], list[Row]]] = {
    "postgres-append": append_against_raw,
    "postgres-workers": many_workers,
    "postgres-peer": against_the_peer,
    "postgres-history": memory_of_history,
}


def main(*names: str) -> int:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        quick = "--quick" in names
        lab = Lab(Path(folder), quick=quick, full_peer=False, data=None)
        chosen = [name for name in names if name in MEASURES] or [*MEASURES]
        rows = [row for name in chosen for row in MEASURES[name](lab)]
    print(table(rows))
    return 1 if any(row.passed is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
