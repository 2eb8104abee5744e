"""diagnose(): each check yields a finding, and none raises."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast import Finding
from holdfast.errors import Corrupt, StoreNotFound, Unavailable
from holdfast.maintenance import doctor
from tests.support import example_stores

SUBJECTS = {"python", "sqlite", "holdfast", "disk", "rights", "store", "clock", "records", "locks"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    example_stores.trip(path)
    return path


def by_subject(path: Path) -> dict[str, Finding]:
    return {finding.about: finding for finding in holdfast.diagnose(path)}


@pytest.mark.parametrize("kind", ["", "files:"])
def test_a_sound_store(tmp_path: Path, kind: str) -> None:
    address = f"{kind}{tmp_path / 'store'}"
    example_stores.trip(address)
    found = {finding.about: finding for finding in holdfast.diagnose(address)}
    assert found.keys() == SUBJECTS
    assert [each for each in found.values() if each.how == "bad" or each.error] == []


def test_a_missing_store(tmp_path: Path) -> None:
    found = by_subject(tmp_path / "none.db")
    assert found["store"].how == "note"
    assert isinstance(found["store"].error, StoreNotFound)
    assert found.keys() == SUBJECTS - {"clock", "records", "locks"}
    assert not (tmp_path / "none.db").exists()


def test_a_missing_folder(tmp_path: Path) -> None:
    found = by_subject(tmp_path / "none" / "store.db")
    assert found["disk"].how == "note"
    assert found["disk"].do == f"mkdir -p {tmp_path / 'none'}"


def test_a_damaged_record(path: Path) -> None:
    example_stores.spoil(path, 8)
    findings = [each for each in holdfast.diagnose(path) if each.about == "records"]
    assert [each.how for each in findings] == ["bad", "bad"]
    assert findings[-1].do is not None


def test_a_damaged_file(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    bad = [each for each in holdfast.diagnose(path) if each.how == "bad"]
    assert [type(each.error) for each in bad] == [Corrupt]
    assert bad[0].do != Corrupt.default_hint


def test_a_store_that_another_process_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LOCK_TIMEOUT", 0.05)
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    found = by_subject(path)["locks"]
    other.close()
    assert (found.how, type(found.error)) == ("bad", Unavailable)


def test_a_clock_that_was_set_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CLOCK_ERROR", -timedelta(days=1))
    assert by_subject(path)["clock"].how == "note"


def test_a_disk_that_is_nearly_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LITTLE_SPACE", 1 << 62)
    assert by_subject(path)["disk"].how == "note"


def test_a_store_that_others_can_read(path: Path) -> None:
    path.chmod(0o644)
    assert by_subject(path)["rights"].how == "note"
    path.chmod(0o600)
    assert by_subject(path)["rights"].how == "ok"
