"""Faults in the kernels of images and convolutions."""

from .mutation import Mutation

FAULTS = {
    "images: a result of four dimensions, which Inductor fills": Mutation(
        "fusion_backend/kernels/common/results.py",
        "return torch.empty(math.prod(shape), dtype=dtype, device=device)",
        "return torch.empty(shape, dtype=dtype, device=device)",
        "tests/test_results_in_memory.py",
    ),
    "image convolution: its gradient lies as it was computed": Mutation(
        "fusion_backend/kernels/conv/pixels.py",
        "return gradient.to(weight.dtype, memory_format=suggest_memory_format(weight))",
        "return gradient.to(weight.dtype)",
        "tests/test_image_convolution.py",
    ),
    "image convolution: columns outside of the image are read": Mutation(
        "fusion_backend/kernels/conv/pixels.py",
        "(x >= 0) & (x < w) & (column < Q)[None, :]",
        "(x < w) & (column < Q)[None, :]",
        "tests/test_image_convolution.py",
    ),
    "image convolution: rows outside of the image are read": Mutation(
        "fusion_backend/kernels/conv/pixels.py",
        "inside & ((y >= 0) & (y < h))[:, None]",
        "inside & (y >= 0)[:, None]",
        "tests/test_image_convolution.py",
    ),
    "image convolution: the gradient reads columns outside of the image": Mutation(
        "fusion_backend/kernels/conv/pixels.py",
        "(y < h) & (x >= 0) & (x < w)",
        "(y < h) & (x >= 0)",
        "tests/test_image_convolution.py",
    ),
    "image convolution: gradients lie in rows": Mutation(
        "fusion_backend/kernels/conv/pixels.py",
        "    if dy.stride(2) != dy.shape[3] * dy.stride(3):\n",
        "    if False:\n",
        "tests/test_image_convolution.py",
    ),
    "image convolution: one channel is channels-last": Mutation(
        "fusion_backend/kernels/conv/pixels.py",
        "suggest_memory_format(t) != torch.channels_last for t in (x, weight)",
        "not t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight)",
        "tests/test_image_convolution.py",
    ),
    "image convolution: weights do not decide how the result lies": Mutation(
        "fusion_backend/kernels/conv/pixels.py",
        "suggest_memory_format(t) != torch.channels_last for t in (x, weight)",
        "suggest_memory_format(t) != torch.channels_last for t in (x,)",
        "tests/test_image_convolution.py",
    ),
    "images: outputs beside an input are left out": Mutation(
        "fusion_backend/kernels/images/bilinear.py",
        "math.ceil(2 / apart) + 3",
        "math.ceil(2 / apart)",
        "tests/test_interpolate_bilinear.py::test_every_output_is_counted_once",
    ),
    "images: the last row has a neighbour": Mutation(
        "fusion_backend/kernels/images/bilinear.py",
        "tl.minimum(before + 1, READ - 1)",
        "before + 1",
        "tests/test_interpolate_bilinear.py::test_every_output_is_counted_once",
    ),
    "images: outputs before the image are read": Mutation(
        "fusion_backend/kernels/images/bilinear.py",
        "tl.maximum(STEP * (i.to(tl.float32) + 0.5) - 0.5, 0.0)",
        "STEP * (i.to(tl.float32) + 0.5) - 0.5",
        "tests/test_interpolate_bilinear.py::test_every_output_is_counted_once",
    ),
    "images: a tile has one image": Mutation(
        "fusion_backend/kernels/images/tiles.py",
        "(rows_of_tile(columns) // rows + 2) * size",
        "size",
        "tests/test_interpolate_bilinear.py::test_what_the_kernel_refuses",
    ),
    "images: of equal elements the last": Mutation(
        "fusion_backend/kernels/images/max_pool.py",
        "larger = (x > best)",
        "larger = (x >= best)",
        "tests/test_max_pool.py::test_of_equal_elements_the_first_and_of_nan_the_last",
    ),
    "images: NaN is no largest element": Mutation(
        "fusion_backend/kernels/images/max_pool.py",
        "(x > best) | (x != x)",
        "(x > best)",
        "tests/test_max_pool.py::test_of_equal_elements_the_first_and_of_nan_the_last",
    ),
    "images: a window of -infinity begins in the padding": Mutation(
        "fusion_backend/kernels/images/max_pool.py",
        "tl.maximum(-top, 0) * KW + tl.maximum(-left, 0)",
        "top * 0 + left * 0",
        "tests/test_max_pool.py::test_of_equal_elements_the_first_and_of_nan_the_last",
    ),
    "images: an element is in one window of a row": Mutation(
        "fusion_backend/kernels/images/max_pool.py",
        "tl.static_range((KW + SW - 1) // SW)",
        "tl.static_range(1)",
        "tests/test_max_pool.py::test_tiles_of_any_size",
    ),
    "images: places are written in inference": Mutation(
        "fusion_backend/kernels/images/max_pool.py",
        "flat(shape if save else (0,), torch.int8, x.device)",
        "flat(shape, torch.int8, x.device)",
        "tests/test_max_pool.py::test_places_are_written_for_a_gradient_alone",
    ),
    "images: a window begins behind the image": Mutation(
        "fusion_backend/kernels/images/max_pool.py",
        "count - (self.ceil and (count - 1) * step >= n + pad)",
        "count",
        "tests/test_max_pool.py::test_sizes_are_those_of_torch",
    ),
}
