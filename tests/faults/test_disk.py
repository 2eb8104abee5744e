"""The model of a disk that the power-loss tests rest on."""

import itertools

from .disk import ROOT, SECTOR, WHOLE, Disk, Rename, Resize, Sync, Write


def disk(*events, directories="strict"):
    made = Disk(directories)
    for event in events:
        made.apply(event)
    return made


def states(made):
    choices = itertools.product([0, WHOLE], repeat=len(made.pending))
    return [made.state(choice).files for choice in choices]


CREATED = Rename(0, 0, (((ROOT, "file"), 1),))
WRITTEN = Write(1, 1, 1, 0, b"data")
SYNCED = Sync(2, 2, 1)
LISTED = Sync(3, 3, ROOT)

SUB = Rename(0, 0, (((ROOT, "sub"), -1),))
INSIDE = Rename(3, 3, (((-1, "file"), 2),))


def test_nothing_is_durable_by_itself():
    assert states(disk(CREATED, WRITTEN)) == [{}, {}, {"file": b""}, {"file": b"data"}]


def test_a_synced_file_needs_its_name():
    assert states(disk(CREATED, WRITTEN, SYNCED)) == [{}, {"file": b"data"}]
    assert states(disk(CREATED, WRITTEN, SYNCED, LISTED)) == [{"file": b"data"}]


def test_names_follow_a_synced_file_if_the_file_system_keeps_order():
    assert states(disk(CREATED, WRITTEN, SYNCED, directories="ordered")) == [{"file": b"data"}]


def test_a_sync_covers_only_what_was_written_before_it_began():
    late = Write(1, 3, 1, 0, b"late")
    assert disk(late, Sync(2, 4, 1)).pending == [late]


def test_a_failed_sync_loses_data():
    made = disk(CREATED, LISTED, WRITTEN, Sync(4, 4, 1, ok=False), Sync(5, 5, 1))
    assert states(made) == [{"file": b""}]


def test_a_write_may_be_torn_at_sectors():
    old = Write(1, 1, 1, 0, b"o" * 3 * SECTOR)
    new = Write(4, 4, 1, 100, b"n" * 2 * SECTOR)
    made = disk(CREATED, LISTED, old, SYNCED, new)
    (torn,) = made.state([0b101]).files.values()
    assert torn == (
        b"o" * 100 + b"n" * (SECTOR - 100) + b"o" * SECTOR + b"n" * 100 + b"o" * (SECTOR - 100)
    )


def test_sizes_and_holes():
    beyond = Write(4, 4, 1, 8, b"far")
    made = disk(CREATED, LISTED, WRITTEN, SYNCED, beyond, Resize(5, 5, 1, 2))
    assert [files["file"] for files in states(made)] == [
        b"data",
        b"da",
        b"data\0\0\0\0far",
        b"da",
    ]
    assert disk(CREATED, LISTED, Resize(4, 4, 1, 3, grow=True)).state([WHOLE]).files == {
        "file": b"\0\0\0"
    }


def test_a_rename_is_one_step():
    renamed = Rename(4, 4, (((ROOT, "file"), None), ((ROOT, "other"), 1)))
    made = disk(CREATED, WRITTEN, SYNCED, LISTED, renamed)
    assert states(made) == [{"file": b"data"}, {"other": b"data"}]


def test_a_file_is_not_found_without_its_directory():
    made = disk(SUB, INSIDE)
    assert states(made) == [{}, {}, {"sub": None}, {"sub": None, "sub/file": b""}]


def test_a_renamed_folder_takes_along_only_what_has_reached_it():
    renamed = Rename(5, 5, (((ROOT, "sub"), None), ((ROOT, "new"), -1)))
    assert states(disk(SUB, LISTED, INSIDE, renamed)) == [
        {"sub": None},
        {"new": None},
        {"sub": None, "sub/file": b""},
        {"new": None, "new/file": b""},
    ]
    listed = Sync(4, 4, -1)
    assert states(disk(SUB, LISTED, INSIDE, listed, renamed)) == [
        {"sub": None, "sub/file": b""},
        {"new": None, "new/file": b""},
    ]
