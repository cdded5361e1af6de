"""Large embeddings get a gradient from a kernel of ours, which sorts the tokens."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import fusion_backend
from fusion_backend.frontends import dynamo
from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.embedding.gradient import CHUNK, gradient
from fusion_backend.rewrite import embeddings
from tests.without_interpreter import printed_by

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, WIDTH = 40, 24
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def selected(tokens, rows, often=0):
    """Ids, one of which comes `often` times."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, rows, (tokens,), generator=generator)
    ids[:often] = rows // 2
    return ids[torch.randperm(tokens, generator=generator)].to(DEVICE)


def exact(d, ids, rows, padding):
    d = d.reshape(-1, d.shape[-1])
    d = d.double().masked_fill((ids.flatten() == padding)[:, None], 0)
    table = torch.zeros(rows, d.shape[-1], dtype=torch.float64, device=d.device)
    return table.index_add_(0, ids.flatten().long(), d)


@pytest.mark.parametrize("padding", ["none", "the first", "one in the middle"])
@pytest.mark.parametrize(
    ("tokens", "rows", "width", "often"),
    [
        (1, ROWS, WIDTH, 0),
        (7, ROWS, 1, 0),
        (500, ROWS, WIDTH, 300),
        (CHUNK, ROWS, WIDTH, CHUNK),
        (CHUNK + 1, ROWS, WIDTH, CHUNK + 1),
        (3 * CHUNK, ROWS, WIDTH, 2 * CHUNK),
        (1000, 1, 8, 0),
        (700, 5, 2049, 0),
        (300, 129, 16, 0),
    ],
)
def test_rows_are_the_sums_of_their_tokens(tokens, rows, width, often, padding):
    padding = {"none": -1, "the first": 0, "one in the middle": rows // 2}[padding]
    ids = selected(tokens, rows, often)
    d, weight = (torch.randn(n, width, device=DEVICE) for n in (tokens, rows))
    got = gradient(d, ids, weight, padding)
    assert torch.equal(got, gradient(d, ids, weight, padding))
    want = exact(d, ids, rows, padding)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_layouts_and_ids_of_32_bits(dtype):
    ids = selected(60, ROWS, 10).view(4, 15).to(torch.int32)
    d = torch.randn(WIDTH, 15, 4, device=DEVICE).to(dtype).permute(2, 1, 0)
    weight = torch.randn(ROWS, WIDTH, device=DEVICE).to(dtype)
    got = gradient(d, ids, weight, -1)
    assert got.dtype == dtype
    torch.testing.assert_close(got, exact(d, ids, ROWS, -1).to(dtype))


def test_launches_for_any_number_of_tokens():
    """Nothing that the launcher computes fixes the number of tokens."""
    env = ShapeEnv()
    how = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    ids = FakeTensorMode(shape_env=env).from_tensor(selected(90, ROWS), symbolic_context=how)
    launched = []
    with ids.fake_mode, trial(lambda kernel, *rest: launched.append(kernel)):
        d, weight = (torch.empty(n, WIDTH, device=DEVICE) for n in (ids.shape[0], ROWS))
        gradient(d, ids, weight, -1)
    assert len(launched) == 2 and isinstance(ids.shape[0], torch.SymInt) and not env.guards


def test_ids_below_0_count_from_the_end():
    ids = selected(300, ROWS, 100)
    d, weight = (torch.randn(n, WIDTH, device=DEVICE) for n in (300, ROWS))
    wrapped = torch.where(ids % 2 == 0, ids, ids - ROWS)
    assert torch.equal(gradient(d, wrapped, weight, -1), gradient(d, ids, weight, -1))


def test_the_operator_without_ids():
    weight = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    none = selected(0, ROWS)
    assert "no ids" in embeddings.sorted_embedding.ask("guard", none, weight, -1).reason
    embeddings.sorted_embedding(none, weight, -1).sum().backward()
    assert not weight.grad.any()


@pytest.fixture
def every_table_is_large(monkeypatch):
    monkeypatch.setattr(embeddings, "LARGE", ROWS * WIDTH)
    monkeypatch.setattr(embeddings, "on_gpu", lambda t: True)


class Model(nn.Module):
    options = {}

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, **self.options)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        return self.norm(2 * self.words(ids))


class Padded(Model):
    def forward(self, ids):
        return self.norm(F.embedding(ids, self.words.weight, padding_idx=-(ROWS // 2)))


class Sparse(Model):
    options = dict(sparse=True)


class Renormalised(Model):
    options = dict(max_norm=0.5)


class ByFrequency(Model):
    options = dict(scale_grad_by_freq=True)


class Tied(Model):
    def forward(self, ids):
        return F.linear(super().forward(ids), self.words.weight)


class Wide(Model):
    """Its weight is computed."""

    def forward(self, ids):
        return self.norm(F.embedding(ids, self.words.weight * 2))


def told():
    graphs = fusion_backend.report().graphs
    assert all(any(s.fused for s in g.sites) for g in graphs)
    return [text for g in graphs for text in g.embeddings]


def passed(kind, dtype=torch.bfloat16, ids=None):
    """The gradient of the weight by the backend and in fp64, from the same gradient."""
    torch.manual_seed(0)
    model = kind().to(DEVICE, dtype)
    ids = selected(3 * CHUNK, ROWS, CHUNK + 5).view(3, -1) if ids is None else ids
    call = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    out = call(ids)
    d = torch.randn(out.shape, device=DEVICE)
    out.backward(d.to(dtype))
    got = model.words.weight.grad
    model.zero_grad()
    model.double()(ids).backward(d.to(dtype).double())
    return got, model.words.weight.grad


@pytest.mark.usefixtures("every_table_is_large")
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("kind", [Model, Padded, Tied, Wide])
def test_gradients_are_near_those_in_fp64(kind, dtype):
    got, want = passed(kind, dtype)
    assert (got.double() - want).norm() <= 0.02 * want.norm()
    (text,) = told()
    assert text.endswith(f": {ROWS} × {WIDTH}") and ".py:" in text
    assert "row by row, from sorted tokens" in str(fusion_backend.report())


def test_the_operator_runs_the_kernel(monkeypatch):
    calls = []
    monkeypatch.setattr(embeddings, "gradient", lambda *args: calls.append(args) or gradient(*args))
    ids, weight = selected(90, ROWS), torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    out = embeddings.sorted_embedding(ids, weight, 3)
    d = torch.randn_like(out)
    out.backward(d)
    assert len(calls) == 1
    torch.testing.assert_close(weight.grad.double(), exact(d, ids, ROWS, 3), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("every_table_is_large")
@pytest.mark.parametrize("kind", [Sparse, Renormalised, ByFrequency])
def test_other_gradients_stay(kind):
    got, want = passed(kind)
    got, want = (t.to_dense() if t.is_sparse else t for t in (got, want))
    assert (got.double() - want).norm() <= 0.02 * want.norm()
    assert not told()


@pytest.mark.usefixtures("every_table_is_large")
def test_tables_in_fp32_and_without_a_gradient_stay():
    passed(Model, torch.float32)
    model = Model().to(DEVICE, torch.bfloat16)
    call = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    with torch.no_grad():
        call(selected(9, ROWS))
    model.words.weight.requires_grad_(False)
    call(selected(9, ROWS)).sum().backward()
    assert not told()


def test_small_tables_stay(monkeypatch):
    monkeypatch.setattr(embeddings, "on_gpu", lambda t: True)
    passed(Model)
    assert not told()


@pytest.mark.usefixtures("every_table_is_large")
def test_dynamic_numbers_of_tokens():
    ids = selected(90, ROWS).view(9, 10)
    torch._dynamo.mark_dynamic(ids, 0)
    got, want = passed(Model, ids=ids)
    assert (got.double() - want).norm() <= 0.02 * want.norm()
    assert told()


SCRIPT = """
import json, torch, torch.nn.functional as F
from benchmarks.host_runs.without_gpu import cpu_tensors_pass
from fusion_backend.compat.pretended_cuda import code_for_cuda
from fusion_backend.rewrite import embeddings, returned

embeddings.LARGE = returned.LARGE = 1
embeddings.on_gpu = lambda t: True
words = torch.randn(1000, 64, dtype=torch.bfloat16, requires_grad=True)
ids = torch.arange(256).view(4, 64)

def model(ids, words):
    logits = F.embedding(ids, words) @ words.t()
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits

with cpu_tensors_pass(), code_for_cuda() as codes:
    call = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    call(ids, words)[0].backward()
print(json.dumps(codes))
"""


def test_on_a_gpu_inductor_launches_the_kernels_and_adds_no_zeros():
    _, backward = printed_by(SCRIPT)
    launched = re.findall(r"^ +(\w+?)_\d+\.run\(", backward, re.MULTILINE)
    assert launched.count("embedding_gradient_kernel") == 1
    assert launched.count("chunk_sums_kernel") == 1
    assert "tl.atomic_add(" not in backward
    assert backward.count("torch.ops.fusion.add_given_.default(") == 1


@pytest.mark.usefixtures("every_table_is_large")
def test_a_fault_costs_nothing_else(monkeypatch):
    def fails(gm):
        raise ValueError("made up")

    monkeypatch.setattr(dynamo, "give_gradients", fails)
    with pytest.warns(RuntimeWarning, match="keep Inductor's gradient: ValueError: made up"):
        got, want = passed(Model)
    assert (got.double() - want).norm() <= 0.02 * want.norm()
    assert not told()
    assert not fusion_backend.report().graphs[0].error
