"""Every mutant is caught: the test that is named beside it fails on it."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tests.history.test_undo import FAILING_PARTS
from tests.maintenance.test_retention import ONE_RULE_EACH
from tests.mutants import MUTANTS, entry, history, maintenance, runs, storage
from tests.support.damage import DAMAGES
from tests.support.stores import Home

TESTS = Path(__file__).parents[1]

CASES: list[tuple[Any, ...]] = [
    # mutant, file and name of the test, arguments of the test
    (storage.names_are_paths, "history/names", "names_are_not_paths"),
    (storage.names_are_normalized, "history/names", "any_string_can_name_a_session"),
    (storage.names_are_normalized, "history/names", "any_string_can_name_a_fork"),
    (storage.names_are_normalized, "history/names", "any_string_can_be_a_label_tag_or_key"),
    (storage.names_by_part, "history/names", "names_are_not_patterns"),
    (storage.names_by_pattern, "history/names", "names_with_brackets_are_found"),
    (storage.names_by_prefix, "history/names", "names_are_not_prefixes"),
    (storage.lists_without_latest, "history/names", "names_that_contain_latest_are_listed"),
    (storage.names_are_deleted_as_paths, "history/names",
     "deleting_a_session_named_like_a_path_deletes_no_file"),
    (storage.names_by_part, "history/names", "patterns_delete_nothing"),
    (history.searches_by_pattern, "history/names", "patterns_find_nothing"),
    (storage.names_by_prefix, "history/names",
     "cleaning_up_a_session_leaves_one_with_a_longer_name"),
    (history.searches_by_prefix, "history/names", "searches_match_whole_names"),
    (storage.lists_without_latest, "history/names",
     "names_that_contain_latest_in_every_operation"),
    (storage.keys_of_all_sessions, "history/names",
     "sessions_of_two_agents_share_no_keys_and_labels"),
    (history.searches_trust_the_index, "history/names",
     "cleaning_up_the_session_of_one_agent_leaves_that_of_another"),

    (history.adopted_checkpoints_keep_their_stream, "history/adopt",
     "both_go_on_after_an_adoption"),
    (history.hashes_cover_the_new_name, "history/rename",
     "a_session_with_a_new_name_is_the_same"),
    (history.equal_states_are_not_saved, "history/writer",
     "saving_an_equal_state_makes_another_checkpoint"),
    (storage.keys_can_be_taken, "history/writer", "a_key_is_used_once_in_a_session"),
    (history.parents_by_id, "history/writer",
     "saves_within_one_tick_of_the_clock_keep_their_order"),
    (history.ids_by_the_clock, "history/writer",
     "saves_keep_their_order_when_the_clock_is_set_back"),
    (storage.newest_file_is_the_head, "history/writer", "file_times_do_not_decide_the_order"),
    (history.a_branch_takes_a_used_number, "history/writer",
     "another_save_on_the_same_parent_is_a_branch"),
    (history.time_in_seconds, "history/writer", "created_at_is_exact"),
    (history.steps_begin_again, "history/writer", "steps_are_counted_across_restarts"),
    (storage.errors_are_swallowed, "history/writer", "a_failed_save_leaves_nothing", "heads"),
    (history.an_unreadable_parent_is_none, "history/writer",
     "an_error_while_reading_the_parent_makes_no_root"),
    (history.nan_does_not_load, "history/writer", "nan_and_infinity_are_kept"),
    (history.fields_are_dropped, "history/fields", "every_field_is_kept"),
    (storage.a_mark_replaces_the_others, "history/fields",
     "tags_and_labels_change_no_other_field"),
    (history.fields_are_dropped, "history/fields",
     "every_field_survives_undo_gc_and_a_restart"),

    (storage.no_compare_and_swap, "history/concurrent_writers",
     "a_late_save_does_not_move_the_head_back"),
    (storage.no_compare_and_swap, "history/concurrent_writers",
     "concurrent_saves_form_one_line"),
    (storage.no_compare_and_swap, "history/concurrent_writers", "one_first_save_wins"),
    (history.processes_ignore_each_other, "history/concurrent_writers",
     "two_processes_lose_nothing_of_each_other"),
    (storage.no_compare_and_swap, "history/concurrent_writers",
     "concurrent_undos_take_back_one_each"),
    (storage.no_compare_and_swap, "history/concurrent_writers",
     "concurrent_tags_are_all_kept"),
    (storage.no_compare_and_swap, "history/concurrent_writers",
     "concurrent_awaited_saves_form_one_line"),
    (history.redo_never_ends, "history/concurrent_writers",
     "a_late_redo_does_not_move_the_head"),
    (storage.no_compare_and_swap, "history/concurrent_writers",
     "a_late_save_after_an_operation_is_refused"),
    (storage.no_compare_and_swap, "maintenance/concurrent_cleaning",
     "concurrent_saves_beside_automatic_retention"),

    (history.forks_without_origin, "history/forks", "a_fork_knows_its_origin"),
    (history.forks_are_never_refused, "history/forks",
     "a_fork_onto_an_existing_session_is_refused"),
    (history.forks_are_never_refused, "history/forks", "one_of_several_forks_at_once_wins"),
    (history.origins_by_name, "history/forks", "a_fork_outlives_its_origin"),
    (history.forks_copy, "history/forks", "a_fork_takes_the_name_of_a_deleted_session"),
    (history.missing_is_none, "history/revisions", "what_is_missing_is_an_error"),
    (history.the_oldest_label_wins, "history/revisions", "a_repeated_label_means_the_newest"),
    (maintenance.everything_is_garbage, "history/delete",
     "delete_takes_one_of_two_equal_checkpoints"),
    (history.deleted_checkpoints_load, "history/delete",
     "a_deleted_checkpoint_loads_by_no_name"),
    (history.deleting_what_is_missing_succeeds, "history/delete",
     "deleting_what_is_missing_is_an_error"),
    (history.deleted_sessions_are_listed, "history/delete",
     "emptied_sessions_are_not_listed"),
    (history.deleted_sessions_are_listed, "history/delete",
     "all_readers_agree_on_what_exists"),

    *[(history.damage_stops_lineage, "history/damage",
       "the_parent_of_a_damaged_checkpoint_loads", body) for body in (b"", None)],
    (maintenance.data_is_not_checked, "history/damage",
     "the_parent_of_a_checkpoint_with_damaged_data_loads"),
    (history.damaged_checkpoints_are_not_listed, "history/damage",
     "damaged_checkpoints_stay_listed", b"torn"),
    (history.damage_stops_lineage, "history/damage", "a_damaged_mark_hides_nothing"),
    (history.pages_begin_without_a_parent, "history/damage",
     "history_continues_past_a_damaged_record_on_another_page", 20),
    (history.pages_begin_without_a_parent, "history/damage",
     "usage_of_a_session_with_a_damaged_head"),
    *[(history.damage_stops_sessions, "history/damage",
       "other_sessions_are_unaffected_by_damage", what)
      for what in DAMAGES if what not in ("record", "mark", "item")],
    *[(maintenance.problems_are_not_reported, "history/damage",
       "other_sessions_are_unaffected_by_damage", what) for what in ("record", "mark")],
    (maintenance.data_is_not_checked, "history/damage",
     "other_sessions_are_unaffected_by_damage", "item"),
    *[(history.damage_stops_lineage, "history/damage",
       "the_rest_of_a_damaged_session_loads", what)
      for what in DAMAGES if what not in ("name", "record", "item")],
    *[(history.a_lost_head_is_a_beginning, "history/damage",
       "checkpoints_load_without_their_head_row", body) for body in (b"", b"torn", None)],
    (history.a_missing_row_is_not_found, "history/damage",
     "a_missing_head_checkpoint_is_damage"),
    (history.damage_stops_filters, "history/damage",
     "searches_list_or_log_damaged_checkpoints", "torn"),
    (history.damaged_marks_do_not_match, "history/damage",
     "searches_list_or_log_damaged_checkpoints", "mark"),
    *[(history.damaged_sessions_do_not_match, "history/damage",
       "filtered_lists_include_or_log_damaged_sessions", query)
      for query in ({"status": "failed"}, {"tag": "t"}, {"agent": "x"})],
    (history.damaged_checkpoints_are_not_listed, "history/damage",
     "damaged_checkpoints_are_counted_and_kept"),
    (history.damage_stops_filters, "history/damage",
     "searches_find_the_neighbours_of_damage", "record"),
    (history.damage_stops_watch, "history/damage",
     "watching_reports_the_neighbours_of_damage", "head"),
    (history.operations_must_be_sound, "history/damage",
     "watching_reports_the_neighbours_of_damage", "operation"),
    (history.names_must_be_sound, "history/damage",
     "watching_reports_the_neighbours_of_damage", "name"),
    (history.operations_must_be_sound, "history/damage",
     "a_torn_operation_hides_no_other"),
    (maintenance.undo_stays_stuck, "history/damage",
     "undo_after_repair_of_a_torn_operation"),

    (storage.removing_a_mark_removes_all, "history/undo",
     "undo_of_a_tag_keeps_the_other_tags"),
    (history.rewind_destroys, "history/undo", "rewind_keeps_later_checkpoints"),
    (history.ids_by_the_clock, "history/undo", "lists_and_undo_when_the_clock_is_set_back"),
    (history.deletions_by_the_clock, "history/undo",
     "undo_takes_back_the_newest_deletion_of_a_name"),
    (history.deletions_by_number, "history/undo",
     "undo_takes_back_the_newest_deletion_of_any_process"),
    (history.time_in_seconds, "history/undo", "created_at_survives_undo_prune_and_gc"),
    (history.steps_begin_again, "history/undo", "steps_after_undo_gc_and_a_restart"),
    (maintenance.gc_errors_are_swallowed, "history/undo",
     "an_error_while_reading_changes_nothing"),
    *[(storage.errors_are_swallowed, "history/undo", "a_failed_operation_leaves_nothing", kind)
      for kind in FAILING_PARTS],
    (storage.errors_are_swallowed, "history/undo", "a_failed_rewind_is_an_error"),
    (history.nan_does_not_load, "history/undo", "nan_survives_undo_prune_gc_and_repair"),
    (storage.searches_find_the_oldest_first, "history/filters",
     "a_repeated_label_is_found_newest_first"),
    *[(history.searches_by_prefix, "history/filters", "hostile_values", field)
      for field in ("tag", "label", "trigger")],
    (storage.names_are_normalized, "history/filters", "hostile_values_can_be_taken_away"),

    *[(maintenance.the_oldest_is_kept, "maintenance/retention",
       "prune_keeps_the_newest_within_one_tick_of_the_clock", rule)
      for rule in ("keep_last", "keep_every", "max_bytes")],
    (maintenance.store_bytes_by_the_clock, "maintenance/retention",
     "store_bytes_removes_in_the_order_of_saves"),
    *[(maintenance.rules_are_not_read, "maintenance/retention",
       "every_rule_removes_what_it_says", rule, by_itself)
      for rule in ONE_RULE_EACH for by_itself in (False, True)
      if (rule, by_itself) != ("store_bytes", True)],
    *[(maintenance.marks_always_protect, "maintenance/retention",
       "marks_protect_unless_the_rule_says_otherwise", mark) for mark in ("tagged", "labelled")],
    (maintenance.every_step_is_kept, "maintenance/retention", "keep_every_counts_steps"),
    (maintenance.marks_protect_nothing, "maintenance/retention",
     "retention_keeps_marks_forks_and_connections", "itself"),
    (maintenance.no_grafts, "maintenance/retention",
     "retention_keeps_marks_forks_and_connections", "session"),
    *[(maintenance.pruning_is_part_of_the_save, "maintenance/autoprune",
       "a_failed_prune_fails_no_save", part) for part in ("clean_up", "collect", "damage")],
    (maintenance.pruning_is_part_of_the_save, "maintenance/autoprune",
     "a_failed_prune_fails_no_awaited_save"),
    *[(maintenance.prune_stops_at_damage, "maintenance/gc", "prune_beside_a_damaged_session", what)
      for what in ("head", "missing head", "name")],
    (history.damage_stops_repair, "maintenance/gc",
     "gc_and_repair_beside_a_damaged_session", "record"),
    (maintenance.flags_of_rows_are_not_checked, "maintenance/gc",
     "gc_and_repair_beside_a_damaged_session", "item"),
    (history.rewind_destroys, "maintenance/gc", "gc_keeps_what_was_rewound"),
    (maintenance.no_grafts, "maintenance/gc",
     "gc_that_fails_half_way_leaves_a_sound_store"),
    (maintenance.no_grafts, "maintenance/gc", "freed_and_damaged_checkpoints_are_told_apart"),
    (maintenance.gc_errors_are_swallowed, "maintenance/gc", "a_failed_gc_is_an_error", "sweep"),
    (maintenance.no_repair, "maintenance/repair",
     "repair_moves_the_head_to_the_newest_sound_checkpoint", "torn"),
    (maintenance.nothing_is_given_up, "maintenance/repair",
     "a_missing_checkpoint_is_reported_once_and_then_counts_as_freed"),
    (maintenance.no_repair, "maintenance/repair", "a_damaged_head_row_is_repaired", b""),

    (storage.any_file_is_a_store, "storage/opening",
     "foreign_files_are_refused_and_left_alone"),
    (storage.indexes_must_be_sound, "storage/sqlite/damaged_keys",
     "a_session_loads_without_the_index_of_ids"),
    (storage.damaged_indexes_stay, "storage/sqlite/repair_of_pages",
     "a_damaged_index_is_rebuilt", "forks"),
    (storage.backups_replace_files, "storage/sqlite/backup",
     "a_backup_never_replaces_a_file"),
    (maintenance.backups_are_not_verified, "storage/sqlite/backup",
     "a_spoiled_backup_is_refused"),
    (history.damage_stops_gc, "storage/sqlite/backup",
     "a_repaired_store_can_be_backed_up", b"torn"),
    (maintenance.nothing_is_given_up, "storage/sqlite/backup",
     "a_repaired_store_can_be_backed_up", None),
    (storage.backups_are_not_synced, "storage/sqlite/backup",
     "a_backup_is_synced_before_it_gets_its_name"),
    (storage.backups_look_at_their_own_name_only, "storage/sqlite/backup",
     "a_backup_touches_no_other_file"),
    *[(storage.members_of_a_group_get_no_errors, "storage/group_commit",
       "one_of_a_group_fails_alone", why) for why in ("taken", "failing")],
    (history.every_save_writes_everything, "storage/costs",
     "full_saves_of_a_growing_list_cost_what_changed"),
    (storage.no_compression, "storage/costs", "text_is_compressed"),
    (storage.no_compression, "storage/costs", "gc_leaves_data_compressed"),
    (history.forks_copy, "storage/costs", "operations_copy_no_data"),
    (runs.denied_calls_are_made, "runs/approve", "anything_but_true_denies", False),
    (runs.halts_are_ready, "runs/runs", "runs_that_are_ready"),
    (runs.mixes_attempts, "runs/streams", "another_attempt_begins_again"),
    (runs.chunks_are_of_any_attempt, "runs/streams", "another_attempt_begins_again"),
    (runs.ends_with_the_stream, "runs/streams", "a_reader_ends_when_the_step_has_returned"),
    (runs.flushes_nothing, "runs/streams", "a_worker_that_was_fenced_writes_no_chunk"),
    (runs.every_answer_approves, "runs/approve", "anything_but_true_denies", "too much"),
    (storage.memory_refuses_no_row, "storage/same_on_every_backend",
     "saves_and_forks_are_the_same_on_every_backend"),
    (storage.searches_find_the_oldest_first, "storage/same_on_every_backend",
     "history_is_the_same_on_every_backend"),
]  # fmt: skip

ON_FILES = (storage.names_are_paths, storage.newest_file_is_the_head)
"""Mutants of the files backend. All others are tried on the one in memory."""

UNRELATED = (TypeError, AttributeError, NameError, ImportError)
"""Errors of a mutant that does not fit the engine any more."""


def run(file: str, name: str, arguments: list[Any], kind: str, folder: Path) -> None:
    """Run a test with the fixtures that it takes."""
    folders, _, topic = file.rpartition("/")
    module = importlib.import_module(f"tests.{folders.replace('/', '.')}.test_{topic}")
    test = getattr(module, f"test_{name}")
    wanted = list(inspect.signature(test).parameters)
    homes = {name: kind if name == "home" else name for name in {"home", "sqlite"} & {*wanted}}
    rest = [name for name in wanted if name not in (*homes, "tmp_path", "monkeypatch")]
    given: dict[str, Any] = dict(zip(rest, arguments, strict=True))
    given |= {name: Home(kind, folder) for name, kind in homes.items()}
    with pytest.MonkeyPatch.context() as patch:
        given |= {"tmp_path": folder} if "tmp_path" in wanted else {}
        given |= {"monkeypatch": patch} if "monkeypatch" in wanted else {}
        try:
            test(**given)
        finally:
            for fixture in homes:
                given[fixture].give_back()


def case_id(case: tuple[Any, ...]) -> str:
    return "-".join(map(str, (case[0], *case[2:])))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_mutant_is_caught(case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, file, name, *arguments = case
    mutant(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)) as caught:
        run(file, name, arguments, "files" if mutant in ON_FILES else "memory", tmp_path)
    assert not isinstance(caught.value, UNRELATED), caught.getrepr()


def test_every_mutant_is_tried() -> None:
    """Here, or by a campaign that names it."""
    text = "".join(
        path.read_text("utf-8")
        for path in TESTS.rglob("*.py")
        if path.parent != TESTS / "mutants" or path == Path(__file__)
    )
    named = {*re.findall(r"\w+", text)}
    assert [name for name in MUTANTS if name not in named] == []


def test_a_mutant_has_an_address_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError):
        entry("nonsense", "Nothing.", ".store:nonsense", 0)(monkeypatch)
    del MUTANTS["nonsense"]
