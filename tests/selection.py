"""Which tests `make test-fast` leaves out, and why; `tests/conftest.py` marks them.

An entry is a folder, a file, or a function of a file. A test that starts a process or a server fails unless it is
marked, so `PROCESS` is complete; what is `LONG` was measured.
"""

from __future__ import annotations

from typing import Final

PROCESS: Final = (
    "tests/analyzers/tools/test_samples.py::test_a_dot_product_wakes_no_other_thread",
    "tests/backends/test_all_trackers.py",
    "tests/backends/test_mlflow.py",
    "tests/backends/test_otel.py",
    "tests/backends/test_tensorboard.py::test_case_14_full_disk_takes_a_batch_wholly_or_not_at_all",
    "tests/backends/test_tensorboard.py::test_write_is_durable_without_close",
    "tests/backends/test_trackio.py::test_a_run_that_is_sent_to_a_server_gets_its_rows",
    "tests/backends/test_trackio.py::test_case_07_a_killed_training_is_completed",
    "tests/backends/test_wandb.py",
    "tests/backends/test_wandb_show.py",
    "tests/capture/test_capture.py::test_a_killed_training_leaves_a_whole_capture_or_none",
    "tests/cli/test_cli.py",
    "tests/cli/test_mcp_server.py",
    "tests/contracts/test_alerts.py",
    "tests/contracts/test_backends.py",
    "tests/delivery/journal/test_journal.py::test_case_14_full_disk_keeps_whole_rows_only",
    "tests/delivery/test_at_exit.py::test_a_training_that_the_user_interrupts_is_said_to_be_interrupted",
    "tests/delivery/test_at_exit.py::test_exit_closes_every_manager",
    "tests/delivery/test_at_exit.py::test_thread_that_trains_while_the_interpreter_ends_is_left_alone",
    "tests/delivery/test_forks.py",
    "tests/delivery/test_termination.py",
    "tests/delivery/test_locks.py::test_forked_copy_does_not_keep_a_directory",
    "tests/delivery/test_locks.py::test_training_of_a_second_process_keeps_the_files_of_the_first",
    "tests/delivery/test_locks.py::test_two_processes_keep_apart",
    "tests/delivery/test_preflight.py",
    "tests/delivery/test_status.py",
    "tests/delivery/test_subprocess.py",
    "tests/distributed/test_equality.py",
    "tests/distributed/test_on_device.py",
    "tests/docs/test_blocks.py::test_blocks_run",
    "tests/docs/test_site.py::test_every_page_is_built",
    "tests/examples/test_custom_backend.py",
    "tests/examples/test_single_run.py::test_one_word_chooses_the_tracker",
    "tests/faults",
    "tests/fingerprints/test_replicas.py",
    "tests/functional/test_import.py",
    "tests/gradients/native/test_engine.py::test_a_forked_child_can_measure_and_scale",
    "tests/gradients/native/test_engine.py::test_torchs_own_threads_help",
    "tests/gradients/native/test_engine.py::test_without_a_compiler_the_engine_is_missing",
    "tests/gradients/native/test_threads.py::test_a_forked_child_has_no_team",
    "tests/gradients/triton/test_compilation.py",
    "tests/gradients/triton/test_interpreter.py",
    "tests/gradients/native/test_threads.py::test_a_forked_child_that_imports_us_first_has_no_team",
    "tests/integrations/test_lightning_loggers.py::test_one_run_holds_the_users_metrics_and_ours_and_goes_on",
    "tests/integrations/test_stable_baselines3.py::test_ars_learns",
    "tests/integrations/test_transformers.py::test_case_04_wandb_has_one_run_and_one_norm",
    "tests/integrations/test_transformers.py::test_mlflow_has_one_run",
    "tests/pages/test_pictures.py::test_pictures_leave_the_global_state_alone",
    "tests/seeds/test_gain_document.py::test_the_seven_examples_run",
    "tests/step/test_fast_path.py::test_a_forked_copy_trains_on",
    "tests/test_architecture.py",
    "tests/test_house.py::test_the_folder_of_an_analyzer_can_be_deleted",
    "tests/test_import.py",
    "tests/test_manager.py::TestRecording::test_the_run_names_its_plugins",
    "tests/test_manager.py::test_copy_of_a_training_leaves_no_files",
    "tests/test_selection.py::test_a_test_that_starts_a_process_has_to_be_marked",
)
"""Tests that start a process, a server or a browser."""

LONG: Final = (
    "tests/analyzers/flow/test_flow.py::test_warm_up_is_no_low_rate",
    "tests/analyzers/flow/test_loss_scale.py",
    "tests/analyzers/flow/test_part.py::test_a_group_whose_first_step_made_it_worse_is_named",
    "tests/analyzers/gain/test_monitor.py::test_compiled_blocks_are_watched",
    "tests/analyzers/recurrent/test_dynamics.py::test_known_system",
    "tests/analyzers/recurrent/test_mutations.py::test_naive_version_breaks_known_systems",
    "tests/analyzers/recurrent/test_recurrent.py::test_beyond_512_dimensions_eigenvalues_come_from_products",
    "tests/analyzers/recurrent/test_recurrent.py::test_of_a_large_state_the_outermost_eigenvalues_are_known",
    "tests/analyzers/recurrent/test_recurrent.py::test_training_is_bitwise_the_same_with_the_analyzer_at_every_step",
    "tests/analyzers/test_looks.py",
    "tests/analyzers/test_observer_effect.py",
    "tests/analyzers/test_odd_models.py::test_all_analyzers_look_and_change_nothing",
    "tests/analyzers/test_odd_models.py::test_what_is_picked_and_why",
    "tests/backends/test_all_trackers.py",
    "tests/backends/test_otel.py",
    "tests/backends/test_trackio.py",
    "tests/backends/test_json.py::test_global_file_has_seven_lists_of_equal_length",
    "tests/delivery/test_at_exit.py",
    "tests/delivery/test_interrupts.py::test_manager_that_its_own_worker_collects_is_closed",
    "tests/distributed/test_counts.py::test_a_model_of_70_billion_parameters_on_1024_ranks",
    "tests/docs/test_architecture_page.py::test_the_numbers_of_modules_were_counted",
    "tests/docs/test_blocks.py",
    "tests/docs/test_site.py",
    "tests/examples",
    "tests/gradients/native/test_engine.py::test_large_tensors_are_split_without_a_gap",
    "tests/gradients/native/test_threads.py::test_looks_run_in_one_thread_and_the_training_in_all",
    "tests/gradients/test_deviations.py::test_the_variance_is_exact_whatever_the_mean",
    "tests/health/test_rule_engine.py::test_steps_that_are_remembered_together_are_as_if_each_was_judged",
    "tests/integrations/test_accelerate.py",
    "tests/integrations/test_lightning.py",
    "tests/integrations/test_lightning_cli.py",
    "tests/integrations/test_lightning_loggers.py",
    "tests/integrations/test_stable_baselines3.py",
    "tests/integrations/test_transformers.py",
    "tests/pages/test_at_close.py",
    "tests/pages/test_documents.py::test_several_runs_share_the_bound",
    "tests/pages/test_documents.py::test_the_bound_holds_whatever_a_run_has",
    "tests/pages/test_pictures.py",
    "tests/pages/test_recorded.py",
    "tests/step/test_eager.py",
    "tests/step/test_fast_path.py::test_a_handler_of_a_signal_may_close_within_a_step",
    "tests/step/test_fast_path.py::test_reports_do_not_tell_fast_steps_from_others",
    "tests/step/test_fast_path.py::test_rows_are_those_of_steps_looked_at_closely",
    "tests/step/test_fast_path.py::test_whatever_comes_between_fast_steps",
    "tests/step/test_flight_recorder.py::test_a_report_that_is_kept_keeps_no_model_alive",
    "tests/step/test_history.py::test_a_summary_may_be_asked_for_in_other_threads",
    "tests/step/test_on_device.py::test_operations_do_not_grow_with_the_number_of_tensors",
    "tests/support/test_interrupts.py::test_training_ends_wherever_the_signal_strikes",
    "tests/test_cases.py",
    "tests/test_demo.py::test_training_learns_in_spite_of_a_bad_batch",
    "tests/test_manager.py::test_flush_after_the_close_waits_for_no_worker",
    "tests/test_pictures.py",
)
"""Tests that train for seconds, draw pictures, or load a framework."""


def marks_of(node: str) -> list[str]:
    """Return the marks of a test by its id."""
    name = node.partition("[")[0]
    return [mark for mark, entries in (("process", PROCESS), ("long", LONG)) if any(_is_of(name, e) for e in entries)]


def _is_of(name: str, entry: str) -> bool:
    return name == entry or name.startswith((f"{entry}/", f"{entry}::"))
