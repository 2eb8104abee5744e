"""What runs have begun and what they have returned outlives the failures of a disk."""

from __future__ import annotations

import functools
import os
import threading
from functools import partial

import pytest

from holdfast.storage.sqlite.backend import SqliteBackend
from tests.mutants import runs

from . import journal_faults, powerloss
from .disk import Write
from .failing_io import Fault
from .journal_faults import failures, is_word_of, losses

pytestmark = pytest.mark.tools("strace")

STATES = int(os.environ.get("HOLDFAST_STATES", "1_000_000"))
BACKENDS = ["sqlite", "files"]
recorded = functools.cache(journal_faults.record)


# -- power loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_model_ends_where_the_real_disk_does(backend):
    recording = recorded(backend)
    assert powerloss.replayed(recording) == recording.files


@pytest.mark.parametrize("directories", ["strict", "ordered"])
@pytest.mark.parametrize(("backend", "usual"), [("sqlite", 40), ("files", 20)])
def test_power_loss(rounds, backend, usual, directories):
    """What has begun is done or in doubt, what was returned comes back, and the runs can go on."""
    states = rounds(usual, torture=STATES // 40)
    report = losses(recorded(backend), states=states, directories=directories)
    print(report)
    assert report.is_of(states)
    assert not report.failures, str(report)


def test_power_loss_while_entries_are_written(rounds):
    """A line of which only some sectors have reached the disk is nobody's."""
    report = losses(recorded("files"), states=rounds(40, torture=STATES // 100), moments=is_entry)
    print(report)
    assert not report.failures, str(report)


def is_entry(event):
    return isinstance(event, Write) and b'"entries"' in event.data


@pytest.mark.torture
@pytest.mark.parametrize("backend", BACKENDS)
def test_power_loss_in_many_runs(backend):
    report = losses(recorded(backend, "long"), "long", states=STATES // 200)
    print(report)
    assert not report.failures, str(report)


@pytest.mark.parametrize(("backend", "call"), [("sqlite", "fdatasync"), ("files", "fsync")])
def test_power_loss_after_a_failed_sync(rounds, backend, call):
    """The data of a failed sync never reaches the disk, whatever later syncs say."""
    for n in rounds([22, 26], torture=range(1, 100)):
        recording = recorded(backend, inject=f"{call}:error=EIO:when={n}")
        report = losses(recording, states=rounds(20, torture=STATES // 1000))
        print(n, report)
        assert not report.failures, f"sync {n} failed: {report}"


def test_power_loss_after_a_kill(rounds):
    """What somebody else has noted, who was killed before it was synced, may not be relied on."""
    for n in rounds([24, 26], torture=range(1, 100)):
        recording = recorded("files", killed=n)
        report = losses(recording, states=rounds(12, torture=STATES // 1000), moments=first_words())
        print(n, report)
        assert not report.failures, f"killed at sync {n}: {report}"


def first_words():
    """The first promises of who goes on: later ones are like those of anybody else."""
    left = iter(range(6))
    return lambda event: is_word_of("second", event) and next(left, None) is not None


# -- failing calls ---------------------------------------------------------------------------------

FAULTS = [
    (79, "sqlite", Fault("pwrite64", "EIO")),
    (101, "sqlite", Fault("pwrite64", "ENOSPC", forever=True)),
    (19, "sqlite", Fault("fdatasync", "EIO")),
    (23, "sqlite", Fault("fdatasync", "EIO", forever=True)),
    (53, "files", Fault("pwrite64", "EIO")),
    (61, "files", Fault("pwrite64", "ENOSPC", forever=True)),
    (23, "files", Fault("fsync", "EIO")),
    (41, "files", Fault("fsync", "EIO", forever=True)),
    (11, "files", Fault("rename", "EIO")),
]


@pytest.mark.parametrize(
    ("stride", "backend", "fault"), FAULTS, ids=[f"{each[1]} {each[2].at(1)}" for each in FAULTS]
)
def test_an_error_or_a_true_acknowledgement(rounds, stride, backend, fault):
    """And the runs can be resumed."""
    report = failures(fault, backend, places=range(1, 10_000, rounds(stride, torture=1)))
    print(report)
    assert report.errors
    assert not report.failures, str(report)


# -- mutants ---------------------------------------------------------------------------------------


def test_mutant_that_does_not_sync_each_commit():
    report = losses(recorded("sqlite", durability="normal"), states=40, until="lost")
    print(report)
    assert report.lost


@pytest.mark.parametrize(
    "mutant", [runs.syncs_no_entries, runs.syncs_no_ends, runs.notes_beginnings_late]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mutant_that_promises_too_early(backend, mutant):
    recording = recorded(backend, mutant=mutant.name)
    report = losses(recording, states=24, moments=partial(is_word_of, "first"), until="lost")
    print(report)
    assert report.lost


@pytest.mark.parametrize(("backend", "call"), [("sqlite", "fdatasync"), ("files", "fsync")])
def test_mutant_that_takes_a_failed_write_for_a_success(backend, call):
    mutant = runs.takes_failures_for_success
    report = failures(Fault(call, "EIO"), backend, places=range(20, 30, 2), mutant=mutant)
    print(report)
    assert any("lost: " in found for found in report.failures)


def test_the_mutants_without_syncs_wait_for_other_writers(tmp_path):
    """The thread that renews leases writes at any moment."""
    backend = SqliteBackend(tmp_path / "store.db")

    def hastily() -> None:
        with runs.unsynced(backend):
            pass

    mutant = threading.Thread(target=hastily)
    with backend._transaction() as connection:
        connection.execute("BEGIN IMMEDIATE")
        mutant.start()
        mutant.join(0.2)
        assert connection.in_transaction
        connection.execute("COMMIT")
    mutant.join()
    backend.close()
