"""Any bit flipped, any file cut short: the original state or a typed error."""

import contextlib
import functools
import os
import re

import apsw
import pytest

import holdfast
from holdfast.format import records, rows
from holdfast.format.records import Info
from holdfast.history import revisions
from holdfast.maintenance import verify
from holdfast.storage.sqlite import salvage, schema
from holdfast.storage.sqlite.reader import name_hash

from . import bitrot, subjects

MAIN, LOG = "agent.db", "agent.db-wal"
PARTS = 2
# How many states may be lost to one damaged row: labels, keys and rewinds are not needed to load.
LOST = {"checkpoints": 1, "items": 99, "blobs": 99, "marks": 0, "keys": 0, "operations": 0}
FLIPS = int(os.environ.get("HOLDFAST_FLIPS", "0")) or 1 << 40  # all there are
subject = functools.cache(subjects.subject)


@pytest.mark.parametrize("part", range(PARTS))
def test_flipped_bits_of_the_main_file(rounds, part):
    known = subject(closed=True)
    data = known.files[MAIN]
    damages = bitrot.flips(data, rounds(120, torture=min(FLIPS, len(data) * 8)))[part::PARTS]
    report = bitrot.campaign(known, MAIN, damages, subjects.original_or_error)
    print(report)
    assert report.tried == len(damages)
    assert not report.failures, str(report)


def test_a_main_file_cut_short(rounds):
    known = subject(closed=True)
    damages = bitrot.cuts(known.files[MAIN], rounds(120, torture=1 << 30))
    report = bitrot.campaign(known, MAIN, damages, subjects.original_or_error)
    print(report)
    assert not report.failures, str(report)


def test_flipped_bits_of_the_log(rounds):
    known = subject(closed=False)
    data = known.files[LOG]
    damages = bitrot.flips(data, rounds(160, torture=min(FLIPS, len(data) * 8)))
    report = bitrot.campaign(known, LOG, damages, subjects.acknowledged_prefix)
    print(report)
    assert not report.failures, str(report)


def test_a_log_cut_short(rounds):
    known = subject(closed=False)
    damages = bitrot.cuts(known.files[LOG], rounds(120, torture=1 << 30))
    report = bitrot.campaign(known, LOG, damages, subjects.acknowledged_prefix)
    print(report)
    assert not report.failures, str(report)


def test_repair_after_flipped_bits(rounds):
    known = subject(closed=True)
    data = known.files[MAIN]
    damages = bitrot.flips(data, rounds(80, torture=min(FLIPS, len(data) * 8)), seed=1)
    report = bitrot.campaign(known, MAIN, damages, subjects.repaired)
    print(report)
    assert report.tried == len(damages)
    assert not report.failures, str(report)


@pytest.mark.parametrize("script", ["small", "tidy", "undone"])
def test_repair_after_damage_to_lengths_keys_and_types(rounds, script):
    known = subject(closed=True, script=script)
    places = bitrot.cell_heads(known.files[MAIN], interior=False)
    damages = bitrot.some(places, rounds(25, torture=FLIPS))
    check = functools.partial(subjects.repaired, hides=script != "small")
    report = bitrot.campaign(known, MAIN, damages, check)
    print(report)
    assert report.tried == len(damages)
    assert not report.failures, str(report)


@pytest.mark.parametrize("script", ["small", "tidy", "long"])
def test_repair_finds_the_rows_of_pages_that_are_closed(rounds, script):
    """Those that SQLite cannot read, or takes for others. `test_lost_pages` has the mutants."""
    known = subject(closed=True, script=script)
    count = rounds(2 if script == "long" else 15, torture=FLIPS)
    data = known.files[MAIN]
    pages = bitrot.recoverable(data)
    damages: list[bitrot.Anything] = [*bitrot.some(bitrot.headers(data, pages), count)]
    ways = [page for page in pages if data[(page - 1) * bitrot.PAGE] in {2, 5}]
    damages += [bitrot.Blank(page) for page in ways]
    report = bitrot.campaign(known, MAIN, damages, subjects.recovered)
    print(report)
    assert report.tried == len(damages)
    assert not report.failures, str(report)
    assert report.unharmed < report.tried


def test_mutant_that_mends_in_place(monkeypatch):
    """Only indexes are made anew, and bodies are cast where they are."""

    def cast(connect):
        connection = connect()
        for table in ("heads", "checkpoints", "sessions", "items", "blobs"):
            with contextlib.suppress(apsw.CorruptError):
                connection.execute(f"UPDATE {table} SET body = CAST(body AS BLOB)")
        with contextlib.suppress(apsw.CorruptError):
            connection.execute("REINDEX")
        connection.close()
        return True

    monkeypatch.setattr(salvage, "salvage", cast)
    known = subject(closed=True)
    places = bitrot.cell_heads(known.files[MAIN], interior=False)
    damages = [(MAIN, damage) for damage in bitrot.some(places, 400)]
    report = bitrot.campaigns(known, damages, subjects.repaired, until="made worse")
    assert "made worse" in str(report)


@pytest.mark.parametrize("script", ["small", "long"])
def test_repair_after_damage_to_what_leads_to_pages(rounds, script):
    """What is behind it may be lost, and its table closed to new rows: but nothing more."""
    known = subject(closed=True, script=script)
    places = bitrot.cell_heads(known.files[MAIN], interior=True)
    damages = bitrot.some(places, rounds(20 if script == "small" else 2, torture=min(FLIPS, 2000)))
    check = functools.partial(subjects.repaired, hides=True)
    report = bitrot.campaign(known, MAIN, damages, check)
    print(report)
    assert report.tried == len(damages)
    assert not [f for f in report.failures if "does not go on: Corrupt" not in f], str(report)
    assert "made worse" not in str(report.failures)


def found_by() -> bitrot.Report:
    """What repair makes of a damaged name, id or digest, in a row or in the index of it."""
    known = subject(closed=True)
    damages = bitrot.sightings(known.files[MAIN], bitrot.found_by(known.files[MAIN]))
    report = bitrot.campaign(known, MAIN, damages, subjects.repaired)
    print(report)
    return report


def test_repair_after_damage_to_what_rows_are_found_by():
    report = found_by()
    assert report.tried > 40
    assert not report.failures, str(report)


def test_mutant_that_makes_indexes_of_damaged_rows(monkeypatch):
    def trusting(connect):
        connection = connect()
        connection.execute("REINDEX; DELETE FROM names")
        for number, name in connection.execute("SELECT num, name FROM sessions").fetchall():
            connection.execute("INSERT INTO names VALUES (?, ?)", (name_hash(name), number))
        connection.close()
        return True

    monkeypatch.setattr(salvage, "salvage", trusting)
    failures = str(found_by().failures)
    assert "could be begun anew" in failures
    assert "does not load any more" in failures


@pytest.mark.parametrize("table", LOST)
def test_a_damaged_row_harms_only_what_needs_it(table):
    known = subject(closed=True)
    damages = bitrot.cells(known.files[MAIN], table)
    check = functools.partial(subjects.contained, most=LOST[table])
    report = bitrot.campaign(known, MAIN, damages, check)
    print(report)
    assert report.tried
    assert not report.failures, str(report)


class Agreeable(bytes):
    """Equal to whatever it is compared with."""

    __slots__ = ()
    __hash__ = bytes.__hash__

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


def test_mutant_that_does_not_compare_digests(monkeypatch):
    known = subject(closed=True)
    monkeypatch.setattr(rows, "xxh3_64_digest", lambda body, seed: Agreeable(8))
    damages = bitrot.flips(known.files[MAIN], 150)
    by_id = "load [0-9a-z]{24}: a different answer"
    report = bitrot.campaign(known, MAIN, damages, subjects.original_or_error, until=by_id)
    print(report)
    assert any(re.search(by_id, found) for found in report.failures)


def names_and_ids(table: str, step: int = 1, until: str | None = None) -> bitrot.Report:
    """Two bits of each of the last bytes of the first page of a table, where its first rows lie."""
    known = subject(closed=True)
    end = bitrot.first_pages(known.files[MAIN])[table] * bitrot.PAGE
    damages = [bitrot.Damage(end - n, bit) for n in range(1, 61, step) for bit in (0, 1)]
    report = bitrot.campaign(known, MAIN, damages, subjects.original_or_error, until=until)
    print(report)
    return report


IDS = "sqlite_autoindex_checkpoints_1"


@pytest.mark.parametrize("table", ["sessions", IDS])
def test_a_damaged_name_or_index_of_ids_is_noticed(rounds, table):
    report = names_and_ids(table, rounds(2, torture=1))
    assert not report.failures, str(report)


def test_mutant_that_trusts_the_index_of_ids(monkeypatch):
    monkeypatch.setattr(revisions, "_check_id", lambda *_: None)
    assert names_and_ids(IDS, 2, until="").failures


def test_mutant_that_trusts_the_name_of_a_session(monkeypatch):
    monkeypatch.setattr(records, "unseal_session", lambda *_: Info(0, None, None))
    assert names_and_ids("sessions", 2, until="").failures


def test_mutant_that_counts_what_no_handle_loads(monkeypatch):
    monkeypatch.setattr(verify._Audit, "_open", lambda self: None)
    missed = "verify misses it"
    assert missed in str(names_and_ids("sessions", 2, until=missed).failures)


def test_mutant_that_lets_sqlites_errors_through(monkeypatch):
    """A file that is cut short is told of by SQLite first; callers must be told in our words."""
    monkeypatch.setattr(schema, "translated", lambda path: contextlib.nullcontext())
    known = subject(closed=True)
    damages = bitrot.cuts(known.files[MAIN], 40)
    told = "not one of the library's errors"
    report = bitrot.campaign(known, MAIN, damages, subjects.original_or_error, until=told)
    print(report)
    assert any(told in found for found in report.failures)


def test_mutant_that_takes_the_log_for_granted(monkeypatch):
    """A log whose end is damaged says less than it did: what it said last must not be made up."""
    known = subject(closed=False)
    newest = {name: ids[0] for name, ids in known.paths.items()}
    load = holdfast.Session.load

    def remembering(self, revision=None, **more):
        try:
            return load(self, revision or newest.get(self.name), **more)
        except holdfast.CheckpointNotFound:
            return {"made": "up"}

    monkeypatch.setattr(holdfast.Session, "load", remembering)
    damages = bitrot.cuts(known.files[LOG], 60)
    report = bitrot.campaign(known, LOG, damages, subjects.acknowledged_prefix, until="")
    print(report)
    assert report.failures
