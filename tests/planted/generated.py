"""Faults in generated kernels of rows."""

from .mutation import Mutation

FAULTS = {
    "generated rows: minimum passes its gradient as maximum does": Mutation(
        "fusion_backend/kernels/generated/adjoint.py",
        'lambda x, y: write("greater", y, x))',
        'lambda x, y: write("greater", x, y))',
        "tests/test_generated_rows.py::test_every_operation_has_a_value_and_a_gradient",
    ),
    "generated rows: equal values get the gradient twice": Mutation(
        "fusion_backend/kernels/generated/adjoint.py",
        'write("mul", d, 0.5), 0.0)',
        "d, 0.0)",
        "tests/test_generated_rows.py::test_of_two_equal_values_each_gets_half_and_a_value_that_equals_a_number_nothing",
    ),
    "generated rows: a number of a row gets no sum": Mutation(
        "fusion_backend/kernels/generated/adjoint.py",
        "            if wide[name] and not wide[operand]:\n",
        "            if False:\n",
        "tests/test_generated_rows.py::test_a_norm_with_what_surrounds_it",
    ),
    "generated rows: the derivative of gelu lacks a term": Mutation(
        "fusion_backend/kernels/generated/adjoint.py",
        'write("add", half, write("mul", a, density))',
        "half",
        "tests/test_generated_rows.py::test_every_operation_has_a_value_and_a_gradient",
    ),
    "generated rows: NaN is lost in a maximum": Mutation(
        "fusion_backend/kernels/generated/program.py",
        "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
        "tl.where({0} > {1}, {0}, {1})",
        "tests/test_generated_rows.py::test_nan_goes_through_as_in_torch",
    ),
    "generated rows: columns beyond a row are added up": Mutation(
        "fusion_backend/kernels/generated/pieces.py",
        "tl.sum(tl.where(inside, x, 0.0), 1, keep_dims=True)",
        "tl.sum(x, 1, keep_dims=True)",
        "tests/test_generated_rows.py::test_what_lies_beyond_adds_nothing_where_a_function_has_no_value_for_it",
    ),
    "generated rows: a softmax reads beyond the row": Mutation(
        "fusion_backend/kernels/generated/pieces.py",
        '    x = tl.where(inside, x, float("-inf"))\n',
        "",
        "tests/test_generated_rows.py::test_every_operation_has_a_value_and_a_gradient",
    ),
    "generated rows: sums have rows beyond the last": Mutation(
        "fusion_backend/kernels/generated/text.py",
        '    keep = "mask" if place.wide else "valid"\n',
        '    keep = "inside" if place.wide else "valid | True"\n',
        "tests/test_generated_rows.py::test_what_lies_beyond_adds_nothing_where_a_function_has_no_value_for_it",
    ),
    "generated rows: an expanded tensor gets one row of gradients": Mutation(
        "fusion_backend/kernels/generated/rows.py",
        "tall=tall, wide=wide)",
        "tall=any(apart[:3]), wide=wide)",
        "tests/test_generated_rows.py::test_a_tensor_is_read_where_it_lies",
    ),
    "generated rows: a program may compute a name twice": Mutation(
        "fusion_backend/kernels/generated/program.py",
        " or name in known:",
        ":",
        "tests/test_generated_rows.py::test_what_is_no_program_is_refused",
    ),
    "generated rows: names may be read before they are computed": Mutation(
        "fusion_backend/kernels/generated/program.py",
        "        if any(is_name(o) and o not in known for o in read):\n",
        "        if False:\n",
        "tests/test_generated_rows.py::test_what_is_no_program_is_refused",
    ),
    "generated rows: any row length is taken": Mutation(
        "fusion_backend/kernels/generated/rows.py",
        "    if not 1 <= shape[-1] <= MAX_HELD:\n",
        "    if False:\n",
        "tests/test_generated_rows.py::test_what_a_kernel_does_not_take_is_said",
    ),
    "generated rows: a root of 0 has an infinite gradient": Mutation(
        "fusion_backend/kernels/generated/adjoint.py",
        '    return (write("where", write("equal", v, 0.0), 0.0, slope),)\n',
        "    return (slope,)\n",
        "tests/test_generated_rows.py::test_the_length_of_a_row_of_zeros_has_no_gradient",
    ),
    "generated rows: sums of one number are taken": Mutation(
        "fusion_backend/kernels/generated/adjoint.py",
        "        if OPERATIONS[op].across and not wide:\n",
        "        if False:\n",
        "tests/test_generated_rows.py::test_what_a_kernel_does_not_take_is_said",
    ),
    "generated rows: programs take the rows of others": Mutation(
        "fusion_backend/kernels/generated/text.py",
        "tl.cdiv(rows, ROWS), programs):",
        "tl.cdiv(rows, ROWS), 1):",
        "tests/test_generated_rows.py::test_gradients_are_sums_over_more_rows_than_programs_take_at_once",
    ),
    "generated rows: every gradient is computed": Mutation(
        "fusion_backend/kernels/generated/adjoint.py",
        "    depends = {*wanted}\n",
        '    wanted = tuple(n for n in columns if n[0] == "t")\n    depends = {*wanted}\n',
        "tests/test_generated_rows.py::test_a_gradient_that_nobody_wants_is_not_computed",
    ),
    "generated rows: numbers lose digits in a text": Mutation(
        "fusion_backend/kernels/generated/program.py",
        "repr(float(operand))",
        'f"{operand:.2g}"',
        "tests/test_generated_rows.py::test_a_program_is_written_as_it_is_read",
    ),
    "generated rows: a row of minus infinity is 0": Mutation(
        "fusion_backend/kernels/generated/pieces.py",
        'float("-inf")',
        "-1e38",
        "tests/test_generated_rows.py::test_a_row_of_minus_infinity_alone_is_nan_in_a_softmax_and_others_are_not",
    ),
    "generated rows: what changes nothing is a statement": Mutation(
        "fusion_backend/kernels/generated/program.py",
        "        if (op, operands[-1]) in NOTHING:\n",
        "        if False:\n",
        "tests/test_generated_rows.py::test_what_changes_nothing_is_no_statement_and_equal_ones_are_one",
    ),
    "generated rows: dense tensors are read by strides": Mutation(
        "fusion_backend/kernels/generated/rows.py",
        "    if all(equal[:3]) and tall and dense(t, range(t.dim())):\n",
        "    if False:\n",
        "tests/test_generated_rows.py::test_where_tensors_lie",
    ),
    "generated rows: a dynamic batch is no first dimension": Mutation(
        "fusion_backend/kernels/generated/rows.py",
        "    first = each[:-1][:1]\n",
        "    first = ()\n",
        "tests/test_generated_rows.py::test_any_number_of_rows_is_taken_without_a_guard",
    ),
    "generated rows: Inductor does not know the names": Mutation(
        "fusion_backend/kernels/generated/text.py",
        "MADE_LATER.update((FORWARD, BACKWARD))\n",
        "",
        "tests/test_generated_rows.py::test_inductor_knows_the_names_of_kernels_that_this_process_has_not_made",
    ),
    "extended: the kernel is never launched": Mutation(
        "fusion_backend/kernels/generated/rows.py",
        "    if not shape or len(shape) > DIMENSIONS:\n",
        "    if True:\n",
        "tests/test_extended.py::test_tensors_that_are_not_contiguous",
    ),
}
