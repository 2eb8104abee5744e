"""Any bit flipped, any file cut short: the original state or a typed error."""

import functools

import pytest

from . import bitrot, subjects

MAIN, LOG = "agent.db", "agent.db-wal"
PARTS = 2
subject = functools.cache(subjects.subject)


@pytest.mark.parametrize("part", range(PARTS))
def test_flipped_bits_of_the_main_file(rounds, part):
    known = subject(closed=True)
    data = known.files[MAIN]
    damages = bitrot.flips(data, rounds(1500, torture=len(data) * 8))[part::PARTS]
    report = bitrot.campaign(known, MAIN, damages, subjects.original_or_error)
    print(report)
    assert report.tried == len(damages)
    assert not report.failures, str(report)


def test_a_main_file_cut_short(rounds):
    known = subject(closed=True)
    damages = bitrot.cuts(known.files[MAIN], rounds(400, torture=1 << 30))
    report = bitrot.campaign(known, MAIN, damages, subjects.original_or_error)
    print(report)
    assert not report.failures, str(report)


def test_flipped_bits_of_the_log(rounds):
    known = subject(closed=False)
    data = known.files[LOG]
    damages = bitrot.flips(data, rounds(600, torture=len(data) * 8))
    report = bitrot.campaign(known, LOG, damages, subjects.acknowledged_prefix)
    print(report)
    assert not report.failures, str(report)


def test_a_log_cut_short(rounds):
    known = subject(closed=False)
    damages = bitrot.cuts(known.files[LOG], rounds(300, torture=1 << 30))
    report = bitrot.campaign(known, LOG, damages, subjects.acknowledged_prefix)
    print(report)
    assert not report.failures, str(report)
