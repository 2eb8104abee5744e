"""Every backend, held to one contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.storage.contract import Backend, Insert, Share, StaleHead
from holdfast.storage.files.backend import FilesBackend
from holdfast.storage.memory import MemoryBackend
from holdfast.storage.postgres.backend import PostgresBackend
from holdfast.storage.sqlite import writer
from holdfast.storage.sqlite.backend import SqliteBackend
from holdfast.testing import BackendContract, StoreContract
from tests.mutants import contract, storage
from tests.support import postgres

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class TestMemoryBackend(BackendContract):
    durable = False

    def make_backend(self, folder: Path) -> Backend:
        return MemoryBackend()


class TestSqliteBackend(BackendContract):
    def make_backend(self, folder: Path) -> Backend:
        return SqliteBackend(folder / "store.db")

    def backup_path(self, folder: Path) -> Path:
        return folder / "store.db"


class TestMemoryStore(StoreContract):
    durable = False

    def open_store(self, folder: Path) -> holdfast.Store:
        return holdfast.open("memory:")


class TestSqliteStore(StoreContract):
    def open_store(self, folder: Path) -> holdfast.Store:
        return holdfast.open(folder / "store.db")


class TestFilesBackend(BackendContract):
    unchecked = ("sessions", "checkpoints", "items", "operations")

    def make_backend(self, folder: Path) -> Backend:
        return FilesBackend(folder / "store")

    def backup_path(self, folder: Path) -> Path:
        return folder / "store"


class TestFilesStore(StoreContract):
    def open_store(self, folder: Path) -> holdfast.Store:
        return holdfast.open(f"files:{folder / 'store'}")


class InPostgres:
    """Each test has a schema of its own."""

    @pytest.fixture(autouse=True)
    def in_a_schema(self) -> Iterator[None]:
        with postgres.schema() as self.schema:
            yield


class TestPostgresBackend(InPostgres, BackendContract):
    def make_backend(self, folder: Path) -> Backend:
        return PostgresBackend(postgres.server_url(), create=True, schema=self.schema)


class TestPostgresStore(InPostgres, StoreContract):
    def open_store(self, folder: Path) -> holdfast.Store:
        return holdfast.open(postgres.server_url(), create=True, schema=self.schema)


@pytest.mark.parametrize("kind", [Share, Insert])
def test_mutant_that_forgets_a_part_of_a_change(kind: type, tmp_path: Path, mutant: Any) -> None:
    def forgetful(statements: Any, write: Any) -> None:
        if not isinstance(write, kind):
            real(statements, write)

    real = writer._Statements.add
    mutant(writer._Statements, "add", forgetful)
    with pytest.raises((AssertionError, StaleHead)):
        TestSqliteBackend().test_every_part_of_a_change(tmp_path)


GUARDED: list[tuple[Any, str]] = [
    # mutant of the backend in memory, and the name of the test that must fail on it
    (contract.equals_is_not_checked, "equals_is_refused_if_a_column_has_another_value"),
    (contract.equals_accepts_a_missing_row, "equals_is_refused_if_a_column_has_another_value"),
    (contract.equals_none_is_not_checked, "equals_none_is_refused_if_there_is_a_value"),
    (contract.present_is_not_checked, "present_is_refused_if_there_is_no_row"),
    (contract.absent_is_not_checked, "absent_is_refused_if_there_is_a_row"),
    (contract.taken_names_are_free, "the_name_of_a_session_is_unique"),
    (contract.taken_names_are_free, "a_rename_gives_up_the_old_name"),
    (contract.unchanged_is_not_checked, "unchanged_is_refused_if_a_scan_returns_other_rows"),
    (contract.unchanged_counts_rows, "unchanged_is_refused_if_a_scan_returns_other_rows"),
    (contract.guards_raise_another_error, "absent_is_refused_if_there_is_a_row"),
    (contract.only_the_first_guard_is_checked, "present_is_refused_if_there_is_no_row"),
    (contract.guards_see_the_writes, "guards_see_the_store_before_the_batch"),
    (contract.swap_is_not_compared, "a_swap_is_refused_if_the_head_is_another_one"),
    (contract.delete_if_ignores_the_value, "delete_if_removes_a_row_that_has_the_value"),
    (storage.memory_refuses_no_row, "an_insert_is_refused_if_its_key_is_taken"),
    (contract.puts_keep_the_row, "a_put_replaces_the_row_of_its_key"),
    (contract.deletes_are_forgotten, "a_delete_removes_one_row_if_there_is_one"),
    (contract.ranges_include_their_end, "a_range_of_rows_is_removed"),
    (contract.ranges_exclude_their_beginning, "a_range_of_rows_is_removed"),
    (contract.entries_are_not_counted, "the_number_of_an_entry_is_never_used_again"),
    (contract.indexes_keep_removed_rows, "a_delete_removes_one_row_if_there_is_one"),
    (contract.renames_are_forgotten, "a_rename_gives_up_the_old_name"),
    (contract.missing_blobs_are_shared, "a_blob_without_a_body_must_exist"),
    (contract.shared_blobs_are_replaced, "a_blob_is_shared_or_rewritten"),
    (contract.damaged_blobs_are_shared, "a_blob_is_shared_or_rewritten"),
    (contract.uses_are_not_counted, "every_use_of_a_blob_is_counted"),
    (contract.uses_are_not_counted, "delete_if_removes_a_row_that_has_the_value"),
    (contract.a_batch_is_written_by_halves, "a_batch_is_written_whole_or_not_at_all"),
    (contract.the_last_write_comes_first, "later_writes_follow_earlier_ones"),
    (contract.the_first_batch_may_be_refused,
     "commit_all_writes_nothing_if_the_first_is_refused"),
    (contract.a_refusal_ends_commit_all, "commit_all_writes_each_batch_that_is_not_refused"),
    (contract.check_and_write_are_two_steps, "one_of_many_wins_a_race_for_the_head"),
    (contract.check_and_write_are_two_steps, "one_of_many_wins_a_race_for_a_name"),
    (contract.check_and_write_are_two_steps, "one_of_many_wins_a_race_for_an_entry"),
    (contract.reserve_is_two_steps, "a_number_is_reserved_once"),
    (contract.reserve_takes_one_number, "a_number_is_reserved_once"),
    (contract.a_view_sees_later_commits, "a_view_sees_one_moment"),
    (contract.scan_ignores_the_limit, "scan_returns_no_more_rows_than_its_limit"),
    (contract.scan_ignores_reverse, "scan_in_reverse_returns_the_last_rows_first"),
    (contract.scan_includes_its_end, "scan_begins_at_low_and_ends_before_high"),
    (contract.scan_ignores_the_end_of_bytes, "scan_begins_at_low_and_ends_before_high"),
    (contract.scan_excludes_its_beginning, "scan_begins_at_low_and_ends_before_high"),
    (contract.scan_ignores_the_floor, "a_floor_brings_the_row_that_reaches_into_a_range"),
    (contract.the_floor_is_not_compared, "a_floor_brings_the_row_that_reaches_into_a_range"),
    (contract.the_floor_comes_first_always, "a_floor_brings_the_row_that_reaches_into_a_range"),
    (contract.prefixes_match_part_of_a_value, "scan_with_a_prefix_returns_no_other_rows"),
    (contract.names_are_found_in_any_case, "get_takes_whole_keys"),
    (contract.blobs_have_no_numbers, "blobs_are_listed_in_pages"),
    (contract.counts_are_too_small, "sizes_and_counts_are_of_all_rows"),
    (contract.sizes_leave_a_table_out, "sizes_and_counts_are_of_all_rows"),
    (contract.the_version_stays, "each_commit_changes_the_version"),
    (contract.each_look_is_a_version, "each_commit_changes_the_version"),
    (contract.any_token_renews, "renewing_a_lease_restarts_its_age"),
    (contract.renewing_changes_nothing, "renewing_a_lease_restarts_its_age"),
    (contract.leases_have_no_age, "renewing_a_lease_restarts_its_age"),
    (contract.compact_removes_rows, "compact_keeps_every_row"),
    (contract.closed_backends_go_on, "closing_is_final_and_idempotent"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mutant", "name"), GUARDED, ids=lambda part: part if isinstance(part, str) else part.__name__
)
def test_the_contract_catches(
    mutant: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, StaleHead)):
        getattr(TestMemoryBackend(), f"test_{name}")(tmp_path)
