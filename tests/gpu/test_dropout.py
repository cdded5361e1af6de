"""On a GPU: dropout with its kernels, in CUDA graphs, in little memory, and far into
large tensors.
"""

import pytest
import torch

import fusion_backend
from benchmarks.measure.memory import peak_bytes
from fusion_backend.kernels.common.dropout import philox, threshold
from fusion_backend.ops.registry import FUSION_RULES
from tests.test_dropout import (  # noqa: F401  (the same tests, here with the kernels)
    ALWAYS,
    NAMES,
    agree,
    compiled,
    inputs,
    seed,
    site,
    test_checkpoint_draws_the_same_again,
    test_compiled_value_and_gradients,
    test_counters_and_seeds_have_64_bits,
    test_elements_rows_and_seeds_are_independent,
    test_nan_and_infinity_are_dropped_as_in_torch,
    test_sites_differ_and_seeds_repeat,
    test_survivors_are_scaled,
    test_the_share_that_survives,
)

pytestmark = pytest.mark.gpu


def test_replays_of_a_cuda_graph_draw_anew():
    x, r = inputs(256, 512)
    fn = compiled(lambda x, r: site(x.sin(), r), **{"triton.cudagraphs": True})

    def run(number=None):
        torch.compiler.cudagraph_mark_step_begin()
        if number is not None:
            torch.manual_seed(number)
        out = fn(x, r)
        assert agree(out, x)
        return out.detach().clone()

    outs = [run() for _ in range(8)]
    assert not any(torch.equal(a, b) for i, a in enumerate(outs) for b in outs[:i])
    assert torch.equal(run(3), run(3))
    (found,) = fusion_backend.report().fused
    assert (found.forward, found.backward) == ("kernel", "kernel"), found


def case(name: str, rows: int, n: int):
    def tensor(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    return FUSION_RULES[name].inputs_fn(tensor, rows=rows, n=n)


@pytest.mark.parametrize("name", NAMES)
def test_training_takes_no_more_memory(name):
    args, reference = case(name, 8192, 2048), FUSION_RULES[name].reference
    tensors = [a for a in args if isinstance(a, torch.Tensor)]

    def peak(fn) -> int:
        def step():
            out = fn(*args)
            out = out if isinstance(out, tuple) else (out,)
            return torch.autograd.grad(out, tensors, [torch.ones_like(o) for o in out])

        step()
        return peak_bytes(step, torch.device("cuda"))

    ours, plain = (
        peak(compiled(reference)),
        peak(torch.compile(lambda *a: reference(*a), dynamic=False)),
    )
    assert fusion_backend.report().fused[0].forward == "kernel"
    assert ours <= 1.02 * plain


@pytest.mark.parametrize("name", NAMES)
def test_beyond_31_bits(name):
    """The last rows of a tensor of more than 2**31 elements."""
    rows, n, last = 2**31 // 4096 + 64, 4096, 64
    x = torch.ones(rows, n, device="cuda", dtype=torch.bfloat16)
    norm = name == "dropout_add_layer_norm"
    args = [x, torch.zeros_like(x)] + [x[0], x[0]] * norm + [0.3] + [1e-5] * norm
    found = FUSION_RULES[name].launched((*args, seed(9)), save=False)
    h = found[1] if norm else found
    words = philox(seed(9), torch.arange((rows - last) * n // 4, rows * n // 4, device="cuda"))
    keep = torch.stack(words, 1).view(last, n) >= threshold(0.3)
    assert torch.equal(h[-last:] != 0, keep)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_beyond_31_bits(name):
    x = torch.ones(2**31 // 4096 + 64, 4096, device="cuda", dtype=torch.bfloat16)
    norm = name == "dropout_add_layer_norm"
    args = [x, torch.zeros_like(x)] + [x[0], x[0]] * norm + [0.3] + [1e-5] * norm
    found = compiled(FUSION_RULES[name].reference)(*args)
    h = (found[1] if norm else found)[-64:].float()
    (which,) = fusion_backend.report().fused
    assert (which.pattern, which.forward) == (name, "kernel"), which
    assert 0.69 < (h != 0).float().mean() < 0.71
    assert h[h != 0].unique().tolist() == [torch.tensor(1 / 0.7).bfloat16().item()]
