"""The n-th system call fails, for every n: an error or a true acknowledgement."""

import pytest

from . import failing_io
from .failing_io import Fault

pytestmark = pytest.mark.tools("strace")

FAULTS = [
    ("pwrite64", "EIO"),
    ("pwrite64", "ENOSPC"),
    ("fdatasync", "EIO"),
    ("fdatasync", "ENOSPC"),
    ("fsync", "EIO"),
    ("fsync", "ENOSPC"),
    ("ftruncate", "EIO"),
    ("openat", "EMFILE"),
    ("link", "EIO"),
    ("unlink", "EIO"),
    ("pread64", "EIO"),
]


MANY = {"pwrite64", "fdatasync", "pread64"}
"""Calls that a run makes often. Those that fail in two ways do by turns, but for `make torture`;
of reads, which can lose nothing, some do."""


@pytest.mark.parametrize(("call", "error"), FAULTS)
def test_an_error_or_a_true_acknowledgement(rounds, call, error):
    stride = rounds(7 if call in MANY else 3, torture=1)
    first = stride if call in MANY and error == "ENOSPC" else 1
    report = failing_io.campaign(Fault(call, error), first=first, stride=stride)
    print(report)
    assert report.injected
    assert not report.failures, str(report)


@pytest.mark.parametrize(("call", "error"), FAULTS)
def test_the_same_if_it_fails_from_then_on(rounds, call, error):
    stride = rounds(11 if call in MANY else 3, torture=1)
    first = stride // 2 + 1 if call in MANY and error == "ENOSPC" else 1
    report = failing_io.campaign(Fault(call, error, forever=True), first=first, stride=stride)
    print(report)
    assert report.injected
    assert not report.failures, str(report)


@pytest.mark.parametrize(("call", "error"), FAULTS)
def test_the_same_while_gc_frees(rounds, call, error):
    """A small part of the calls: those of opening and saving are above."""
    stride = rounds(43 if call in MANY else 17, torture=1)
    first = stride // 2 + 1 if call in MANY and error == "ENOSPC" else 1
    report = failing_io.campaign(Fault(call, error), script="tidy", first=first, stride=stride)
    print(report)
    assert report.injected
    assert not report.failures, str(report)


@pytest.mark.torture
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("script", ["tidy", "long"])
@pytest.mark.parametrize(("call", "error"), FAULTS)
def test_the_same_in_a_long_run(call, error, script, forever):
    report = failing_io.campaign(Fault(call, error, forever), script=script)
    print(report)
    assert not report.failures, str(report)


@pytest.mark.parametrize("call", ["pwrite64", "fdatasync"])
def test_mutant_that_takes_a_failed_write_for_a_success(call):
    told = ("lost: ", "wrong state: ")
    mutant = failing_io.Swallowing
    report = failing_io.campaign(Fault(call, "EIO"), make=mutant, stride=5, until=told)
    print(report)
    assert any(what in found for found in report.failures for what in told)
