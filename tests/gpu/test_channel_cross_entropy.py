"""On a GPU: the kernels of cross entropy over channels, and a model that trains with them."""

import pytest

from tests.test_channel_cross_entropy import (  # noqa: F401
    test_a_cast_before_it_is_computed_inside,
    test_a_loss_of_each_position_with_a_mask,
    test_a_segmentation_model_trains,
    test_infinities_and_nan_are_those_of_torch,
    test_logits_far_from_0_lose_no_more_than_in_eager,
    test_shapes_dtypes_and_forms,
    test_steps,
    test_where_no_position_counts,
)

pytestmark = pytest.mark.gpu
