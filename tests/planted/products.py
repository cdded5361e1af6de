"""Faults in the kernels of matrix products, and of sums over ranks."""

from .mutation import Mutation

FAULTS = {
    "products: the second half of a tile is stored over the first": Mutation(
        "fusion_backend/kernels/gemm/linear.py",
        "second, second_up, top, left + STORED, m,",
        "second, second_up, top, left, m,",
        "tests/test_linear_kernels.py",
    ),
    "products: a shorter last group of tiles is as high as the others": Mutation(
        "fusion_backend/kernels/gemm/main_loop.py",
        "    height = min(down - group * GROUP, GROUP)\n",
        "    height = GROUP\n",
        "tests/test_linear_kernels.py",
    ),
    "products: one row leaves out the last of a weight": Mutation(
        "fusion_backend/kernels/gemm/decode.py",
        "x = tl.load(X + step, (step < K) & (m > 0)",
        "x = tl.load(X + step, (step < K - 1) & (m > 0)",
        "tests/test_linear_kernels.py",
    ),
    "products: one row takes weights that lie by their inputs": Mutation(
        "fusion_backend/kernels/gemm/decode.py",
        "x.element_size(), processors, laid_by_output)",
        "x.element_size(), processors, True)",
        "tests/test_linear_kernels.py",
    ),
    "products: the slope of a hidden layer is not applied": Mutation(
        "fusion_backend/kernels/gemm/hidden_gradient.py",
        "    dh *= slope(before, ACT, KIND, INTERPRETED)\n",
        "",
        "tests/test_linear_kernels.py",
    ),
    "products: the slope of a hidden layer is that without its bias": Mutation(
        "fusion_backend/kernels/gemm/hidden_gradient.py",
        "        before += tl.load(B + column, column < N, 0.0).to(tl.float32)[None, :]\n",
        "        before += 0.0\n",
        "tests/test_linear_kernels.py",
    ),
    "products: a known launch is taken for memory of another alignment": Mutation(
        "fusion_backend/kernels/gemm/specialised.py",
        "x.dtype, x.data_ptr() % 16, tile, *key)",
        "x.dtype, tile, *key)",
        "tests/test_specialised_launches.py",
    ),
    "products: the distance of one row is taken for that of many": Mutation(
        "fusion_backend/kernels/gemm/specialised.py",
        ' and named["X_ROW"] == x.shape[-1]',
        "",
        "tests/test_specialised_launches.py",
    ),
    "products: a known gradient is taken for kept products of another alignment": Mutation(
        "fusion_backend/kernels/gemm/specialised_gradient.py",
        "(act, sums, pre.data_ptr() % 16, pre.dtype, memory_of((w, b)))",
        "(act, sums, pre.dtype, memory_of((w, b)))",
        "tests/test_specialised_launches.py",
    ),
    "products: a known gradient is taken for a weight that lies differently": Mutation(
        "fusion_backend/kernels/gemm/specialised_gradient.py",
        "memory_of((w, b)))",
        "memory_of((b,)))",
        "tests/test_specialised_launches.py",
    ),
    "answers: what ships was measured with other code": Mutation(
        "fusion_backend/kernels/gemm/tiles.py",
        "LATENCY = 1e-6",
        "LATENCY = 2e-6",
        "tests/test_measured_store.py",
    ),
    "products: results are made in a form that Inductor's allocator refuses": Mutation(
        "fusion_backend/kernels/gemm/specialised.py",
        "empty_cuda(tuple(shape), ",
        "empty_cuda(shape, ",
        "tests/test_specialised_launches.py",
    ),
    "products: results are made on the current GPU, not on that of the arguments": Mutation(
        "fusion_backend/kernels/gemm/specialised.py",
        "    if not like.is_cuda or like.device.index != torch.cuda.current_device():\n",
        "    if not like.is_cuda:\n",
        "tests/test_specialised_launches.py",
    ),
    "products: a known gradient of a gate is taken for another alignment": Mutation(
        "fusion_backend/kernels/gemm/specialised_gated_gradient.py",
        "    aligned = gate.data_ptr() % 16, up.data_ptr() % 16\n",
        "    aligned = gate.data_ptr() % 16\n",
        "tests/test_specialised_launches.py",
    ),
    "products: the gate is left out of the gradient of what it gates": Mutation(
        "fusion_backend/kernels/gemm/gated_gradient.py",
        "(dh * active).to(kind)",
        "dh.to(kind)",
        "tests/test_gated_mlp.py",
    ),
    "products: infinite products pass a gate that is closed": Mutation(
        "fusion_backend/kernels/gemm/gated_gradient.py",
        "    d_gate = activation_gradient(dh * up, gate, act, True)\n",
        "    d_gate = dh * up * activation_gradient(torch.ones_like(dh), gate, act, True)\n",
        "tests/test_gated_mlp.py",
    ),
    "products: the library is left for a tile without finishers": Mutation(
        "fusion_backend/kernels/gemm/library.py",
        "if are_many(x) and tile_of(x, w, act).finishers:",
        "if are_many(x):",
        "tests/test_specialised.py",
    ),
    "products: tiles with finishers are taken where waves are half idle": Mutation(
        "fusion_backend/kernels/gemm/tiles.py",
        "    return tiles >= processors and tiles >= FULL * processors * -(-tiles // processors)\n",
        "    return tiles >= processors\n",
        "tests/test_specialised.py",
    ),
    "products: tiles with finishers are taken for products shorter than their launch": Mutation(
        "fusion_backend/kernels/gemm/tiles.py",
        "    specialised &= 2 * rows * k * n * weights >= LAUNCH * PRODUCTS_A_SECOND\n",
        "",
        "tests/test_specialised.py",
    ),
    "products: a scaled product goes to the kernel that cannot scale": Mutation(
        "fusion_backend/kernels/gemm/linear.py",
        "    able = dtype == x.dtype and residual is row_scale is column_scale is None\n",
        "    able = True\n",
        "tests/test_specialised.py",
    ),
    "products: a weight that begins in the middle of 16 bytes is taken": Mutation(
        "fusion_backend/kernels/gemm/operands.py",
        "return statically_known_true(t.storage_offset() * t.element_size() % ALIGNED == 0)",
        "return True",
        "tests/test_linear_kernels.py",
    ),
    "sums: two shots over four ranks from 256 KB": Mutation(
        "fusion_backend/kernels/collective/size_gate.py",
        "TWO_SHOTS_FROM: dict[int, int] = {4: 1 << 20,",
        "TWO_SHOTS_FROM: dict[int, int] = {4: 1 << 18,",
        "tests/test_benchmark_distributed.py::"
        "test_the_ratio_of_a_sum_is_that_of_the_kernel_that_is_taken",
    ),
    "products: NaN passes no gradient of relu on": Mutation(
        "fusion_backend/kernels/gemm/epilogue.py",
        "tl.where(x <= 0.0, 0.0, 1.0)",
        "tl.where(x > 0.0, 1.0, 0.0)",
        "tests/test_gradient_at_zero.py::test_nan_passes_the_gradient_of_relu_on",
    ),
}
