"""On a GPU: the kernels of images that are resized or pooled."""

import pytest

from tests.test_interpolate_bilinear import (  # noqa: F401
    test_a_gradient_of_any_strides,
    test_every_output_is_counted_once,
    test_nan_and_infinities_stay_where_they_are,
    test_sizes_formats_and_dtypes,
    test_tiles_of_any_size,
)
from tests.test_max_pool import (  # noqa: F401
    test_of_equal_elements_the_first_and_of_nan_the_last,
    test_places_are_written_for_a_gradient_alone,
    test_windows_shapes_formats_and_dtypes,
)

pytestmark = pytest.mark.gpu
