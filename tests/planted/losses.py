"""Faults in the kernels of losses and embeddings."""

from .mutation import Mutation

FAULTS = {
    "channels: a class beyond the last is taken": Mutation(
        "fusion_backend/kernels/loss/channel_cross_entropy.py",
        "tl.where((target >= 0) & (target < C), target, -1)",
        "target",
        "tests/test_channel_cross_entropy.py::test_a_class_out_of_bounds_is_an_assertion",
    ),
    "channels: the largest logit and the logarithm are rounded together": Mutation(
        "fusion_backend/kernels/loss/channel_cross_entropy.py",
        "(x - top - log)",
        "(x - (top + log))",
        "tests/test_channel_cross_entropy.py::test_logits_far_from_0_lose_no_more_than_in_eager",
    ),
    "channels: channels of -infinity alone come first": Mutation(
        "fusion_backend/kernels/loss/channel_cross_entropy.py",
        "sums *= tl.exp2((before - finite(top))",
        "sums *= tl.exp2((before - top)",
        "tests/test_channel_cross_entropy.py::test_infinities_and_nan_are_those_of_torch",
    ),
    "channels: smoothing forgets that the largest logit changed": Mutation(
        "fusion_backend/kernels/loss/channel_cross_entropy.py",
        "            weighted += (finite(before) - finite(top)) * all_weights\n",
        "",
        "tests/test_channel_cross_entropy.py::test_shapes_dtypes_and_forms",
    ),
    "channels: what the gradient reads is always kept": Mutation(
        "fusion_backend/kernels/loss/channel_cross_entropy.py",
        "kept = flat((2 * save, *target.shape), **empty)",
        "save, kept = True, flat((2, *target.shape), **empty)",
        "tests/test_channel_cross_entropy.py::test_without_a_gradient_nothing_is_kept",
    ),
    "channels: a few positions are not spread": Mutation(
        "fusion_backend/kernels/loss/channel_cross_entropy.py",
        "tiles_of(x, size) < MULTIPROCESSORS",
        "tiles_of(x, size) < 1",
        "tests/test_channel_cross_entropy.py::test_a_few_positions_are_spread_over_more_programs",
    ),
    "channels: targets may lie anyhow": Mutation(
        "fusion_backend/kernels/loss/channel_cross_entropy.py",
        "    if not dense(target, range(target.dim())):\n",
        "    if target is None:\n",
        "tests/test_channel_cross_entropy.py::test_what_the_kernel_refuses",
    ),
    "soft losses: the logarithms are added one after the other": Mutation(
        "fusion_backend/kernels/loss/soft_targets.py",
        "loss = mean + log_of_sums",
        "loss = (mean + log) - second",
        "tests/test_soft_losses.py::test_a_small_divergence_is_as_exact_as_in_eager",
    ),
    "soft losses: a probability of 0 makes a divergence NaN": Mutation(
        "fusion_backend/kernels/loss/soft_targets.py",
        "y = tl.where(p == 0.0, 0.0, y) if ZEROS else y",
        "y = y",
        "tests/test_soft_losses.py::test_infinities_and_nan_of_a_teacher_are_those_of_torch",
    ),
    "soft losses: a logarithm of 0 adds nothing": Mutation(
        "fusion_backend/kernels/loss/soft_targets.py",
        "y = tl.where(p == 0.0, 0.0, y) if ZEROS else y",
        "y = tl.where(p == 0.0, 0.0, y)",
        "tests/test_soft_losses.py::test_infinities_and_nan_of_a_teacher_are_those_of_torch",
    ),
    "soft losses: columns beyond the last count": Mutation(
        "fusion_backend/kernels/loss/soft_targets.py",
        "        term = tl.where(keep, term, 0.0)\n",
        "        term = term\n",
        "tests/test_soft_losses.py::test_a_teacher",
    ),
    "soft losses: the largest logit changes, and the terms do not": Mutation(
        "fusion_backend/kernels/loss/soft_targets.py",
        "terms = (terms + mass * moved) * fade",
        "terms = terms * fade",
        "tests/test_soft_losses.py::test_a_teacher",
    ),
    "soft losses: the sum of the probabilities is 1": Mutation(
        "fusion_backend/kernels/loss/soft_targets.py",
        "mass = first\n",
        "mass = 1.0\n",
        "tests/test_soft_losses.py::test_given_probabilities",
    ),
    "soft losses: the gradient of a teacher is not centred": Mutation(
        "fusion_backend/kernels/loss/soft_targets.py",
        "(y - x if DIVERGENCE else -x) - mean",
        "(y - x if DIVERGENCE else -x)",
        "tests/test_soft_losses.py::test_a_teacher",
    ),
    "soft losses: the gradient of smoothed targets is that of others": Mutation(
        "fusion_backend/kernels/loss/soft_targets.py",
        "dy *= 1.0 - tl.cast(smoothing, tl.float32)",
        "dy *= 1.0",
        "tests/test_soft_losses.py::test_given_probabilities",
    ),
    "soft losses: rows lie one after the other": Mutation(
        "fusion_backend/kernels/loss/soft_targets.py",
        "found or rows_of(x, y)",
        "rows_of(x.contiguous(), y.contiguous())",
        "tests/test_soft_losses.py::test_rows_where_they_lie",
    ),
    "soft losses: targets of fp64 pass": Mutation(
        "fusion_backend/kernels/loss/soft_targets.py",
        "or reject_dtypes(**{name: other})",
        "or None",
        "tests/test_soft_losses.py::test_what_the_kernels_refuse",
    ),
    "cross entropy: smoothing forgets the weights": Mutation(
        "fusion_backend/kernels/loss/cross_entropy.py",
        "loss += smooth / V * (weights * (log + top) - plain)",
        "loss += smooth * (log + top - plain / V)",
        "tests/test_softmax_kernels.py::test_cross_entropy",
    ),
    "embeddings: the row of padding gets a gradient": Mutation(
        "fusion_backend/kernels/embedding/gradient.py",
        "    if row == PADDING:\n        end = first\n",
        "",
        "tests/test_embeddings.py::test_rows_are_the_sums_of_their_tokens",
    ),
    "embeddings: the last row of a chunk is left out": Mutation(
        "fusion_backend/kernels/embedding/gradient.py",
        "        if last_end - last_start > CHUNK:\n",
        "        if last_end - last_start > count:\n",
        "tests/test_embeddings.py::test_rows_are_the_sums_of_their_tokens",
    ),
    "embeddings: a row of one chunk is read from two": Mutation(
        "fusion_backend/kernels/embedding/gradient.py",
        "    if end - first <= CHUNK:\n",
        "    if end - first < CHUNK:\n",
        "tests/test_embeddings.py::test_rows_are_the_sums_of_their_tokens",
    ),
    "embeddings: the first of a row's chunks is taken for a whole one": Mutation(
        "fusion_backend/kernels/embedding/gradient.py",
        "tl.where(chunk * CHUNK < first, 1, 0)",
        "0",
        "tests/test_embeddings.py::test_rows_are_the_sums_of_their_tokens",
    ),
    "embeddings: ids below 0 select nothing": Mutation(
        "fusion_backend/kernels/embedding/gradient.py",
        "torch.where(ids < 0, ids + v, ids)",
        "torch.where(ids < 0, 0, ids)",
        "tests/test_embeddings.py::test_ids_below_0_count_from_the_end",
    ),
    "embeddings: the number of tokens is fixed": Mutation(
        "fusion_backend/kernels/embedding/gradient.py",
        "    chunks = (count + CHUNK - 1) // CHUNK\n",
        "    chunks = int((count + CHUNK - 1) // CHUNK)\n",
        "tests/test_embeddings.py::test_launches_for_any_number_of_tokens",
    ),
    "token log-probabilities: the gradient has no temperature": Mutation(
        "fusion_backend/kernels/loss/token_log_probs.py",
        "tl.store(DX + col, dx * scale, col < V)",
        "tl.store(DX + col, dx, col < V)",
        "tests/test_token_log_probs_kernels.py::test_infinite_logits_at_a_temperature",
    ),
    "token log-probabilities: the token has no temperature": Mutation(
        "fusion_backend/kernels/loss/token_log_probs.py",
        "    logit *= scale\n",
        "",
        "tests/test_token_log_probs_kernels.py::test_infinite_logits_at_a_temperature",
    ),
}
