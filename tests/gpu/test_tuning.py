"""On a GPU: a short kernel is timed without the host's time."""

import time

import pytest
import torch

from fusion_backend.compat.tuning import milliseconds

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("host_ms", [0.0, 0.3])
def test_the_time_of_the_device(host_ms):
    """The host may take longer than the kernel; 4 MB take a few microseconds."""
    x = torch.randn(1 << 20, device="cuda")

    def call():
        time.sleep(host_ms / 1e3)
        x.add_(1.0)

    assert milliseconds(call) < 0.02


def test_of_two_kernels_the_longer_one_takes_longer():
    x, y = (torch.randn(n, device="cuda") for n in (1 << 22, 1 << 23))
    assert milliseconds(lambda: y.mul_(0.5)) > 1.3 * milliseconds(lambda: x.mul_(0.5))
