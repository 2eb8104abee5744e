"""No room left: a clear error, nothing lost, and saving goes on once there is room."""

import pytest

from . import diskfull

SIZES = range(8_192, 400_000, 512)
VOLUMES = range(600_000, 2_000_000, 4_096)


def test_files_that_may_not_grow(rounds):
    report = diskfull.limited(SIZES[:: rounds(16, torture=1)])
    print(report)
    assert report.refused
    assert not report.failures, str(report)


def test_a_full_file_system(rounds):
    if why := diskfull.why_not_mounted():
        pytest.skip(why)
    report = diskfull.mounted(VOLUMES[:: rounds(24, torture=1)])
    print(report)
    assert report.refused
    assert not report.failures, str(report)


def test_mutant_that_takes_a_refused_write_for_a_success():
    report = diskfull.limited([100_000], diskfull.FillingBlindly)
    print(report)
    assert any("wrong state: " in found for found in report.failures)
