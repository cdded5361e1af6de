"""Faults in benchmarks/."""

from .mutation import Mutation

FAULTS = {
    "foreign: a failure of max-autotune ends the graph": Mutation(
        "benchmarks/foreign_runs/measuring.py",
        "            if name == AUTOTUNED:\n",
        "            if False:\n",
        "tests/test_foreign.py",
    ),
    "foreign: max-autotune is compared with Inductor": Mutation(
        "benchmarks/foreign_runs/measuring.py",
        "ratio = row.side(AUTOTUNED).kernel.median / mine.median",
        "ratio = row.side(AUTOTUNED).kernel.median / base.median",
        "tests/test_foreign.py",
    ),
    "decoding: every rank has the first part of the cache": Mutation(
        "benchmarks/rank_runs/decoding.py",
        "kept.chunk(ranks, dim=1)[rank].contiguous()",
        "kept.chunk(ranks, dim=1)[0].contiguous()",
        "tests/test_benchmark_tensor_parallel.py",
    ),
    "rekey: an answer about other code is not named": Mutation(
        "benchmarks/rekey.py",
        "if a != b]",
        "if a is b]",
        "tests/test_measured_store.py",
    ),
    "ranks: rows of another batch say what a GPU gains": Mutation(
        "benchmarks/pages/rank_figures.py",
        'same = ("name", "world", "batch")',
        'same = ("name", "world")',
        "tests/test_benchmark_distributed.py::test_the_share_of_the_gain_that_one_gpu_has",
    ),
    "ranks: blocks that are compiled alone are compared with the whole": Mutation(
        "benchmarks/pages/rank_figures.py",
        "COMPILED_ALIKE.get(how, ALONE)",
        "ALONE",
        "tests/test_benchmark_distributed.py::test_blocks_with_their_loss_keep_a_share_of_what_blocks_gain",
    ),
    "ranks: the gain alone is that of the first row, of any number of steps": Mutation(
        "benchmarks/pages/rank_figures.py",
        'key=lambda one: one["steps"] != row["steps"]',
        "key=lambda one: 0",
        "tests/test_benchmark_distributed.py::test_the_share_of_the_gain_that_one_gpu_has",
    ),
    "regions: a site is compared with itself": Mutation(
        "benchmarks/compiler/regions.py",
        "disagreement(ours, plain, ",
        "disagreement(ours, ours, ",
        "tests/test_survey.py",
    ),
    "regions: a failure of ours is skipped as one of torch": Mutation(
        "benchmarks/compiler/survey.py",
        "    tensors = [kwargs[name] for name in names]\n    try:\n",
        '    tensors = [kwargs[name] for name in names]\n    with skipped_where("ours"):\n'
        "        disagreements(step, *tensors, dynamic=dynamic)\n    try:\n",
        "tests/test_survey.py",
    ),
    "regions: gradients are not compared": Mutation(
        "benchmarks/compiler/regions.py",
        "if wanted and trained:",
        "if False:",
        "tests/test_survey.py",
    ),
    "layouts: no tile is mixed": Mutation(
        "benchmarks/launches/layouts.py",
        "if order[name][0] != len(shape) - 1]",
        "if False]",
        "tests/test_kernels.py::test_mixed_tiles",
    ),
    "layouts: no tile is torn": Mutation(
        "benchmarks/launches/layouts.py",
        "if len(found) > 1 and",
        "if len(found) > 2 and",
        "tests/test_kernels.py",
    ),
    "benchmarks: a mask is read from a result that does not show it": Mutation(
        "benchmarks/pattern_runs/measuring.py",
        'self.random and "residual" not in names',
        'self.random and work.pattern == "attention"',
        "tests/test_benchmarks.py",
    ),
    "benchmarks: flex_attention is asked for what it has no code for": Mutation(
        "benchmarks/pattern_runs/planning.py",
        "if other or name != FLEX",
        "if True",
        "tests/test_benchmark_patterns.py",
    ),
    "foreign check: far off is right": Mutation(
        "benchmarks/foreign_runs/interpreting.py",
        "far <= FACTOR * near + allowed",
        "near >= 0",
        "tests/test_check_foreign.py",
    ),
    "foreign check: an error of the pass is not told": Mutation(
        "benchmarks/foreign_runs/interpreting.py",
        "*filter(None, [record.error])",
        "*filter(None, [])",
        "tests/test_check_foreign.py",
    ),
    "foreign check: every tensor gets a gradient": Mutation(
        "benchmarks/foreign_runs/interpreting.py",
        "t.requires_grad_(i % 2 == 0)",
        "t.requires_grad_(True)",
        "tests/test_check_foreign.py",
    ),
    "foreign check: sizes are static": Mutation(
        "benchmarks/foreign_runs/interpreting.py",
        'dynamic=variation == "dynamic"',
        "dynamic=False",
        "tests/test_check_foreign.py",
    ),
    "foreign check: a missing gradient is right": Mutation(
        "benchmarks/foreign_runs/interpreting.py",
        "if (a is None) != (e is None):",
        "if a is not None and e is None:",
        "tests/test_check_foreign.py",
    ),
    "foreign check: eager code runs once": Mutation(
        "benchmarks/foreign_runs/interpreting.py",
        "near = max(others)",
        "near = others[0]",
        "tests/test_check_foreign.py",
    ),
}
