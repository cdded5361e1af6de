"""On a GPU: the kernels of losses against probabilities and a teacher's logits, and training."""

import pytest

from tests.test_soft_loss_spellings import (  # noqa: F401
    test_distillation_trains,
    test_under_autocast,
    test_values_and_gradients,
)
from tests.test_soft_losses import (  # noqa: F401
    test_a_cast_before_it_is_computed_inside,
    test_a_small_divergence_is_as_exact_as_in_eager,
    test_a_teacher,
    test_given_probabilities,
    test_infinities_and_nan_beside_probabilities_are_those_of_torch,
    test_infinities_and_nan_of_a_teacher_are_those_of_torch,
    test_logits_far_from_0_lose_no_more_than_in_eager,
    test_no_rows,
    test_rows_where_they_lie,
    test_steps,
)

pytestmark = pytest.mark.gpu
