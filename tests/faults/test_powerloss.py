"""No acknowledged save is lost when the power fails, at any moment of a real run."""

import functools
import os

import pytest

from . import powerloss

pytestmark = pytest.mark.tools("strace")

PARTS = 2
recorded = functools.cache(powerloss.record)
MANY = int(os.environ.get("HOLDFAST_STATES", "1_000_000"))


@pytest.mark.parametrize("script", ["short", "long", "tidy"])
def test_the_model_ends_where_the_real_disk_does(script):
    recording = recorded(script)
    assert powerloss.replayed(recording) == recording.files


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("directories", ["strict", "ordered"])
@pytest.mark.parametrize(("script", "usual"), [("short", 130), ("long", 40), ("tidy", 90)])
def test_nothing_acknowledged_is_lost(rounds, script, usual, directories, part):
    states = rounds(usual, torture=MANY // 12)
    report = powerloss.campaign(
        recorded(script), states=states, directories=directories, part=(part, PARTS)
    )
    print(report)
    assert report.is_of(states)
    assert report.is_varied()
    assert not report.failures, str(report)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12, 16, 20, 24, 28])
def test_nothing_acknowledged_is_lost_after_a_failed_sync(rounds, n):
    """The data of a failed sync never reaches the disk, whatever later syncs say."""
    recording = recorded("short", inject=f"fdatasync:error=EIO:when={n}")
    report = powerloss.campaign(recording, states=rounds(30, torture=MANY // 100))
    print(report)
    assert not report.failures, str(report)


@pytest.mark.parametrize("script", ["short", "long"])
def test_mutant_that_does_not_sync_each_commit(script):
    report = powerloss.campaign(recorded(script, durability="normal"), states=150, until="lost")
    print(report)
    assert report.lost


@pytest.mark.parametrize("script", ["short", "long"])
def test_mutant_that_does_not_sync_directories(script):
    report = powerloss.campaign(
        recorded(script).without_directory_syncs(), states=150, until="lost"
    )
    print(report)
    assert report.lost


def test_mutant_that_frees_in_two_transactions():
    report = powerloss.campaign(
        recorded("tidy", program=("mutated_writer", "sweeps_in_two_halves")),
        states=400,
        until="failures",
    )
    print(report)
    assert report.failures
