"""On a GPU: the kernels of softmax over channels."""

import pytest

from tests.test_channel_softmax import (  # noqa: F401
    test_a_cast_before_it_is_computed_inside,
    test_a_gradient_of_any_strides,
    test_infinities_and_nan_are_those_of_torch,
    test_shapes_and_dtypes,
    test_tiles_that_hold_few_positions_or_many,
)

pytestmark = pytest.mark.gpu
