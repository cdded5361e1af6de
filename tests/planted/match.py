"""Faults in fusion_backend/match, extend and ops."""

from .mutation import Mutation

FAULTS = {
    "operator: what a kernel saved is a constant in a second derivative": Mutation(
        "fusion_backend/ops/operator.py",
        "if torch.is_grad_enabled() and (op.saves or not op.backward_plain):",
        "if False:",
        "tests/test_linear_kernels.py",
    ),
    "matcher: what a result is rounded to must stand in the graph as well": Mutation(
        "fusion_backend/match/templates.py",
        "return tuple(map(peel, roots)), size",
        "return roots, size",
        "tests/test_products_on_cuda.py",
    ),
    "matcher: the dtype of the result is not compared": Mutation(
        "fusion_backend/match/outcomes.py",
        "            if dtype != want.dtype:\n",
        "            if False:\n",
        "tests/test_rewrite.py",
    ),
    "matcher: the shape of the result is not compared": Mutation(
        "fusion_backend/match/outcomes.py",
        "            if device != want.device or not same(",
        "            if device != want.device and not same(",
        "tests/test_reasons.py",
    ),
    "unify: an argument may be two different values": Mutation(
        "fusion_backend/match/unify.py",
        "not one_value(graph_value(peel(before)), graph_value(peel(now))) or ("
        "\n            had.pinned and pinned and not one_value(before, now)\n        )",
        "False",
        "tests/test_canonical.py tests/graphs",
    ),
    "unify: one operator may stand for two of the pattern": Mutation(
        "fusion_backend/match/unify.py",
        "        if env.get(g, p) is not p:",
        "        if False:",
        "tests/test_canonical.py tests/graphs",
    ),
    "unify: every reciprocal counts as exact": Mutation(
        "fusion_backend/match/unify.py",
        "or not (self.reciprocal or abs(math.frexp(c.attr)[0]) == 0.5)",
        "or False",
        "tests/graphs",
    ),
    "matcher: a site may start at a copy of its result": Mutation(
        "fusion_backend/match/matcher.py",
        "if any(distance == 0 or memory.isdisjoint(storages(a)) for a in equal):",
        "if any(distance == 0 for a in equal):",
        "tests/test_names_of_values.py",
    ),
    "matcher: a site may start where its result is cast back": Mutation(
        "fusion_backend/match/matcher.py",
        "            again = again or unwidened(e) is not e  #",
        "            #",
        "tests/test_casts_between_sites.py",
    ),
    "matcher: an argument is always read before its roundings": Mutation(
        "fusion_backend/match/arguments.py",
        "    return (unwidened, peel, unchanged) if rounded else (peel, unchanged)\n",
        "    return (peel, unchanged)\n",
        "tests/test_casts_between_sites.py",
    ),
    "template: a scalar is not traced twice": Mutation(
        "fusion_backend/match/templates.py",
        "    if repr(roots) != repr(second[0]):\n",
        "    if False:\n",
        "tests/test_user_pattern.py",
    ),
    "op: the gradient of the reference ignores the incoming one": Mutation(
        "fusion_backend/ops/operator.py",
        "[g for _, g in pairs],\n                    allow_unused",
        "[torch.ones_like(g) for _, g in pairs],\n                    allow_unused",
        "tests/test_backend.py",
    ),
    "op: a seed of its own in the backward": Mutation(
        "fusion_backend/ops/operator.py",
        "            inputs = [a.view_as(a) if need else a for a, need in zip(flat, needs, "
        "strict=True)]\n",
        "            inputs = [a.view_as(a) if need else a for a, need in zip(flat, needs, "
        "strict=True)]\n"
        "            inputs[-1:] = [draw(i.device) if self.op.seed_arguments else i for i in "
        "inputs[-1:]]\n",
        "tests/test_dropout.py::test_compiled_value_and_gradients",
    ),
    "sum of batch norms: the bias is not asked for by z_bias alone": Mutation(
        "fusion_backend/ops/operator.py",
        "                needed[other] |= needed[name]\n",
        "                pass\n",
        "tests/test_batch_norm_sum.py",
    ),
    "matches have one another's results": Mutation(
        "fusion_backend/match/matcher.py",
        "key=lambda n: n in taken",
        "key=lambda n: False",
        "tests/test_batch_norm_training.py",
    ),
    "other results are looked for around any argument": Mutation(
        "fusion_backend/match/matcher.py",
        "isinstance(b, Bound) and name in names]",
        "isinstance(b, Bound)]",
        "tests/test_batch_norm_training.py",
    ),
    "channels: weights without a gradient get an empty one": Mutation(
        "fusion_backend/ops/operator.py",
        "found = [None if missing(g, t) else g for",
        "found = [g for",
        "tests/test_channel_cross_entropy.py::test_weights_that_are_detached_have_the_gradient_of_their_other_readers",
    ),
    "narrow: the reference is not rounded": Mutation(
        "fusion_backend/ops/operator.py",
        "return first.to(narrowed_to(narrow) or first.dtype), *rest",
        "return first, *rest",
        "tests/test_narrow_results.py",
    ),
    "a sum of two dtypes: the gradient of the residual is that of x": Mutation(
        "fusion_backend/ops/operator.py",
        "            if gradients[name] is None\n        }\n        by_field",
        "        }\n        by_field",
        "tests/test_missing_gradients.py",
    ),
    "generated rows: any number of operations is taken": Mutation(
        "fusion_backend/extend/generated_rows.py",
        "    if len(program.statements) > MOST:\n",
        "    if False:\n",
        "tests/test_generated_rows.py::test_what_a_kernel_does_not_take_is_said",
    ),
    "extended: a value that others read is inside": Mutation(
        "fusion_backend/extend/extended.py",
        "                if all(u in added for a in added if a is not n for u in self.users(a)):\n",
        "                if True:\n",
        "tests/test_extended.py::test_code_is_added_as_far_as_one_value_is_read",
    ),
    "extended: an argument that others read is inside": Mutation(
        "fusion_backend/extend/extended.py",
        "alone = a not in self.inside and self.inside.issuperset(a.users)",
        "alone = a not in self.inside",
        "tests/test_extended.py::test_an_argument_that_others_read_stays",
    ),
    "extended: a softmax over any dimension is one of rows": Mutation(
        "fusion_backend/extend/translate.py",
        'return e.op if e.attr == ACROSS[e.op] else ""',
        "return e.op",
        "tests/test_extended.py::test_other_dimensions_are_no_operations_of_rows",
    ),
    "extended: nothing in front is added": Mutation(
        "fusion_backend/extend/extended.py",
        "        self.follow_arguments()\n",
        "",
        "tests/test_extended.py::test_the_code_around_is_part_of_the_kernel",
    ),
    "extended: any root is taken": Mutation(
        "fusion_backend/extend/extended.py",
        ' or e.op == "sqrt":',
        ":",
        "tests/test_extended.py::test_code_with_other_values_or_gradients_stays",
    ),
    "extended: any minimum and maximum is taken": Mutation(
        "fusion_backend/extend/extended.py",
        '        if e.op in ("maximum", "minimum") and not edges:\n',
        "        if False:\n",
        "tests/test_extended.py::test_code_with_other_values_or_gradients_stays",
    ),
    "extended: any number is taken": Mutation(
        "fusion_backend/extend/translate.py",
        "    if math.isfinite(number) and number and not",
        "    if False and not",
        "tests/test_extended.py::test_code_with_other_values_or_gradients_stays",
    ),
    "extended: sums of what is one number are taken": Mutation(
        "fusion_backend/extend/extended.py",
        "            columns_of(program, {k: self.is_wide(a) for k",
        "            ({k: self.is_wide(a) for k",
        "tests/test_extended.py::test_sums_over_what_is_one_number_for_a_row",
    ),
    "extended: code in fp16 is taken": Mutation(
        "fusion_backend/extend/extended.py",
        " and value.dtype != torch.float16",
        "",
        "tests/test_extended.py::test_in_fp16_a_value_between_may_be_infinite",
    ),
    "generated rows: any dtype is taken": Mutation(
        "fusion_backend/extend/generated_rows.py",
        "        if t.dtype not in (DTYPES",
        "        if False and t.dtype not in (DTYPES",
        "tests/test_generated_rows.py::test_other_kinds_of_numbers_are_refused",
    ),
    "extended: any options want it": Mutation(
        "fusion_backend/extend/extended.py",
        '(options.gate != "always" or bool(only))',
        "True",
        "tests/test_extended.py::test_options_that_want_it",
    ),
    "extended: gradients that nobody wants are asked for": Mutation(
        "fusion_backend/extend/generated_rows.py",
        " and saved.needs[n])",
        " and not saved.needs[n])",
        "tests/test_extended.py::test_only_some_arguments_require_a_gradient",
    ),
    "extended: code in another grad mode is added": Mutation(
        "fusion_backend/extend/extended.py",
        " or state(n) != state(self.base.roots[0]):",
        ":",
        "tests/test_extended.py::test_code_in_another_grad_mode_stays",
    ),
    "extended: code of another match is extended": Mutation(
        "fusion_backend/extend/extended.py",
        "            if any(extent.inside <= other for other in others):\n",
        "            if False:\n",
        "tests/test_extended.py::test_what_is_not_elementwise_code_of_one_result_stays",
    ),
    "extended: casts of arguments are computed": Mutation(
        "fusion_backend/extend/extended.py",
        " or self.keeps_its_value(a):",
        ":",
        "tests/test_extended.py::test_compiled_blocks_train_as_eager_ones",
    ),
    "extended: casts inside the match are computed": Mutation(
        "fusion_backend/extend/extended.py",
        "if peel(canon.of[n]) not in read}",
        "}",
        "tests/test_extended.py::test_compiled_blocks_train_as_eager_ones",
    ),
    "extended: programs read seven tensors": Mutation(
        "fusion_backend/extend/generated_rows.py",
        "TENSORS, CONDITIONS = 8, 2",
        "TENSORS, CONDITIONS = 7, 2",
        "tests/test_extended.py::test_more_tensors_than_a_kernel_takes_are_left_alone",
    ),
    "near misses: the larger form is told": Mutation(
        "fusion_backend/match/match.py",
        "self.matched, -self.size",
        "self.matched, self.size",
        "tests/test_token_log_probs.py::test_left_alone_for_a_reason",
    ),
}
