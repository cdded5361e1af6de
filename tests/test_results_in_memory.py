"""Memory that kernels write, in the code for a GPU where Inductor lays out images channels-last."""

import re

import pytest

from tests.without_interpreter import printed_by

SCRIPT = """
import json, torch, torch.nn.functional as F
from torch import nn
from unittest import mock
from benchmarks.host_runs.without_gpu import cpu_tensors_pass
from fusion_backend.compat.pretended_cuda import code_for_cuda

class Level(nn.Module):
    def __init__(self, wrapped):
        super().__init__()
        self.first, self.second = (nn.Conv2d(96, 96, 3, padding=1) for _ in range(2))
        self.wrapped = wrapped

    def forward(self, x):
        return self.second(self.wrapped(self.first(x).sigmoid()))

class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.second = nn.Conv2d(3, 96, 3, padding=1), nn.Conv2d(96, 96, 3)

    def forward(self, x):
        return self.second(self.conv(x).relu())

def cudnn_format(x, weight, *more):
    last = dict(memory_format=torch.channels_last)
    either = any(t.is_contiguous(**last) and not t.is_contiguous() for t in (x, weight))
    return torch.channels_last if either else torch.contiguous_format

def code_of(model, x, form):
    model, x = model.bfloat16(), x.bfloat16().to(memory_format=form).requires_grad_()
    torch._dynamo.reset()
    with code_for_cuda() as codes:
        fused = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
        fused(x).sum().backward()
    return codes

torch.backends.mkldnn.enabled = False  # Inductor lays out a graph as for a GPU
kinds = {
    "group_norm": nn.GroupNorm(8, 96), "max_pool": nn.MaxPool2d(3, 2, 1),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "channel_softmax": nn.Softmax(1), "softmax": nn.Softmax(-1),
}
forms = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
found = {}
with cpu_tensors_pass(), mock.patch.object(
    torch._C, "_conv_determine_backend_memory_format", cudnn_format
):
    for how, form in forms.items():
        for name, part in kinds.items():
            found[name + " " + how] = code_of(Level(part), torch.randn(2, 96, 16, 16), form)
        found["pixels " + how] = code_of(Stem(), torch.randn(2, 3, 16, 16), form)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def codes():
    return printed_by(SCRIPT)


KERNELS = ("group_norm", "max_pool", "bilinear", "channel_softmax", "softmax", "pixels")


@pytest.mark.parametrize("how", ["contiguous", "channels_last"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_fills_what_a_kernel_writes(codes, kernel, how):
    """Inductor lays out an empty value of four dimensions that is kept for the backward."""
    code = "\n".join(codes[f"{kernel} {how}"])
    assert re.search(r"assert_\w+\(buf\d+, \(2, 96, 16, 16\), \(24576, 1, 1536, 96\)", code)
    fills = re.findall(r"^def (triton_\w+)\(out_ptr0, \w+numel", code, re.MULTILINE)
    assert not fills
