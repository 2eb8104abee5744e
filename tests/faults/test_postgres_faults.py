"""PostgreSQL: whatever dies, nothing that was acknowledged is lost, and nothing is made twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import psycopg
import pytest

import holdfast
from holdfast.storage import changes
from holdfast.storage.postgres import backend as postgres_backend
from holdfast.storage.postgres import connection, schema, writer
from holdfast.storage.postgres.backend import PostgresBackend
from tests.support import postgres as servers

from . import killing, postgres, processes, racing
from .ledger import complete_lines
from .postgres_proxy import CUTS, Proxy


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Server]:
    """One that may be killed. What is not yet written stays in memory for long."""
    own = servers.Server(*servers.QUICK, "wal_writer_delay=10s")
    yield own
    own.stop()


@pytest.fixture
def url(server: servers.Server) -> Iterator[str]:
    name = f"faults {os.urandom(4).hex()}"
    server.revive()
    yield f"{server.url}?schema={name.replace(' ', '%20')}"
    server.revive()
    with servers.admin(server.url) as link:
        link.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE'.encode())


def through(proxy: Proxy, server: servers.Server, url: str) -> str:
    return url.replace(f":{server.port}/", f":{proxy.port}/")


def lossy(
    server: servers.Server, url: str, steps: int, by: Proxy | None = None, **more: Any
) -> postgres.Report:
    with by or Proxy(server.port, every=40) as proxy:
        report = postgres.campaign(url, steps, through=through(proxy, server, url), **more)
    report.faults = sum(count for fate, count in proxy.fates.items() if fate)
    report.swallowed = proxy.swallowed
    print(report, dict(proxy.fates))
    return report


def caught(whats: tuple[str, ...], server: servers.Server, url: str, sabotage: Any) -> bool:
    """Whether one of some campaigns finds something: what a proxy loses is a matter of chance."""
    for seed in range(20):
        proxy = Proxy(server.port, every=12, seed=seed, fates=CUTS)
        report = lossy(server, url, 25, proxy, seed=seed * 100, sabotage=sabotage, seconds=20.0)
        if any(what in found for found in report.failures for what in whats):
            return True
    return False


# -- lost questions and answers --------------------------------------------------------------------


def test_every_unknown_outcome_is_resolved(server, url, rounds):
    timeout = rounds(6.0, torture=postgres.TIMEOUT)  # most of the time are answers that never come
    report = lossy(server, url, rounds(60, torture=20_000), timeout=timeout)
    assert report.faults > 10
    assert report.swallowed
    assert not report.failures, str(report)


def test_mutant_that_takes_an_echo_for_a_conflict(server, url):
    """After a cut it tries again, and believes what that says."""

    def sabotage() -> None:
        patch.object(writer, "landed", return_value=False).start()

    assert caught(("HeadMoved",), server, url, sabotage)


def test_mutant_that_takes_a_cut_for_a_success(server, url):
    def sabotage() -> None:
        real = PostgresBackend._attempt

        def attempt(self: Any, *args: Any) -> None:
            try:
                real(self, *args)
            except psycopg.Error as e:
                if not connection.is_cut(e):
                    raise

        patch.object(PostgresBackend, "_attempt", attempt).start()

    told = ("lost: ", "wrong state: ", "holds another state", "HeadMoved")
    assert caught(told, server, url, sabotage)


def test_mutant_that_gives_up_at_once(server, url):
    def sabotage() -> None:
        patch.object(postgres_backend, "is_cut", return_value=False).start()

    assert caught(("never acknowledged",), server, url, sabotage)


# -- dying backends and servers --------------------------------------------------------------------


def test_backends_are_terminated_during_saves(server, url, rounds):
    terminate = postgres.Terminator(server.url)
    often = postgres.often(terminate, least=0.0, most=0.06, times=rounds(120, torture=50_000))
    report = postgres.campaign(url, rounds(150, torture=20_000), meanwhile=often)
    terminate.close()
    report.faults = terminate.count
    print(report)
    assert report.faults > 10
    assert not report.failures, str(report)


def test_the_server_is_killed_during_commits(server, url, rounds):
    crash = postgres.Crash(server)
    steps = rounds(150, torture=5_000)
    often = postgres.often(crash, least=0.2, most=0.6, times=rounds(8, torture=2_000))
    report = postgres.campaign(url, steps, meanwhile=often, enough=lambda: crash.count >= 4)
    report.faults = crash.count
    print(report)
    assert report.faults >= 4
    assert not report.failures, str(report)


def test_mutant_that_does_not_wait_for_the_disk(server, url):
    """Acknowledged before it is in the log, it does not outlive the server."""
    crash = postgres.Crash(server)
    often = postgres.often(crash, least=0.2, most=0.4, times=40)
    report = postgres.campaign(url, 150, durability="normal", meanwhile=often, seconds=30.0)
    print(report)
    assert crash.count
    assert report.failures


def test_numbers_are_not_given_again_by_a_server_that_forgot(server, url):
    assert not given_twice(server, url)


def test_mutant_that_reserves_without_waiting_for_the_disk(server, url, monkeypatch):
    quick = connection._SETTINGS.replace("CASE WHEN %s", "CASE WHEN %s OR true")
    assert quick != connection._SETTINGS
    monkeypatch.setattr(connection, "_SETTINGS", quick)
    assert given_twice(server, url)


def given_twice(server: servers.Server, url: str) -> set[int]:
    """Numbers that two clients have, one of which was there before a crash of the server."""
    with holdfast.open(url, create=True) as before:
        server.checkpoint()
        first = before._repository.backend.reserve("stream", 100)
        server.kill()
        server.start()
        with holdfast.open(url) as after:
            second = after._repository.backend.reserve("stream", 100)
    return set(range(first, first + 100)) & set(range(second, second + 100))


def freed_by_a_gc_that_was_forgotten(server: servers.Server, url: str) -> bool:
    """Whether anything is damaged by a crash between the two halves of gc."""
    with holdfast.open(url, create=True, durability="normal") as store:
        session = store.session("s")
        session.save({"items": list(range(100))})
        lost = session.save({"other": [f"long {n}" for n in range(1_000)]})
        session.rewind("@~1")
        session.delete(lost)
        server.checkpoint()  # so far all is durable
        trim = changes.trim

        def crash_and_trim(*args: Any) -> int:
            server.kill()
            server.start()
            return trim(*args)

        with patch.object(changes, "trim", crash_and_trim):
            store.gc()
    with holdfast.open(url) as store:
        return not store.verify(read_data=True).ok


def test_gc_waits_for_the_disk_whatever_the_durability(server, url):
    assert not freed_by_a_gc_that_was_forgotten(server, url)


def test_mutant_that_frees_without_waiting_for_the_disk(server, url):
    with patch.object(connection.Target, "_replace", lambda self, **_: self):
        assert freed_by_a_gc_that_was_forgotten(server, url)


def test_a_parent_that_a_server_forgot_is_not_another_that_took_its_place(server, url):
    with holdfast.open(url, create=True, durability="normal") as store:
        session = store.session("s")
        session.save({"n": 0})
        server.checkpoint()
        forgotten = session.save({"n": 1, "items": [f"long {n}" for n in range(1_000)]})
        commit = store._repository.backend.commit

        def crash_and_commit(*args: Any) -> None:
            crashing.stop()
            server.kill()
            server.start()
            with holdfast.open(url) as other:
                assert other.session("s").save({"n": 2}).step == forgotten.step
            commit(*args)

        crashing = patch.object(store._repository.backend, "commit", crash_and_commit)
        crashing.start()
        with pytest.raises(holdfast.CheckpointNotFound):
            session.fork("fork")
        assert not store.session("fork").exists()


# -- many at once ----------------------------------------------------------------------------------


def created_at_once(url: str, sabotage: Any = None) -> list[str]:
    """Eight processes open a store that is not there yet, and save to it."""
    go, gate = os.pipe()

    def run(out: int) -> None:
        os.close(gate)
        if sabotage is not None:
            sabotage()
        os.read(go, 1)
        try:
            with holdfast.open(url, create=True) as store:
                saved = store.session(f"of {os.getpid()}").save({"n": 1})
            os.write(out, json.dumps({"saved": saved.id}).encode() + b"\n")
        except holdfast.HoldfastError as error:
            os.write(out, json.dumps({"what": str(error)}).encode() + b"\n")

    children = [processes.fork(run) for _ in range(8)]
    os.close(go)
    os.close(gate)
    lines = []
    for child in children:
        child.finish(60)
        lines += [json.loads(line) for line in complete_lines(bytes(child.said))]
    with holdfast.open(url) as store:
        there = {info.head.id for info in store.sessions() if info.head}
    wrong = [line["what"] for line in lines if "what" in line]
    return wrong + [f"lost: {x}" for x in {x["saved"] for x in lines if "saved" in x} - there]


def test_many_create_the_store_at_once(url):
    assert created_at_once(url) == []


def test_mutant_that_creates_without_a_lock(url):
    def sabotage() -> None:
        patch.object(schema, "lock").start()

    assert created_at_once(url, sabotage)


def raced(url: str, monkeypatch: pytest.MonkeyPatch, racer: Any, **more: Any) -> racing.Report:
    holdfast.open(url, create=True).close()
    monkeypatch.setattr(racing, "url_of", lambda *_: url)
    report = racing.race(racer, **more)
    print(report)
    return report


def test_on_one_session_exactly_one_wins_each_step(url, monkeypatch, rounds):
    report = raced(url, monkeypatch, racing.fair, saves=rounds(15, torture=300))
    assert report.conflicts
    assert not report.failures, str(report)


def test_on_their_own_sessions_nobody_is_locked_out(url, monkeypatch, rounds):
    report = raced(url, monkeypatch, racing.alone, saves=rounds(50, torture=5_000))
    assert report.saved == 8 * rounds(50, torture=5_000)
    assert not report.failures, str(report)


def test_mutant_that_does_not_compare_heads(url, monkeypatch):
    def sabotage() -> None:
        for name in ("_SWAP", "_SWAP_ON"):
            real = getattr(writer, name)
            loose = real.replace("AND body = %s", "AND (body = %s OR true)")
            assert loose != real
            patch.object(writer, name, loose).start()

    report = raced(url, monkeypatch, racing.fair, sabotage=sabotage)
    caught = ("exists already", "lost: ", "lost update: ")
    assert any(reason in found for reason in caught for found in report.failures), str(report)


# -- dying writers ---------------------------------------------------------------------------------


def killed(url: str, monkeypatch: pytest.MonkeyPatch, kills: int, **more: Any) -> killing.Report:
    holdfast.open(url, create=True).close()
    monkeypatch.setattr(killing, "url_of", lambda *_: url)
    monkeypatch.setattr(killing, "ROUNDS", 10_000)  # one store for all
    report = killing.campaign(kills, writers=2, **more)
    print(report)
    return report


def test_killed_writers(url, monkeypatch, rounds):
    kills = rounds(40, torture=1_000)
    report = killed(url, monkeypatch, kills)
    assert report.acknowledged > kills // 4
    assert not report.failures, str(report)


def test_mutant_that_acknowledges_before_it_saves(url, monkeypatch):
    told = "neither acknowledged nor attempted"
    report = killed(url, monkeypatch, 60, make=killing.AcknowledgesFirst, until=told)
    assert any(told in found for found in report.failures)
