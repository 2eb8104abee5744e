"""kill -9 at random moments."""

import os

import pytest

from . import killing

MANY = int(os.environ.get("HOLDFAST_KILLS", "20_000"))


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_nothing_acknowledged_is_lost(rounds, writers, seed):
    kills = rounds(40, torture=MANY // 4)
    report = killing.campaign(kills, seed=seed, writers=writers)
    print(report)
    assert report.acknowledged > kills
    assert not report.failures, str(report)


def test_mutant_that_acknowledges_before_it_saves():
    told = "neither acknowledged nor attempted"
    report = killing.campaign(60, make=killing.AcknowledgesFirst, until=told)
    print(report)
    assert any(told in found for found in report.failures)


def test_mutant_that_commits_in_two_transactions():
    report = killing.campaign(120, make=killing.ItemsLater, until="unreadable: ")
    print(report)
    assert any("unreadable: " in found for found in report.failures)
