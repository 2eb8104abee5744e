"""The campaigns of the engine, on plain files."""

import functools
import os
import signal
import time

import pytest

import holdfast
from holdfast.storage import fs
from tests.mutants import files, maintenance

from . import (
    diskfull,
    failing_io,
    killing,
    powerloss,
    processes,
    racing,
    sweeping,
    workload,
)
from .failing_io import Fault

KILLS = int(os.environ.get("HOLDFAST_KILLS", "20_000"))
STATES = int(os.environ.get("HOLDFAST_STATES", "1_000_000"))
GIVES_UP_A_NAME = 116  # the sync of the line that deletes a session of the script "tidy"
TRIES = 40  # a mutant may be lucky, most of all on a busy machine
recorded = functools.cache(functools.partial(powerloss.record, backend="files"))


# -- kill -9 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("writers", [1, 4])
@pytest.mark.parametrize("weights", ["USUAL", "TIDYING"])
def test_killed_writers(rounds, writers, weights):
    kills = rounds(25, torture=KILLS // 8)
    weighed = getattr(workload, weights)
    report = killing.campaign(kills, writers=writers, weights=weighed, backend="files")
    print(report)
    assert report.acknowledged > kills // 4
    assert not report.failures, str(report)


def test_mutant_that_acknowledges_before_it_saves():
    told = "neither acknowledged nor attempted"
    report = killing.campaign(60, make=killing.AcknowledgesFirst, backend="files", until=told)
    print(report)
    assert any(told in found for found in report.failures)


# -- power loss ------------------------------------------------------------------------------------


@pytest.mark.tools("strace")
@pytest.mark.parametrize("script", ["short", "tidy"])
def test_the_model_ends_where_the_real_disk_does(script):
    recording = recorded(script)
    assert powerloss.replayed(recording) == recording.files


@pytest.mark.tools("strace")
@pytest.mark.usefixtures("parsed_once")
@pytest.mark.parametrize("directories", ["strict", "ordered"])
@pytest.mark.parametrize("script", ["short", "tidy"])
def test_power_loss(rounds, script, directories):
    states = rounds(110, torture=STATES // 8)
    report = powerloss.campaign(recorded(script), states=states, directories=directories)
    print(report)
    assert report.is_of(states)
    assert report.is_varied()
    assert not report.failures, str(report)


@pytest.mark.tools("strace")
@pytest.mark.usefixtures("parsed_once")
@pytest.mark.parametrize("n", [2, 9, 20, 35, 50])
def test_power_loss_after_a_failed_sync(rounds, n):
    """The data of a failed sync never reaches the disk, whatever later syncs say."""
    recording = recorded("short", inject=f"fsync:error=EIO:when={n}")
    report = powerloss.campaign(recording, states=rounds(50, torture=STATES // 100))
    print(report)
    assert report.mixed
    assert report.torn
    assert not report.failures, str(report)


def relayed(script: str, n: int, mutant: str = "") -> powerloss.Recording:
    """A writer that is killed at its n-th sync, and another that goes on."""
    return recorded(script, program=("relay", str(n), mutant))


@pytest.mark.tools("strace")
@pytest.mark.usefixtures("parsed_once")
@pytest.mark.parametrize("script", ["short", "tidy"])
def test_power_loss_after_a_kill(rounds, script):
    for n in rounds([5, 41], torture=range(1, 160)):
        report = powerloss.campaign(relayed(script, n), states=rounds(25, torture=STATES // 1000))
        print(n, report)
        assert report.mixed
        assert not report.failures, f"killed at sync {n}: {report}"


@pytest.mark.tools("strace")
@pytest.mark.usefixtures("parsed_once")
def test_power_loss_after_a_kill_in_giving_up_a_name():
    report = powerloss.campaign(relayed("tidy", GIVES_UP_A_NAME), states=100)
    assert not report.failures, str(report)


@pytest.mark.tools("strace")
@pytest.mark.usefixtures("parsed_once")
def test_mutant_that_takes_a_name_that_may_come_back():
    recording = relayed("tidy", GIVES_UP_A_NAME, "takes_names_for_granted")
    report = powerloss.campaign(recording, states=100, until="failures")
    print(report)
    assert report.failures


@pytest.mark.tools("strace")
@pytest.mark.usefixtures("parsed_once")
def test_mutant_that_trusts_what_a_killed_writer_has_left():
    relays = (relayed("short", n, "trusts_what_it_finds") for n in (22, 23))
    assert any(powerloss.campaign(relay, states=60, until="failures").failures for relay in relays)


@pytest.mark.tools("strace")
@pytest.mark.usefixtures("parsed_once")
@pytest.mark.parametrize("lacking", ["file", "directory"])
def test_mutant_that_does_not_sync(lacking):
    recording = getattr(recorded("short"), f"without_{lacking}_syncs")()
    # Most of what it loses is told as damage.
    report = powerloss.campaign(recording, states=200, until="lost")
    print(report)
    assert report.lost


@pytest.mark.tools("strace")
@pytest.mark.usefixtures("parsed_once")
@pytest.mark.parametrize(
    "mutant",
    [
        "renames_before_it_syncs",
        "logs_before_it_writes",
        "syncs_only_the_log",
        "frees_before_it_says_so",
    ],
)
def test_mutant_that_syncs_too_late(mutant):
    script = "short" if mutant.startswith("renames") else "tidy"  # which has items
    recording = recorded(script, program=("mutated_writer", mutant))
    report = powerloss.campaign(recording, states=150, until="failures")
    print(report)
    assert report.failures


# -- failing calls ---------------------------------------------------------------------------------


def named(faults):
    return [f"{call}-{error}" for call, error, *_ in faults]


# Which of the calls fail in `make test`: (first, stride) for once, and for from then on.
FAULTS = [
    ("pwrite64", "EIO", (1, 5), (1, 11)),
    ("pwrite64", "ENOSPC", (2, 11), (4, 11)),
    ("fsync", "EIO", (1, 5), (1, 11)),
    ("fsync", "ENOSPC", (2, 11), (4, 11)),
    ("rename", "EIO", (1, 2), (2, 2)),
    ("mkdir", "ENOSPC", (1, 2), (2, 2)),
    ("openat", "EMFILE", (1, 40), (11, 40)),
    ("openat", "EIO", (21, 40), (31, 40)),
]


@pytest.mark.tools("strace")
@pytest.mark.usefixtures("parsed_once")
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(("call", "error", "once", "then"), FAULTS, ids=named(FAULTS))
def test_an_error_or_a_true_acknowledgement(rounds, call, error, once, then, forever):
    first, stride = rounds(then if forever else once, torture=(1, 1))
    fault = Fault(call, error, forever)
    report = failing_io.campaign(fault, first=first, stride=stride, backend="files")
    print(report)
    assert report.injected
    assert not report.failures, str(report)


TIDYING_FAULTS = [
    ("pwrite64", "EIO", 1, 23),
    ("pwrite64", "ENOSPC", 12, 23),
    ("fsync", "EIO", 1, 17),
    ("fsync", "ENOSPC", 9, 17),
    ("rename", "EIO", 1, 4),
    ("unlink", "EIO", 1, 5),
    ("unlinkat", "EIO", 1, 1),
    ("rmdir", "EIO", 1, 1),
    ("openat", "EMFILE", 1, 230),
    ("getdents64", "EIO", 1, 60),
]


@pytest.mark.tools("strace")
@pytest.mark.usefixtures("parsed_once")
@pytest.mark.parametrize(
    ("call", "error", "first", "stride"), TIDYING_FAULTS, ids=named(TIDYING_FAULTS)
)
def test_the_same_while_gc_frees(rounds, call, error, first, stride):
    first, stride = rounds((first, stride), torture=(1, 1))
    fault = Fault(call, error)
    report = failing_io.campaign(fault, script="tidy", first=first, stride=stride, backend="files")
    print(report)
    assert report.injected
    assert not report.failures, str(report)


@pytest.mark.tools("strace")
@pytest.mark.parametrize("script", ["short", "tidy"])
@pytest.mark.parametrize("call", failing_io.INSIDE)
def test_the_calls_that_fail_inside_are_all_that_strace_sees(call, script):
    inside, outside = failing_io.counted(call, script, "files")
    assert inside == outside > 10


@pytest.mark.usefixtures("parsed_once")
def test_mutant_that_takes_a_failed_write_for_a_success():
    fault, mutant, told = Fault("fsync", "EIO"), failing_io.Swallowing, ("lost: ", "wrong state: ")
    report = failing_io.campaign(fault, make=mutant, stride=9, backend="files", until=told)
    print(report)
    assert any(what in found for found in report.failures for what in told)


# -- no room ---------------------------------------------------------------------------------------


def test_files_that_may_not_grow(rounds):
    sizes = range(2_048, 60_000, 512)[:: rounds(36, torture=1)]
    report = diskfull.limited(sizes, backend="files")
    print(report)
    assert report.refused
    assert not report.failures, str(report)


def test_a_full_file_system(rounds):
    if why := diskfull.why_not_mounted():
        pytest.skip(why)
    sizes = range(600_000, 2_000_000, 4_096)[:: rounds(120, torture=1)]
    report = diskfull.mounted(sizes, backend="files")
    print(report)
    assert report.refused
    assert not report.failures, str(report)


def test_mutant_that_takes_a_refused_write_for_a_success():
    report = diskfull.limited([20_000], diskfull.FillingBlindly, backend="files")
    print(report)
    assert any("wrong state: " in found for found in report.failures)


# -- many at once ----------------------------------------------------------------------------------


def test_on_one_session_exactly_one_wins_each_step(rounds):
    report = racing.race(racing.fair, saves=rounds(20, torture=500), backend="files")
    print(report)
    assert report.conflicts
    assert not report.failures, str(report)


def test_on_their_own_sessions_nobody_is_locked_out(rounds, tmp_path):
    saves = rounds(40, torture=3000)
    report = racing.race(racing.alone, saves=saves, folder=tmp_path, backend="files")
    print(report)
    assert report.saved == 8 * saves
    assert not report.failures, str(report)


def test_mutant_that_does_not_wait(tmp_path):
    report = racing.race(
        racing.alone, saves=40, folder=tmp_path, backend="files", sabotage=files.waits_for_nobody
    )
    print(report)
    assert any("Unavailable" in found for found in report.failures)


@pytest.mark.parametrize("mutant", [files.compares_no_heads, files.locks_nothing])
def test_mutant_that_lets_everybody_write(mutant):
    for _ in range(TRIES):
        report = racing.race(racing.fair, sabotage=mutant, backend="files")
        print(report)
        if report.failures:
            return
    pytest.fail("not caught")


def test_gc_beside_four_saving_processes(rounds):
    report = sweeping.race(rounds(120, torture=5000), backend="files")
    print(report)
    assert report.freed
    assert not report.failures, str(report)


GC_MUTANTS = [
    files.drops_shared_files,
    files.takes_what_is_being_saved,
    maintenance.frees_without_looking,
]


@pytest.mark.parametrize("mutant", GC_MUTANTS)
def test_mutant_of_gc_that_does_not_look_again(mutant):
    for seed in range(TRIES):
        report = sweeping.race(100, seed=seed, sabotage=mutant, backend="files")
        print(report)
        if report.failures:
            return
    pytest.fail("not caught")


# -- a holder of the lock --------------------------------------------------------------------------


def holder(url: str) -> processes.Child:
    """A process that has the lock of a session, and does not give it back."""

    def hold(out: int) -> None:
        log = fs.sync_handle

        def stop(handle: int) -> None:
            if os.readlink(f"/proc/self/fd/{handle}").endswith("log.jsonl"):
                fs.sync_handle = log  # once is enough
                os.write(out, b"locked\n")
                os.kill(os.getpid(), signal.SIGSTOP)
            log(handle)

        with holdfast.open(url) as store:
            session = store.session("held")
            fs.sync_handle = stop
            session.save({"by": "the holder"})

    child = processes.fork(hold)
    assert child.listen(10, until=7)
    os.waitpid(child.pid, os.WUNTRACED)  # else it could stop after it was told to go on
    return child


def test_a_stopped_process_that_has_the_lock_is_named(tmp_path):
    url = workload.url_of(tmp_path, "files")
    with holdfast.open(url, timeout=0.3) as store:
        store.session("held").save({"by": "us"})
        store.session("other").save({})
        child = holder(url)
        try:
            began = time.monotonic()
            with pytest.raises(holdfast.Unavailable, match=f"process {child.pid}"):
                store.session("held").save({"by": "us again"})
            assert 0.2 < time.monotonic() - began < 5
            store.session("other").save({"others": "go on"})
            assert store.session("other").load() == {"others": "go on"}
        finally:
            os.kill(child.pid, signal.SIGCONT)
            assert child.finish() == 0
        store.session("held").load()
        assert store.session("held").load() == {"by": "the holder"}
        assert store.verify(read_data=True).ok


def test_mutant_that_does_not_wait_for_a_stopped_process(tmp_path, monkeypatch):
    url = workload.url_of(tmp_path, "files")
    with holdfast.open(url, timeout=0.3) as store:
        store.session("held").save({"by": "us"})
        child = holder(url)
        files.locks_nothing(monkeypatch)
        try:
            store.session("held").save({"by": "us again"})  # nobody is named
        finally:
            os.kill(child.pid, signal.SIGCONT)
            child.finish()


def dead_holder(url: str) -> None:
    """Somebody has the lock of a session, and is killed."""
    with holdfast.open(url) as store:
        store.session("held").save({"by": "us"})
    child = holder(url)
    child.kill()
    assert child.finish() == -signal.SIGKILL


def test_a_killed_process_gives_the_lock_back_at_once(tmp_path):
    url = workload.url_of(tmp_path, "files")
    dead_holder(url)
    with holdfast.open(url) as store:
        began = time.monotonic()
        store.session("held").save({"by": "us again"})
        assert time.monotonic() - began < 2
        assert store.session("held").load() == {"by": "us again"}
        assert store.verify(read_data=True).ok


def test_mutant_whose_locks_outlive_their_holder(tmp_path, monkeypatch):
    url = workload.url_of(tmp_path, "files")
    holdfast.open(url).close()
    files.locks_outlive_their_holder(monkeypatch)
    dead_holder(url)
    with holdfast.open(url, timeout=0.3) as store, pytest.raises(holdfast.Unavailable):
        store.session("held").save({"by": "us again"})
