"""No room left: a clear error, nothing lost, and saving goes on once there is room."""

import os

import pytest

from holdfast.errors import Unavailable
from holdfast.storage import fs
from holdfast.storage.sqlite.wal import Checkpointer

from . import diskfull

SIZES = range(8_192, 400_000, 512)
VOLUMES = range(600_000, 2_000_000, 4_096)


def test_files_that_may_not_grow(rounds):
    report = diskfull.limited(SIZES[:: rounds(32, torture=1)])
    print(report)
    assert report.refused
    assert not report.failures, str(report)


def test_a_full_file_system(rounds):
    if why := diskfull.why_not_mounted():
        pytest.skip(why)
    report = diskfull.mounted(VOLUMES[:: rounds(40, torture=1)])
    print(report)
    assert report.refused
    assert not report.failures, str(report)


def test_mutant_that_takes_a_refused_write_for_a_success():
    report = diskfull.limited([120_000], diskfull.FillingBlindly)
    print(report)
    assert any("wrong state: " in found for found in report.failures)


BACKENDS = pytest.mark.parametrize("backend", ["sqlite", "files"])


@BACKENDS
@pytest.mark.parametrize("size", [1_000_000, 3_000_000])
def test_delete_prune_and_gc_work_where_saves_have_filled_the_disk(backend, size):
    if why := diskfull.why_not_mounted():
        pytest.skip(why)

    def act(child):
        child.save_all()
        yield from child.make_room()

    assert diskfull.freed(size, backend, act) == []


@BACKENDS
def test_delete_prune_and_gc_need_little_where_others_have_filled_the_disk(backend):
    if why := diskfull.why_not_mounted():
        pytest.skip(why)

    def act(child):
        for _ in range(5):
            child.save()
        log = sum(path.stat().st_size for path in child.folder.glob("*-wal"))
        child.fill(left=log + fs.ROOM)
        yield from child.make_room()

    assert diskfull.freed(9_000_000, backend, act) == []


def test_a_save_that_does_not_fit_takes_no_room(monkeypatch):
    if why := diskfull.why_not_mounted():
        pytest.skip(why)

    def act(child):
        child.save()
        child.fill(left=600_000)
        before = child.free()
        with pytest.raises(Unavailable, match="no room"):
            child.store.session("big").save({"noise": os.urandom(2_000_000)})
        if child.free() < before - 200_000:  # the log may have been written back
            yield f"{before} bytes were free, and now {child.free()}"

    assert diskfull.freed(3_000_000, "sqlite", act) == []
    monkeypatch.setattr(fs.Room, "has", lambda *_: True)  # as if it could not be foreseen
    assert diskfull.freed(3_000_000, "sqlite", act) == []
    monkeypatch.setattr(Checkpointer, "cut", lambda _: None)
    assert diskfull.freed(3_000_000, "sqlite", act) != []


@BACKENDS
def test_mutant_that_keeps_no_room(backend, monkeypatch):
    if why := diskfull.why_not_mounted():
        pytest.skip(why)
    monkeypatch.setattr(fs.Room, "has", lambda *_: True)

    def act(child):
        child.save_all()
        yield from child.make_room()

    assert diskfull.freed(3_000_000, backend, act) != []
