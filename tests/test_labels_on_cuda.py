"""Labels that the graph computes, as in CLIP's loss, where they are an arange."""

import pytest

from tests.without_interpreter import printed_by

SCRIPT = """
import json, torch, torch.nn.functional as F
from benchmarks.host_runs.without_gpu import cpu_tensors_pass
from fusion_backend.compat.pretended_cuda import code_for_cuda

x = torch.randn(8192, 64, dtype=torch.bfloat16)

def loss(x):
    return F.cross_entropy(x @ x.t(), torch.arange(len(x), device=x.device))

with cpu_tensors_pass(), code_for_cuda() as codes, torch.no_grad():
    torch.compile(loss, backend="fusion", options={"fusion.gate": "always"})(x)
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def code():
    (found,) = printed_by(SCRIPT)
    return found


def test_their_check_is_compiled_quickly(code):
    """Triton 3.6 takes more than two minutes for a reduction by `any` of constants alone."""
    assert "cross_entropy_kernel" in code
    assert "device_assert" in code and "a target is out of bounds" in code
    assert "triton_helpers.any" not in code and "triton_helpers.all" not in code
