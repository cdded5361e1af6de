"""Logits that are returned with their loss: their gradient from outside is added where there is
one, and where there is none no zeros take its place.
"""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend.frontends import dynamo, verify
from fusion_backend.rewrite import returned

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, WIDTH, CLASSES = 32, 16, 320
IDS = torch.arange(2 * ROWS, device=DEVICE).view(2, ROWS) * 7 % CLASSES
LABELS = IDS.flip(1).contiguous()


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch):
    monkeypatch.setattr(returned, "LARGE", 2 * ROWS * CLASSES)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def hidden(self, ids):
        return self.words(ids)

    def loss(self, logits, labels):
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def forward(self, ids, labels):
        logits = self.head(self.hidden(ids))
        return self.loss(logits, labels), logits


def compiled(model, **options):
    return torch.compile(model, backend="fusion", options={"fusion.gate": "always", **options})


def made(kind=Model):
    torch.manual_seed(0)
    return kind().to(DEVICE)


def gradients(model, call, use):
    model.zero_grad()
    use(call)
    return [p.grad for p in model.parameters()]


def agrees(kind, use, separated=1):
    """Does the model have the gradients of eager code, after the same use of its results?"""
    model = made(kind)
    want = gradients(model, model, use)
    got = gradients(model, compiled(model), use)
    torch.testing.assert_close(got, want)
    told = [text for g in fusion_backend.report().graphs for text in g.from_outside]
    assert len(told) == separated
    return told


def of_the_loss(call):
    call(IDS, LABELS)[0].backward()


def of_both(call):
    loss, logits = call(IDS, LABELS)
    (loss + logits.square().mean()).backward()


def of_the_logits(call):
    call(IDS, LABELS)[1].square().sum().backward()


def of_an_expanded_gradient(call):
    loss, logits = call(IDS, LABELS)
    (loss + logits.sum()).backward()


def of_two_readers(call):
    loss, logits = call(IDS, LABELS)
    (loss + logits[:, 1:].square().sum() + logits[..., ::3].exp().mean()).backward()


def of_two_calls_at_once(call):
    (loss, logits), (other, _) = call(IDS, LABELS), call(IDS.flip(0), LABELS)
    (loss + logits.square().mean() + 2 * other).backward()


def of_two_calls_in_turn(call):
    loss, logits = call(IDS, LABELS)
    other, others = call(IDS.flip(0), LABELS)
    others.square().mean().backward()
    loss.backward()


def of_a_part_of_the_loss(call):
    loss, logits = call(IDS, LABELS)
    chosen = torch.where(loss > 1e9, logits, logits.detach())
    (loss + chosen.square().mean()).backward()


def through_a_checkpoint(call):
    loss, logits = checkpoint(call, IDS, LABELS, use_reentrant=False)
    (loss + logits.square().mean()).backward()


def doubled_in_place(call):
    loss, logits = call(IDS, LABELS)
    loss = loss.detach() + (logits.detach().clone() + logits).mul_(2).square().mean()
    loss.backward()


USES = [
    of_the_loss, of_both, of_the_logits, of_an_expanded_gradient, of_two_readers,
    of_two_calls_at_once, of_two_calls_in_turn, of_a_part_of_the_loss, through_a_checkpoint,
    doubled_in_place,
]  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_gradients_are_those_of_eager_code(use):
    (told,) = agrees(Model, use)
    assert f"{__file__}:" in told and "20,480 elements of float32" in told


class Zeros(TorchDispatchMode):
    """The sizes of the tensors that are filled with zeros."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "zeros" in func.name() or "full" in func.name():
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("separated", [True, False])
def test_no_zeros_are_filled_in_for_a_gradient_that_is_missing(monkeypatch, separated):
    if not separated:
        monkeypatch.setattr(returned, "LARGE", 2 * ROWS * CLASSES + 1)
    call = compiled(made())
    for _ in range(2):  # the first call compiles the backward
        loss = call(IDS, LABELS)[0]
        with Zeros() as zeros:
            loss.backward()
    assert zeros.sizes == [1 if separated else 2 * ROWS * CLASSES]


def test_the_report_names_the_line():
    agrees(Model, of_the_loss)
    text = str(fusion_backend.report())
    assert "test_returned_values.py:" in text.partition("returned and read by a loss: ")[2]


@functorch_config.patch(donated_buffer=False)  # without it, Inductor refuses retain_graph
def test_a_gradient_that_is_asked_for_twice():
    def use(call):
        loss, logits = call(IDS, LABELS)
        total = loss + logits.square().mean()
        total.backward(retain_graph=True)
        total.backward()

    agrees(Model, use)


def test_gradients_of_chosen_inputs():
    model = made()
    call = compiled(model)
    for each in (model, call):
        loss, logits = each(IDS, LABELS)
        (one,) = torch.autograd.grad(logits.square().sum(), [logits], retain_graph=True)
        torch.testing.assert_close(one, 2 * logits)
    found = [
        torch.autograd.grad(sum(map(torch.sum, each(IDS, LABELS))), [model.head.weight])
        for each in (model, call)
    ]
    torch.testing.assert_close(*found)


def test_a_hook_sees_the_gradient_from_outside_as_with_inductor():
    def with_a_hook(call):
        loss, logits = call(IDS, LABELS)
        logits.register_hook(lambda gradient: 3 * gradient)
        (loss + logits.square().mean()).backward()

    model = made()
    plain = gradients(model, torch.compile(model), with_a_hook)
    torch.testing.assert_close(gradients(model, compiled(model), with_a_hook), plain)


def test_a_gradient_that_is_not_aligned():
    def use(call):
        loss, logits = call(IDS, LABELS)
        gradient = torch.linspace(0, 1, logits.numel() + 1, device=DEVICE)[1:]
        torch.autograd.backward([loss, logits], [None, gradient.view_as(logits)])

    agrees(Model, use)


def test_without_gradients_the_results_are_constants():
    call = compiled(made())
    of_the_loss(call)
    with torch.no_grad():
        loss, logits = call(IDS, LABELS)
    assert not loss.requires_grad and not logits.requires_grad


def test_under_autocast():
    def use(call):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss, logits = call(IDS, LABELS)
        assert logits.dtype == torch.bfloat16
        (loss + logits.float().square().mean()).backward()

    model = made()
    want, got = gradients(model, model, use), gradients(model, compiled(model), use)
    torch.testing.assert_close(got, want, rtol=0.05, atol=1e-3)
    assert fusion_backend.report().graphs[0].from_outside


class Averaged(Model):
    """The gradient from inside is one number, expanded."""

    def hidden(self, ids):
        return F.layer_norm(self.words(ids), (WIDTH,))

    def loss(self, logits, labels):
        return logits.mean()


@pytest.mark.parametrize("use", [of_the_loss, of_both])
def test_a_gradient_from_inside_that_is_expanded(use):
    agrees(Averaged, use)


class Flat(Model):
    """The logits that are returned are those that the backward keeps."""

    def forward(self, ids, labels):
        logits = self.head(self.hidden(ids.flatten()))
        return F.cross_entropy(logits, labels.flatten()), logits


@pytest.mark.parametrize("kind", [Model, Flat])
def test_without_a_backward_nothing_stays_alive(kind):
    call = compiled(made(kind))
    of_the_loss(call)
    assert fusion_backend.report().graphs[0].from_outside
    loss, logits = call(IDS, LABELS)
    left = [weakref.ref(logits.untyped_storage()), weakref.ref(loss.grad_fn)]
    del loss, logits
    gc.collect()
    assert [ref() for ref in left] == [None, None]


def test_aotautograd_finds_the_graph_in_its_cache():
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        of_the_loss(compiled(made()))
    found = counters["aot_autograd"]
    assert found["autograd_cache_hit"] == 1 and not found["autograd_cache_bypass"]


def test_a_backward_while_another_thread_compiles(monkeypatch):
    model = made()
    want = copy.deepcopy(gradients(model, model, of_both))
    call = compiled(model)
    of_the_loss(call)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(gradients(model, call, of_both), want)


def test_a_fault_costs_nothing_else(monkeypatch):
    def fails(gm, source):
        raise ValueError("made up")

    monkeypatch.setattr(dynamo, "separate", fails)
    with pytest.warns(RuntimeWarning, match="keep AOTAutograd's gradient: ValueError: made up"):
        agrees(Model, of_both, separated=0)
    (graph,) = fusion_backend.report().graphs
    assert graph.faults and not graph.error and any(s.fused for s in graph.sites)


class TwoHeads(Model):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids, labels):
        hidden = self.hidden(ids)
        first, second = self.head(hidden), self.second(hidden)
        return self.loss(first, labels) + self.loss(second, labels), first, labels, second


def test_two_values_have_tokens_of_their_own():
    def use(call):
        loss, first, labels, second = call(IDS, LABELS)
        assert labels is LABELS
        (loss + second.square().mean()).backward()

    agrees(TwoHeads, use, separated=2)


class Written(Model):
    def forward(self, ids, labels):
        logits = self.head(self.hidden(ids))
        logits.mul_(2)
        return self.loss(logits, labels), logits


class WithAView(Model):
    def forward(self, ids, labels):
        logits = self.head(self.hidden(ids))
        return self.loss(logits, labels), logits, logits[:, 0]


class Transposed(Model):
    def forward(self, ids, labels):
        logits = self.head(self.hidden(ids)).transpose(0, 1)
        return self.loss(logits, labels.T), logits


class Normed(Model):
    """Reads a value by its mean, from which something large is computed."""

    def hidden(self, ids):
        x = self.words(ids)
        self.wide = x.repeat(1, 1, CLASSES // WIDTH).exp()
        return x + (self.wide * torch.rsqrt(self.wide.square().mean(-1, keepdim=True)))[..., :WIDTH]

    def forward(self, ids, labels):
        hidden = self.hidden(ids)
        return self.loss(self.head(hidden), labels), self.wide


class Measured(Model):
    """Reads the logits without a gradient."""

    def forward(self, ids, labels):
        logits = self.head(self.hidden(ids))
        loss = self.loss(self.head(2 * self.hidden(ids)), labels)
        return loss, logits, logits.argmax(-1).sum()


@pytest.mark.parametrize("kind", [Written, WithAView, Transposed, Normed, Measured])
def test_what_stays_with_aotautograd(kind):
    def use(call):
        loss, logits, *rest = call(IDS, LABELS)
        (loss + logits.square().mean()).backward()

    agrees(kind, use, separated=0)


def test_small_values_stay(monkeypatch):
    monkeypatch.setattr(returned, "LARGE", 2 * ROWS * CLASSES + 1)
    agrees(Model, of_both, separated=0)


@pytest.mark.parametrize("verify", [False, True])
def test_in_cuda_graphs_values_stay(verify):
    call = compiled(made(), **{"triton.cudagraphs": True, "fusion.verify": verify})
    of_the_loss(call)
    assert not fusion_backend.report().graphs[0].from_outside


def test_what_verify_drops_is_no_longer_in_the_report(monkeypatch):
    monkeypatch.setattr(verify.Comparison, "verdict", lambda self, args: "was slower")
    of_the_loss(compiled(made(), **{"fusion.verify": True}))
    (graph,) = fusion_backend.report().graphs
    assert not graph.from_outside and not any(s.fused for s in graph.sites)


class Deep(Model):
    """Has weights of 1 MB, and Dynamo divides it into parts for DistributedDataParallel."""

    def __init__(self):
        super().__init__()
        wide = 1 << 14
        self.ups = nn.ModuleList(nn.Linear(WIDTH, wide) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(wide, WIDTH) for _ in range(2))

    def hidden(self, ids):
        x = self.words(ids)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x)))
        return x


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("use", [of_the_loss, of_both, of_two_calls_at_once])
def test_under_distributed_data_parallel(alone, use, unused):
    model = made(Deep)
    want = copy.deepcopy(gradients(model, model, use))
    spread = DistributedDataParallel(model, bucket_cap_mb=1, find_unused_parameters=unused)
    torch.testing.assert_close(gradients(model, compiled(spread), use), want)
    graphs = fusion_backend.report().graphs
    assert len(graphs) > 1 and sum(len(g.from_outside) for g in graphs) == 1


@contextlib.contextmanager
def compiled_backward():
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        yield


def test_a_compiled_backward_computes_the_gradient_of_the_loss_or_raises():
    model = made()
    want = copy.deepcopy(gradients(model, model, of_the_loss))
    call = compiled(model)
    loss, logits = call(IDS, LABELS)
    model.zero_grad()
    with compiled_backward():
        loss.backward(retain_graph=True)
    torch.testing.assert_close([p.grad for p in model.parameters()], want)
    with compiled_backward(), pytest.raises(Exception, match="before the graph is compiled"):
        (loss + logits.square().mean()).backward()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        call(IDS, LABELS)
    assert not fusion_backend.report().graphs[-1].from_outside


def test_a_gradient_that_gets_lost_is_an_error():
    loss, logits = compiled(made())(IDS, LABELS)
    loss.grad_fn.register_prehook(lambda grads: tuple(g if g is None else g.clone() for g in grads))
    with pytest.raises(RuntimeError, match="A hook may have replaced that of another result"):
        (loss + logits.square().mean()).backward()
