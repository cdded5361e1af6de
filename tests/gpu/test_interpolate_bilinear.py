"""On a GPU: the kernels of bilinear interpolation."""

import pytest

from tests.test_interpolate_bilinear import (  # noqa: F401
    test_a_gradient_of_any_strides,
    test_every_output_is_counted_once,
    test_nan_and_infinities_stay_where_they_are,
    test_sizes_formats_and_dtypes,
    test_tiles_of_any_size,
)

pytestmark = pytest.mark.gpu
