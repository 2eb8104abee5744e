"""Tests that `make check` leaves out, because one of them takes as long as a hundred others.

By file, and by the names of tests in it; a file without names is left out as a whole. `make test`
runs all of them. A random life, a state machine or a crash of a real process takes seconds; most
tests take a few milliseconds.
"""

SLOW: dict[str, tuple[str, ...]] = {
    "adapters/test_claude_agent_sdk.py": (
        "test_what_was_appended_survives_a_crash", "test_the_sdks_own_suite",
    ),
    "adapters/test_langgraph.py": (
        "test_killed_in_step_300", "test_a_list_reads_no_more_than_it_must",
    ),
    "adapters/test_langgraph_conformance.py": (),
    "adapters/test_langgraph_graphs.py": ("test_strict_mode_of_langgraph_is_left_on",),
    "adapters/test_langgraph_machine.py": (),
    "adapters/test_openai_agents.py": ("test_a_crash_in_the_second_tool_leaves_the_call",),
    "adapters/test_pydantic_ai.py": ("test_after_a_crash_only_the_pending_tool_runs",),
    "adapters/test_strands.py": ("test_after_a_crash_only_the_pending_tool_runs",),
    "cli/test_hard_names.py": ("test_a_name_that_is_no_text_is_completed",),
    "cli/test_processes.py": (),
    "docs/test_examples.py": (),
    "docs/test_generated.py": ("test_the_site_builds",),
    "docs/test_pages.py": (
        "test_examples_run", "test_the_commands_of_the_readme_need_nothing_else",
    ),
    "docs/test_types.py": (),
    "format/test_documented_format.py": ("test_random_deletions", "test_golden_store_is_collected"),
    "format/test_images_shared_by_threads.py": ("test_another_thread_at_any_line",),
    "format/test_layout.py": ("test_patches_equal_full_saves", "test_any_mutation_is_noticed"),
    "history/test_diff.py": ("test_mutant_of_the_diff",),
    "history/test_names.py": (
        "test_any_string_can_name_a_session", "test_any_string_can_name_a_fork",
        "test_any_string_can_be_a_label_tag_or_key",
    ),
    "history/test_store_machine.py": (),
    "history/test_undo.py": ("test_undo_equals_model",),
    "importers/test_checkpoints.py": ("test_any_damage_to_a_file", "test_any_damage_to_a_database"),
    "maintenance/test_autoprune.py": (
        "test_a_failed_prune_fails_no_save", "test_big_checkpoints_are_freed_too",
    ),
    "maintenance/test_concurrent_cleaning.py": (
        "test_cleaning_in_another_process_loses_nothing",
    ),
    "maintenance/test_erasure.py": (),
    "maintenance/test_gc.py": (
        "test_a_stream_goes_on_after_its_small_packs_were_packed", "test_people_work_while_gc_runs",
        "test_two_gcs_at_once", "test_what_is_left_loads_as_before",
        "test_what_was_freed_is_read_as_often_for_many_holes_as_for_few",
    ),
    "maintenance/test_retention.py": (
        "test_trees_stay_connected", "test_every_rule_removes_what_it_says",
        "test_automatic_retention_is_a_maximum",
    ),
    "mutants/test_mutants.py": (),
    "runs/test_messages.py": ("test_huge_conversations_take_linear_time",),
    "runs/test_resume.py": (),
    "runs/test_run_machine.py": (),
    "runs/test_runs.py": ("test_retention_keeps_what_a_run_goes_on_from",),
    "storage/files/test_backend.py": ("test_hostile_names",),
    "storage/postgres/test_backend.py": (),
    "storage/postgres/test_databases.py": (),
    "storage/postgres/test_group_commit.py": (),
    "storage/sqlite/test_damaged_keys.py": ("test_repair_puts_rows_of_items_in_order",),
    "storage/sqlite/test_lost_pages.py": (
        "test_rows_of_a_page_that_is_lost_are_found", "test_each_guard_of_salvage_is_needed",
        "test_a_blob_with_another_number_is_the_same_blob",
    ),
    "storage/sqlite/test_repair_of_pages.py": (
        "test_what_is_said_to_be_lost_is_what_does_not_load",
    ),
    "storage/test_costs.py": (
        "test_a_state_that_takes_too_much_memory_is_not_loaded", "test_operations_copy_no_data",
        "test_mutant_that_leaves_all_pieces", "test_pieces_are_put_together_again",
    ),
    "storage/test_interrupts.py": (),
    "storage/test_os_fork.py": (),
    "storage/test_same_on_every_backend.py": (),
    "support/test_skip_policy.py": (),
    "transfer/test_copy.py": (
        "test_a_copy_is_the_same", "test_an_interrupted_copy_goes_on", "test_there_and_back_again",
        "test_what_was_freed_here_stays_there",
    ),
    "transfer/test_copy_conflicts.py": (
        "test_a_copy_in_parts_is_a_session_at_any_time", "test_gc_between_copies",
        "test_gc_without_end_is_told", "test_parts_are_whole_whatever_was_freed",
    ),
}  # fmt: skip
