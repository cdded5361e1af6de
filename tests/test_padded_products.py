"""A kernel that writes to a matrix product whose rows Inductor pads, in the code for a GPU."""

import re

from tests.without_interpreter import printed_by

SCRIPT = """
import json, torch
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm
from torch.fx.experimental.proxy_tensor import make_fx
from benchmarks.host_runs.without_gpu import cpu_tensors_pass
from fusion_backend.compat.apart import begun_apart
from fusion_backend.compat.pretended_cuda import code_for_cuda
from fusion_backend.kernels.loss.cross_entropy import gradient_in_place

pad_mm.check_device = pad_mm.has_triton = lambda *tensors: True
x, w = torch.randn(5, 8).bfloat16(), torch.randn(8, 20).bfloat16()
inputs = [x, w, torch.arange(5), torch.ones(())]

def both(x, w, target, scale):
    logits = x @ w
    gradient = logits.clone()  # Inductor leaves this copy out
    losses = gradient_in_place(gradient, target, scale, -100, 0.0)
    return logits, gradient, losses

with cpu_tensors_pass(), code_for_cuda() as codes, config.patch(force_shape_pad=True):
    begun_apart(make_fx(both, tracing_mode="fake")(*inputs), inputs)()(*inputs)
print(json.dumps(codes))
"""


def test_it_gets_one_copy_without_the_padding():
    (code,) = printed_by(SCRIPT)
    code = code[code.index("def call") :]
    (product,) = re.findall(r"mm\(.*out=(buf\d+)\)", code)
    assert f"{product} = empty_strided_cuda((8, 24), (24, 1)" in code
    (copy,) = re.findall(r"(buf\d+) = empty_strided_cuda\(\(5, 20\), \(20, 1\)", code)
    assert re.search(rf"\.run\({product}, {copy}, 100,", code)
    assert f"cross_entropy_in_place_kernel_0.run({copy}, " in code
    assert code.count(".run(") == 4  # two operands are padded, the copy, the kernel
