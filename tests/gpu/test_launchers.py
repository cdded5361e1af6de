"""On a GPU: our kernels are launched as Inductor launches its own, also those that come back from
the processes that compile them.
"""

import pytest
import torch
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.triton_bundler import TritonBundler

import fusion_backend
from benchmarks.host_runs.generated import is_ours
from benchmarks.host_runs.measuring import ALWAYS
from benchmarks.measure.trace import our_kernels
from benchmarks.model_runs.compiling import cache_in
from benchmarks.subjects.small_graphs import SMALL_GRAPHS
from fusion_backend import remembered
from fusion_backend.compat.generated import forget_generated, generated_modules

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["layer_norm", "attention", "cross_entropy", "linear_gelu"])
def test_a_graph_in_the_cache_brings_its_kernels_along(name, tmp_path, monkeypatch):
    """The graph is remembered, and our kernels, in forward and backward, come with it."""
    graph, loaded, load = SMALL_GRAPHS[name], [], TritonBundler.load_autotuners
    monkeypatch.setattr(remembered, "USED", True)

    def load_and_note(kernels) -> list[str]:
        names = load(kernels)
        loaded.extend(names)
        return names

    def compile_and_run() -> None:
        torch._dynamo.reset()
        fusion_backend.reset()
        CompiledTritonKernels.cache_clear()  # of other tests' graphs
        inputs = graph.inputs(torch.device("cuda"), train=True)
        out = torch.compile(graph.fn, backend="fusion", options=ALWAYS)(*inputs)
        torch.autograd.grad(out, [x for x in inputs if x.requires_grad], torch.ones_like(out))

    with cache_in(str(tmp_path)):
        compile_and_run()
    assert [record.remembered for record in fusion_backend.report().graphs] == [False]
    forget_generated()
    monkeypatch.setattr(TritonBundler, "load_autotuners", load_and_note)
    with cache_in(str(tmp_path)):
        compile_and_run()
    assert [record.remembered for record in fusion_backend.report().graphs] == [True]
    names = {kernel for module in generated_modules() for kernel in vars(module)}
    ours = {kernel for kernel in names if is_ours(kernel, our_kernels())}
    assert ours and ours <= {*loaded}, (ours, loaded)


@pytest.mark.parametrize("name", ["layer_norm", "attention", "cross_entropy", "linear_gelu"])
def test_our_kernels_get_inductors_launcher(name, tmp_path):
    graph = SMALL_GRAPHS[name]
    inputs = graph.inputs(torch.device("cuda"), train=True)
    torch._dynamo.reset()
    forget_generated()
    wanted = [x for x in inputs if x.requires_grad]
    with cache_in(str(tmp_path)):
        out = torch.compile(graph.fn, backend="fusion", options=ALWAYS)(*inputs)
        found = torch.autograd.grad(out, wanted, torch.ones_like(out))
    kernels = {
        kernel: value.launchers
        for module in generated_modules()
        for kernel, value in vars(module).items()
        if isinstance(getattr(value, "launchers", None), list) and is_ours(kernel, our_kernels())
    }
    assert kernels
    for kernel, found_launchers in kernels.items():
        assert all(getattr(one, "_is_static", False) for one in found_launchers), kernel
    exact = [x.detach().double().requires_grad_() if x.requires_grad else x for x in inputs]
    again = graph.fn(*exact)
    wanted = [x for x in exact if x.requires_grad]
    for mine, its in zip(
        (out, *found),
        (again, *torch.autograd.grad(again, wanted, torch.ones_like(again))),
        strict=True,
    ):
        torch.testing.assert_close(
            mine.double(), its, rtol=0.05, atol=0.05 * its.abs().max().item()
        )
