"""gc is killed, and runs beside savers: nothing that is reachable is lost."""

import os

import pytest

from tests.mutants import maintenance

from . import killing, sweeping, workload
from .writer import Writer

KILLS = int(os.environ.get("HOLDFAST_KILLS", "20_000"))
TRIES = 40  # a mutant may be lucky, most of all on a busy machine


@pytest.mark.parametrize("writers", [1, 2])
def test_gc_is_killed_at_random(rounds, writers):
    kills = rounds(60, torture=KILLS // 8)
    report = killing.campaign(kills, seed=writers, writers=writers, weights=workload.TIDYING)
    print(report)
    assert report.acknowledged > kills
    assert not report.failures, str(report)


@pytest.mark.parametrize("seed", range(2))
def test_gc_beside_four_saving_processes(rounds, seed):
    report = sweeping.race(rounds(200, torture=5000), seed=seed)
    print(report)
    assert report.freed
    assert not report.failures, str(report)


class InTwoHalves(Writer):
    def open(self) -> None:
        if self.store is None:
            maintenance.sweeps_in_two_halves()
        super().open()


def test_mutant_that_frees_in_two_transactions():
    for seed in range(TRIES):
        report = killing.campaign(
            120, seed=seed, make=InTwoHalves, weights=workload.TIDYING, until="kill "
        )
        print(report)
        if report.failures:
            return
    pytest.fail("not caught")


@pytest.mark.parametrize(
    "mutant", [maintenance.drops_shared_blobs, maintenance.frees_without_looking]
)
def test_mutant_that_does_not_look_again(mutant):
    for seed in range(TRIES):
        report = sweeping.race(100, seed=seed, sabotage=mutant)
        print(report)
        if report.failures:
            return
    pytest.fail("not caught")
