"""The faults that this project survives, each with the tests that show it."""

from __future__ import annotations

import ast
from pathlib import Path

from each import each

TESTS = {path.stem: path for path in Path(__file__).parents[1].rglob("test_*.py")}

#: Fault -> (what is expected then, the tests of it: file without its "test_" and ".py", and the function's name).
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    # --- environment ---
    "no NVML or driver": (
        "works without it, says so",
        (
            "budget_device::test_no_package_no_driver_no_gpu_all_work_without_and_say_so",
            "budget_device::test_without_nvml_torch_is_asked",
        ),
    ),
    "CPU build of torch": ("works without it, says so", ("budget_device::test_a_cpu_build_beside_a_gpu_is_said",)),
    "driver/library mismatch": (
        "clear error with advice",
        (
            "budget_device::test_a_driver_that_does_not_answer_is_a_clear_error",
            "techniques_optimizers::test_a_library_that_cannot_be_imported_is_named_with_the_reason",
        ),
    ),
    "MIG": (
        "the slice's size, never the parent's",
        ("budget_device::test_a_mig_slice_counts_with_its_own_size_never_the_parents",),
    ),
    "unified memory": ("host RAM, labelled", ("budget_device::test_unified_memory_is_the_hosts_and_labelled",)),
    "GPU not in the catalogue": (
        "measured total",
        ("budget_device::test_a_card_outside_the_catalogue_counts_as_measured",),
    ),
    "CUDA_VISIBLE_DEVICES empty, UUID, permuted": (
        "right device or clear error",
        (
            "budget_device::test_visible_devices_are_read_as_cuda_reads_them",
            "budget_device::test_the_gpu_is_the_one_that_cuda_means",
            "budget_device::test_hidden_gpus_are_a_clear_error",
            "budget_device::test_a_uuid_that_names_no_gpu_is_a_clear_error",
        ),
    ),
    "other processes on the GPU": (
        "budget is what is free, they are named",
        (
            "budget_device::test_what_is_free_counts_and_not_the_total",
            "budget_device::test_other_processes_are_named_with_their_bytes",
        ),
    ),
    "memory taken after planning": (
        "seen at the first steps, warned, no silent retry loop",
        (
            "lightning_watching::test_memory_that_others_take_after_the_plan_is_said_before_the_first_step",
            "lightning_recovery::test_several_notches",
        ),
    ),
    "allocator settings (expandable segments, cudaMallocAsync, memory fraction)": (
        "modelled or said to be unsupported",
        (
            "allocator::test_expandable_segments_grow_by_pages_of_20_mib",
            "budget_device::test_the_async_allocator_is_said_to_be_unsupported",
            "budget_device::test_a_memory_fraction_caps_the_budget_and_is_said",
            "allocator_settings::test_no_caching_at_all_is_not_modelled",
            "plan::test_the_environment_s_allocator_settings_are_those_of_the_plan",
        ),
    ),
    "host RAM limit (cgroup)": (
        "caps offload",
        (
            "budget_host::test_a_version_2_limit_binds_and_page_cache_can_be_taken_back",
            "budget_host::test_a_version_1_limit_binds",
            "plan_search::test_host_memory_bounds_what_is_offloaded",
        ),
    ),
    # --- inputs ---
    "batch 0, negative, bool, float, NaN, 2**63": (
        "ValueError before any work",
        ("hard_cases::test_nonsense_batch_sizes_are_refused_before_any_work",),
    ),
    '"24GB", "24GiB", "inf", "-1GiB"': (
        "units exact, nonsense refused",
        ("units::test_an_amount_is_exact", "units::test_nonsense_is_refused"),
    ),
    "dataset smaller than the batch, drop_last": (
        "capped, an epoch without steps refused",
        (
            "lightning_capture::test_a_dataset_smaller_than_the_batch_is_the_batch",
            "lightning_capture::test_loaders_that_are_refused",
            "mmengine_guard::test_a_dataset_smaller_than_the_batch",
        ),
    ),
    "iterable dataset": (
        "works",
        (
            "lightning_capture::test_a_stream_stays_where_it_is",
            "lightning_growth::test_datamodules_iterable_datasets_and_collections",
        ),
    ),
    "YAML `!!python/object`": (
        "refused, payload provably not run",
        ("config_file::test_tags_are_refused_and_nothing_is_run",),
    ),
    "alias bomb, 1 GB config": (
        "refused in bounded time and memory",
        (
            "config_file::test_an_alias_bomb_is_refused_at_once",
            "config_file::test_a_config_of_more_than_1_mb_is_not_even_read",
        ),
    ),
    "unknown key": (
        "error with a suggestion",
        ("guard::test_what_makes_no_sense_is_refused", "settings::test_slips_in_a_file_are_named_with_it"),
    ),
    "pickle checkpoint with code": (
        "refused, side effect absent",
        (
            "estimate_folder::test_pickles_are_named_and_never_loaded",
            "mmengine_guard::test_a_checkpoint_with_code_is_refused",
            "allocator_recordings::test_code_in_a_snapshot_is_not_run",
        ),
    ),
    "safetensors truncated, header length 2**63, over 100 MB, not UTF-8, not JSON, offsets overlapping, negative or "
    "past the end, shape x dtype not equal to the size": (
        "typed error, bounded memory",
        (
            "estimate_folder::test_hostile_headers",
            "estimate_folder::test_a_header_that_says_more_than_the_file_has_takes_no_memory",
        ),
    ),
    "zero-size tensors, scalar parameters, empty model": (
        "valid estimate",
        (
            "hard_cases::test_an_empty_model_and_scalar_parameters_are_valid",
            "estimate_folder::test_scalars_and_empty_tensors_are_sound",
        ),
    ),
    "tied weights": ("counted once", ("hard_cases::test_tied_weights_are_counted_once",)),
    "lazy modules": ("clear refusal", ("hard_cases::test_lazy_modules_are_refused_with_advice",)),
    # --- simulation ---
    "data-dependent operator": (
        "placeholders where safe, else operator and line are named and a bound answers, which never fits by default",
        (
            "hard_cases::test_questions_about_the_loss_get_an_answer_that_keeps_the_loop_going",
            "hard_cases::test_a_way_that_a_computed_value_decides_is_followed_and_said",
            "hard_cases::test_a_size_that_depends_on_weights_is_counted_at_its_bound_and_said",
            "hard_cases::test_an_operator_that_cannot_be_tried_gives_a_lower_bound_that_never_fits",
        ),
    ),
    "custom operator without a fake kernel": (
        "the same",
        (
            "hard_cases::test_an_operator_without_symbolic_kernel_is_tried_on_zeros_and_said",
            "hard_cases::test_an_operator_that_cannot_be_tried_gives_a_lower_bound_that_never_fits",
        ),
    ),
    "the user's exception in forward": (
        "the original traceback, model untouched",
        (
            "hard_cases::test_the_users_exception_comes_with_the_users_traceback",
            "left_behind::test_an_exception_leaves_nothing_behind_and_comes_out_unchanged",
            "lightning_guard::test_the_users_own_error_is_named_by_its_line_and_keeps_its_traceback",
        ),
    ),
    "hooks with side effects": (
        "state restored or warned",
        (
            "left_behind::test_hooks_of_other_libraries_survive",
            "left_behind::test_hooks_that_write_to_their_module_leave_no_trace",
        ),
    ),
    "KeyboardInterrupt at any point": (
        "state identical afterwards",
        ("left_behind::test_ctrl_c_at_any_moment_leaves_nothing_behind",),
    ),
    "after a trace: parameters, grads, buffers, modes, requires_grad, RNG of torch, numpy, python, loader position, "
    "default dtype and device, hooks": (
        "all equal; training with a guard that changes nothing is bit-identical to training without",
        (
            "left_behind::test_a_trace_leaves_nothing_behind",
            "left_behind::test_training_after_a_trace_is_bit_identical_to_training_without",
            "lightning_guard::test_a_guard_that_has_nothing_to_do_is_bit_identical",
            "mmengine_guard::test_a_training_that_fits_is_bit_identical",
        ),
    ),
    "a trace of zero operations": (
        "an error, not success",
        ("hard_cases::test_a_step_without_operations_is_an_error",),
    ),
    "compiled, FSDP or DeepSpeed models": (
        "supported path or explicit refusal",
        (
            "hard_cases::test_compiled_models_are_counted_as_eager_and_said",
            "hard_cases::test_sharded_models_are_refused_with_advice",
            "lightning_layouts::test_other_strategies_are_refused_by_name",
            "accelerate_launch::test_sharded_launches_are_refused_by_name",
        ),
    ),
    # --- deciding ---
    "ranks with different free memory": (
        "the least counts, one plan on all",
        (
            "lightning_ddp::test_the_least_memory_counts_and_the_training_stays_the_same",
            "mmengine_configs::test_two_processes_hold_one_plan",
        ),
    ),
    "one rank fails while planning": (
        "all stop with the same error, no hang",
        ("lightning_ddp::test_one_rank_cannot_plan_and_all_train_as_written",),
    ),
    "accumulation keeps the effective batch": (
        "learning rate untouched; changed: scaled once; resumed: not again",
        (
            "lightning_microbatches::test_same_weights_and_learning_rates",
            "lightning_growth::test_batches_grow_and_rates_follow_linearly",
            "lightning_growth::test_a_checkpoint_of_a_grown_run_holds_the_rates_as_written",
            "mmengine_guard::test_a_checkpoint_of_a_grown_run_resumed_without_growth",
            "accelerate_launch::test_a_growing_batch_scales_rates_once_also_over_a_checkpoint",
        ),
    ),
    "auto_scale_lr or LR finder active": (
        "no double scaling",
        (
            "lightning_growth::test_learning_rate_finder_is_not_doubled",
            "mmengine_guard::test_auto_scale_lr_is_left_alone_by_accumulation",
        ),
    ),
    "bf16 on a GPU without it, fp16 without a scaler": (
        "never planned",
        (
            "plan::test_the_precision_is_one_that_the_gpu_has",
            "plan_search::test_the_mixed_precision_that_the_gpu_has",
            "lightning_guard::test_float16_whose_scaler_does_not_work_with_the_optimizer_is_never_planned",
        ),
    ),
    "nothing fits": (
        "exit 1 and the nearest miss in bytes, nothing changed",
        (
            "plan_search::test_nothing_fits_changes_nothing_and_names_the_nearest_miss",
            "cli_plan::test_json_and_exit_codes",
            "lightning_guard::test_nothing_fits",
        ),
    ),
    "more batch, more budget": (
        "more batch never predicts less memory, more budget never a worse plan (property tests)",
        (
            "simulate_law::test_more_batch_never_asks_for_fewer_bytes",
            "plan_search::test_more_budget_never_gives_a_costlier_plan",
            "plan_search::test_more_budget_never_grows_less",
        ),
    ),
    "the callback registered twice": (
        "once",
        ("lightning_guard::test_registered_twice_works_once", "mmengine_configs::test_two_guards_are_one"),
    ),
    # --- running ---
    "real OOM in step 1, in step 1,000, in validation, on one rank only": (
        "recovered, effective batch kept, no batch lost or repeated; or stopped, with the plan to use",
        (
            "lightning_recovery::test_the_batch_runs_again_in_smaller_micro_batches",
            "watch_recovery::test_memory_that_runs_out_in_the_thousandth_step",
            "lightning_recovery::test_what_is_not_repeated_ends_with_the_plan_to_use",
            "lightning_ranks::test_a_rank_that_runs_out_of_memory_says_the_plan_to_use_and_its_launcher_ends_the_other",
            "mmengine_recovery::test_what_cannot_be_helped_ends_clearly",
        ),
    ),
    "CUDA error that is no OOM": (
        "raised as it is",
        (
            "lightning_recovery::test_another_error_is_raised_as_it_is",
            "mmengine_recovery::test_another_error_is_raised_as_it_is",
            "watch_oom::test_is_something_else",
        ),
    ),
    "read-only folder, full disk, broken pipe, no TTY, non-UTF-8 locale": (
        "result still delivered",
        (
            "report::test_a_folder_that_cannot_be_written_is_a_warning",
            "report::test_a_full_disk_is_a_warning_and_the_old_report_stays",
            "report::test_a_closed_stream_ends_nothing",
            "report::test_any_encoding_is_served",
            "estimate::test_a_terminal_that_knows_only_ascii_gets_its_answer",
            "watch_measured::test_a_folder_that_cannot_be_written_is_fine",
        ),
    ),
    "launch's child killed": (
        "128 + signal; SIGINT forwarded",
        ("accelerate_launch::test_signals_end_it_cleanly",),
    ),
    "two runs write one report": (
        "atomic rename",
        ("report::test_two_runs_that_write_one_report_leave_one_of_them_whole",),
    ),
    "framework missing": (
        "ImportError naming the extra; the core still imports",
        (
            "packaging::test_a_missing_framework_is_an_import_error_that_says_what_to_install",
            "lightning_guard::test_without_lightning_the_extra_is_named_and_the_core_imports",
        ),
    ),
}


def functions(file: Path) -> set[str]:
    """The tests that a file defines; nothing of it is run."""
    return {node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_all_of_them_are_there() -> None:
    assert len(FAULTS) == 45


@each("fault", FAULTS)
def test_every_fault_has_tests_that_exist(fault: str) -> None:
    expected, tests = FAULTS[fault]
    assert expected
    assert tests
    for test in tests:
        file, _, name = test.partition("::")
        assert name in functions(TESTS[f"test_{file}"]), f"no such test: {test}"


def test_a_test_that_is_missing_would_be_noticed() -> None:
    assert "test_of_nothing" not in functions(Path(__file__))
    assert "test_all_of_them_are_there" in functions(Path(__file__))
