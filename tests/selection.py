"""What runs by default, and what only `python -m pytest --full` (`make test-all`) runs.

Tests of a product of dimensions (dtype × shape × layout × form) run a covering selection: every
pair of values of two dimensions stands in one combination at least, in which a fault of one
dimension, or of two together, shows. The other combinations carry the mark `full`.
"""

import itertools

import pytest

FULL = False  # set by conftest.py from the option

# Files, or functions, of many cases: by default every k-th case of each function runs, the first in
# any case. What runs less of kernels and patterns is run for every pattern by test_every_pattern.py
# (kernels against fp64, in fp32 and bf16, forward and backward) and by tests/graphs (what is
# recognised). The files of tests/oracle compare whole modules with eager; their cases share much.
SAMPLED = {
    "tests/test_attention.py": 3,
    "tests/test_attention_forms.py": 4,
    "tests/test_attention_models.py": 27,
    "tests/test_attention_spellings.py": 6,
    "tests/test_benchmark_models.py": 2,
    "tests/test_benchmarks.py": 2,
    "tests/test_channel_cross_entropy.py::test_spellings": 3,
    "tests/test_channel_kernels.py": 5,
    "tests/test_channels_last.py::test_results_inputs_and_strides_are_as_before": 2,
    "tests/test_channel_norm.py": 3,
    "tests/test_channel_norm_kernels.py": 3,
    "tests/test_check_pattern.py": 2,
    "tests/test_depth.py": 5,
    "tests/test_documents.py::test_kernels": 16,
    "tests/test_dropout.py": 4,
    "tests/test_dropout_mlp.py::test_a_block_trains": 3,
    "tests/test_dropout_mlp.py::test_a_checkpoint_drops_the_same_again": 2,
    # each part of the contract has a function of its own there, for every pattern
    "tests/test_every_pattern.py::test_pattern_keeps_the_contract": 16,
    # of every pattern the rewritten graph runs with kernels in each form; Inductor compiles some
    "tests/test_every_pattern.py::test_compiled_agrees": 8,
    "tests/test_filled.py::test_the_results_are_those_of_eager": 6,
    "tests/test_flash.py": 8,
    "tests/test_flash_dropout.py": 5,
    "tests/test_flash_shapes.py": 6,
    "tests/test_elementwise_kernels.py": 3,
    "tests/test_gate_spellings.py": 3,
    "tests/test_group_norm_rows.py::test_values_and_gradients": 12,
    "tests/test_kernels.py": 3,
    "tests/test_interpolate_bilinear.py::test_sizes_formats_and_dtypes": 4,
    "tests/test_max_pool.py::test_windows_shapes_formats_and_dtypes": 4,
    "tests/test_linear_cross_entropy.py": 6,
    "tests/test_models.py::test_model": 2,
    "tests/test_modulated_norm.py": 3,
    "tests/test_narrow_results.py::test_a_sum_of_two_dtypes": 10,
    "tests/test_narrow_results.py::test_vectors_in_fp32_beside_16_bits": 4,
    "tests/test_norm_act.py": 3,
    "tests/test_norm_kernels.py": 8,
    "tests/test_norm_spellings.py": 3,
    "tests/test_norm_rotary.py::test_larger_than_its_parts": 2,
    "tests/test_norm_rotary.py::test_queries_and_keys": 2,
    "tests/test_padded_logits.py": 2,
    "tests/test_patch_embedding.py": 2,
    "tests/test_product_kernels.py": 3,
    "tests/test_quantize_kernels.py": 3,
    "tests/test_recognition.py": 27,
    "tests/test_relative_bias.py": 8,
    "tests/test_scale.py": 5,
    "tests/test_sizes_of_values.py::test_head_sizes": 2,
    "tests/test_sizes_of_values.py::test_masks": 4,
    "tests/test_sizes_of_values.py::test_taken": 3,
    "tests/test_softmax_kernels.py": 8,
    "tests/test_spellings.py": 36,
    "tests/test_token_log_probs.py": 4,
    "tests/test_token_log_probs_kernels.py": 5,
    "tests/oracle/test_dynamic.py": 24,
    "tests/oracle/test_higher_order.py": 8,
    "tests/oracle/test_modes.py": 8,
    "tests/oracle/test_parameters.py": 16,
    "tests/ranks/test_async_tensor_parallel.py": 3,
    "tests/test_every_pattern.py::test_rewritten_graph_with_kernels_agrees": 8,
    "tests/test_foreign_code.py::test_graphs_run_and_differentiate": 6,
    "tests/test_interpolate_bilinear.py::test_every_output_is_counted_once": 10,
    "tests/oracle/test_inplace.py": 16,
    "tests/test_stored_gradients.py::test_beside_other_masks": 5,
    "tests/test_windows.py::test_taken": 4,
    "tests/test_documents.py::test_recognition": 4,
    "tests/test_batch_norm_training.py::test_a_block": 3,
    "tests/test_batch_norm_sum.py::test_a_block": 3,
    "tests/test_own_plans.py::test_results_and_gradients": 2,
    "tests/test_made_up_inputs.py::test_sites_agree_with_their_region": 12,
    "tests/ranks/test_bucket_cuts.py::test_any_way_to_read_weights_is_cut_and_agrees": 4,
    "tests/test_returned_values.py::test_under_distributed_data_parallel": 4,
    "tests/test_every_pattern.py::test_stacked_inputs": 4,
    "tests/test_stored_gradients.py::test_where_the_other_kernels_are_used": 3,
    "tests/test_embeddings.py::test_gradients_are_near_those_in_fp64": 6,
    "tests/test_embeddings.py::test_rows_are_the_sums_of_their_tokens": 3,
    "tests/test_batch_norm_sum.py::test_only_what_is_needed": 4,
    "tests/test_batch_norm_sum.py::test_pieces": 2,
    "tests/test_batch_norm_training.py::test_only_what_is_needed": 3,
    "tests/test_soft_loss_spellings.py": 3,
    "tests/test_sinks.py::test_taken": 4,
    "tests/ranks/test_all_reduce.py::test_results_and_gradients_are_those_of_eager": 12,
    "tests/test_every_pattern.py::test_permuted_and_expanded_inputs": 2,
    "tests/test_every_pattern.py::test_dynamic_shapes_are_recognised": 4,
    "tests/test_every_pattern.py::test_refused_tensors_fall_through": 4,
    "tests/test_every_pattern.py::test_gradient_of_some_inputs_only": 4,
    "tests/test_interpolate_bilinear.py::test_tiles_of_any_size": 4,
    "tests/test_masked_scatter.py::test_value_and_gradients_are_those_of_eager": 4,
    "tests/test_group_norm_rows.py::test_far_from_zero_and_not_finite": 3,
    "tests/test_measured_regions.py::test_what_counts_as_a_gain_beside_a_convolution": 2,
    "tests/test_neighbours.py::test_decision": 9,
    "tests/test_batch_norm_sum.py::test_code_between_that_could_tell": 3,
    "tests/test_shared_bias.py::test_batches_that_share_a_bias_are_added_up_in_parts": 3,
    "tests/test_linear_kernels.py::test_few_rows": 3,
    "tests/test_stored_gradients.py::test_a_bias_with_a_gradient": 3,
    "tests/ranks/test_cut_graphs.py::test_what_a_part_changes_is_given_to_it_and_the_next": 6,
    "tests/test_values_without_gradient.py::test_gradients_stop_where_they_do_in_eager": 3,
    "tests/test_batch_norm_sum.py::test_shapes_and_dtypes": 4,
    "tests/test_returned_values.py::test_gradients_are_those_of_eager_code": 3,
    "tests/test_documents.py::test_with_a_bias_and_as_chosen": 3,
    "tests/test_batch_norm_training.py::test_shapes_and_dtypes": 3,
    "tests/test_masks_around_bodies.py::test_a_mask_from_around_the_body": 3,
    "tests/test_norm_rotary.py::test_one_value_in_two_orders_is_two_values": 4,
    "tests/test_random_programs.py::test_a_random_program_comes_out_as_in_eager": 6,
    "tests/test_max_pool.py::test_tiles_of_any_size": 3,
    "tests/test_shared_bias.py::test_a_bias_that_repeats_over_the_batches": 2,
    "tests/ranks/test_cut_graphs.py::test_each_part_computes_it": 6,
    "tests/ranks/test_cut_graphs.py::test_what_else_decides_is_given_to_the_parts": 6,
    "tests/test_channel_cross_entropy.py::test_shapes_dtypes_and_forms": 3,
    "tests/test_verify_calls.py::test_the_call_is_as_without": 2,
    "tests/ranks/test_bucket_cuts.py::test_the_sites_of_the_whole_graph_are_found_in_its_parts": 2,
    "tests/test_autocast_on_cuda.py::test_found": 3,
    "tests/test_fallback.py::test_the_graph_is_compiled_as_if_we_had_never_been_there": 3,
    "tests/test_remembered.py::test_a_model_has_the_same_results_report_and_place_in_caches": 2,
}

IN_TWO_PROCESSES = "[alone] runs the command in one process; of two, tests/ranks has the trainings"
# Dear tests that are left to --full, each with what runs by default instead. A name without
# brackets is all cases of a function.
LEFT_OUT = {
    "tests/oracle/test_distributed.py::test_two_processes": "ranks/test_trainings.py with FSDP2 "
    "and tensor parallelism, and ranks/test_page.py with DDP",
    "tests/oracle/test_second_process_cache.py::test_edited_kernel": "test_edited_backward, and "
    "the key in test_fingerprint.py",
    "tests/test_attention.py::test_a_scale_that_only_a_run_knows": "test_dynamic_lengths",
    "tests/test_benchmark_distributed.py::test_contenders_train[fsdp]": IN_TWO_PROCESSES,
    "tests/test_benchmark_distributed.py::test_contenders_train[ddp]": IN_TWO_PROCESSES,
    "tests/test_benchmark_distributed.py::test_contenders_train[ddp-large-buckets]": (
        IN_TWO_PROCESSES
    ),
    "tests/test_benchmark_distributed.py::test_contenders_train[alone-blocks]": IN_TWO_PROCESSES,
    "tests/test_benchmark_distributed.py::test_contenders_train[fsdp-blocks]": IN_TWO_PROCESSES,
    "tests/test_benchmark_distributed.py::test_contenders_train[fsdp-loss]": IN_TWO_PROCESSES,
    "tests/test_benchmark_distributed.py::test_contenders_train[fsdp-checkpoint]": IN_TWO_PROCESSES,
    "tests/test_docs.py::test_the_commands_of_a_page_run[debugging.md]": "[command-line.md], and "
    "test_command_line.py",
    "tests/test_docs.py::test_the_commands_of_a_page_run[write-a-pattern.md]": "the same file in "
    "test_the_python_of_a_page_runs",
    "tests/test_edited_helpers.py::test_after_an_edit_nothing_is_taken_from_the_caches": "the key "
    "in test_fingerprint.py, the processes in oracle/test_second_process_cache.py",
    "tests/test_edited_helpers.py::test_what_was_loaded_is_what_runs": "the same",
    "tests/test_edited_helpers.py::test_without_an_edit_everything_is": "the same",
    "tests/test_flash_dropout.py::test_checkpoint_draws_the_same_again": "the test of this name in "
    "test_dropout.py",
    "tests/test_masks_around_bodies.py::test_through_inductor": "test_a_mask_from_around_the_body",
    "tests/test_models.py::test_every_layer_norm_is_found[gpt2]": "test_model[gpt2-inference]",
    "tests/test_models.py::test_every_layer_norm_is_found[llama]": "test_recognition.py",
    "tests/test_models.py::test_every_layer_norm_is_found[qwen3]": "test_recognition.py",
    "tests/test_models.py::test_every_layer_norm_is_found[vit]": "test_recognition.py",
    "tests/test_packaging.py::test_a_wheel_works_beside_a_folder_named_patterns": "the commands of "
    "a wheel, and test_a_bare_import_of_patterns_is_refused",
    "tests/test_process_state.py::test_four_threads_that_compile_first_at_once": "the other tests "
    "of threads in the file",
    "tests/ranks/test_cut_graphs.py::test_masks_of_transformers_are_proven_in_each_part[gpt2]": (
        "[gemma2]"
    ),
    "tests/ranks/test_cut_graphs.py::test_masks_of_transformers_are_proven_in_each_part[llama]": (
        "[gemma2]"
    ),
    "tests/ranks/test_decisions.py::test_all_take_one_of_two_answers_that_were_kept": (
        "the ranks of one process in test_measured_order.py"
    ),
    "tests/ranks/test_decisions.py::test_all_take_the_answer_of_the_rank_that_measures": (
        "the ranks of one process in test_measured_order.py and test_image_layout.py"
    ),
    "tests/ranks/test_tp_plans.py::test_the_results_are_those_of_the_whole_model": "the test of "
    "results and gradients in ranks/test_all_reduce.py",
    "tests/ranks/test_tp_plans.py::"
    "test_the_collectives_are_those_of_plain_inductor_on_both_ranks": "the test of this name in "
    "test_all_reduce.py",
    "tests/test_relative_bias.py::test_a_deep_chain": "test_scale.py and test_depth.py",
    "tests/test_relative_bias.py::test_compiled_by_inductor": "test_t5, and the pattern in "
    "test_every_pattern.py::test_compiled_agrees",
    "tests/test_scale.py::test_one_tensor_written_to_again_and_again": "test_deep_chains",
}


def left_out(node: str) -> bool:
    return not {node, node.partition("[")[0]}.isdisjoint(LEFT_OUT)


def sampled(names: list[tuple[str, str]]) -> list[bool]:
    """Which tests, each a file and a function of it, run by default."""
    seen: dict[tuple[str, str], int] = {}
    kept = []
    for file, function in names:
        seen[file, function] = seen.get((file, function), -1) + 1
        every = SAMPLED.get(f"{file}::{function}", SAMPLED.get(file, 1))
        kept.append(seen[file, function] % every == 0)
    return kept


def covering(*dimensions, strength: int = 2) -> list[tuple]:
    """Combinations in which every `strength` values of as many dimensions occur together.

    Of the product, in its order.
    """
    product = list(itertools.product(*map(range, map(len, dimensions))))
    found = covering_some(product, strength)
    return [tuple(d[i] for d, i in zip(dimensions, c, strict=True)) for c in found]


def covering_some(combinations: list[tuple], strength: int = 2) -> list[tuple]:
    """Of combinations of values that have a hash, in their order, enough to hold every `strength`
    values that stand together in one of them.

    Greedy and without chance: always the first combination that has most of what is missing.
    """
    width = len(combinations[0]) if combinations else 0
    axes = list(itertools.combinations(range(width), min(strength, width)))

    def parts(combination):
        return {(axis, tuple(combination[i] for i in axis)) for axis in axes}

    missing = set().union(*map(parts, combinations))
    found = set()
    while missing:
        best = max(combinations, key=lambda c: len(parts(c) & missing))
        missing -= parts(best)
        found.add(best)
    return [c for c in combinations if c in found]


def forms_by_default(forms: list[tuple]) -> list[tuple]:
    """Of the forms of a pattern, those that run by default: enough for every kind of each argument.
    In test_every_pattern.py the rewritten graph has every two kinds that go together.
    """
    return forms if FULL else covering_some(forms, strength=1)


def only_full(*values, **how):
    """A parameter that only `--full` runs."""
    return pytest.param(*values, marks=pytest.mark.full, **how)


def product(strength: int = 2, **dimensions):
    """Parametrize a test with a product: a covering selection of it by default, all with `--full`.

    @product(dtype=[torch.float32, torch.bfloat16], n=[1, 1000])
    def test(dtype, n): ...
    """
    values = [list(d) for d in dimensions.values()]
    indices = [range(len(v)) for v in values]
    chosen = set(covering(*indices, strength=strength))
    combinations = [
        pytest.param(
            *(v[i] for v, i in zip(values, c, strict=True)),
            marks=() if c in chosen else pytest.mark.full,
        )
        for c in itertools.product(*indices)
    ]
    return pytest.mark.parametrize(list(dimensions), combinations)
