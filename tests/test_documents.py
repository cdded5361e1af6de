"""Attention of documents in one sequence: a query sees the keys of its own document."""

import pytest
import torch
import torch.nn.functional as F
from fusion_backend.patterns.attention import masked_attention

import fusion_backend.decide.gate
from fusion_backend.kernels.attention.configs import config_of
from fusion_backend.kernels.attention.documents import document_ranges
from fusion_backend.kernels.attention.masking import Masking, mask_arguments
from fusion_backend.reporting.reject import Reject
from fusion_backend.testing import fused_nodes
from tests.kernel_checks import DEVICE, Kernels, distance, randn, runs_kernels
from tests.selection import product
from tests.test_flash import SMALL, check, dropout, qkv

S = 75
ENDS = torch.tensor([[20, 23, 60, 75], [1, 2, 64, 75]], device=DEVICE)


def sorted_numbers(n=S):
    places = torch.arange(n, device=DEVICE)
    return (places[None, None] >= ENDS[:, :, None]).sum(1)


NUMBERS = {
    "sorted": sorted_numbers,
    "the same for all": lambda: sorted_numbers()[:1],
    "one dimension": lambda: sorted_numbers()[1],
    "one document": lambda: torch.zeros(2, S, dtype=torch.int64, device=DEVICE),
    "each place its own": lambda: torch.arange(S, device=DEVICE).expand(2, S),
    "falling, far apart": lambda: sorted_numbers() * -(1 << 40),
    "of 32 bits": lambda: sorted_numbers().int(),
    "not sorted": lambda: torch.arange(2 * S, device=DEVICE).view(2, S) * 7 % 3,
    "again later": lambda: sorted_numbers() % 2,
    "every other place": lambda: torch.stack([sorted_numbers()] * 2, -1)[..., 0],
}
WITH = {
    "alone": {},
    "causal": dict(low=0),
    "a window": dict(low=-3, high=11),
    "capped and causal": dict(low=0, cap=2.0),
    "dropout": dict(dropout=dropout(0.3)),
}


@runs_kernels
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("others", WITH.values(), ids=WITH)
def test_kernels(name, others):
    check(*qkv(S, S, 16), Masking(keys=NUMBERS[name](), keys_are="documents", **others))


@runs_kernels
@product(
    size=[(16, 32, 1), (32, 16, 2)], n=[1, 31, S], kv=[2, 1], dtype=[torch.float32, torch.bfloat16]
)
def test_blocks_of_other_sizes(size, n, kv, dtype):
    bm, bn, batch = size
    numbers = sorted_numbers(n)[:batch]
    masking = Masking(keys=numbers, keys_are="documents", low=0)
    config = config_of(bm, bn, 4, 1)
    check(*qkv(n, n, 16, kv=kv, b=batch, dtype=dtype), masking, config=config)


@runs_kernels
@pytest.mark.parametrize("n", [17, 64, S])
def test_with_a_bias_and_as_chosen(n):
    """A bias with a gradient, and the kernels of up to 64 queries and keys."""
    masking = Masking(keys=sorted_numbers(n), keys_are="documents", low=0)
    check(*qkv(n, n, 16, dtype=torch.float16), masking, config=None)
    check(*qkv(n, n, 16), masking._replace(bias=randn(1, 2, n, n)), config=SMALL)
    check(*qkv(n, n, 16), masking._replace(bias=randn(2, 2, n, n)), config=SMALL)


@runs_kernels
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("block, other", [(16, 16), (32, 16), (16, 64), (128, 8)])
def test_ranges(name, block, other):
    """No block is left out that meets, and none counts as whole that is not."""
    q, k, _ = qkv(S, S, 16)
    numbers = NUMBERS[name]().expand(2, S)
    masks = mask_arguments(q, k, Masking(keys=numbers, keys_are="documents"))
    ranges = document_ranges(masks, 2, block, other).cpu()
    assert ranges.shape == (2, -(-S // block), 4)
    for batch, of_batch in zip(numbers.cpu(), ranges.tolist(), strict=True):
        for i, (left, begin, stop, end) in enumerate(of_batch):
            mine = batch[i * block : (i + 1) * block]
            seen = (mine[:, None] == batch).any(0).nonzero()
            assert left % other == begin % other == stop % other == 0
            assert left <= begin <= stop and left <= seen.min() and seen.max() < end <= S
            assert (mine[:, None] == batch[begin:stop]).all() and stop <= S
    if name == "sorted" and block == other == 16:
        assert ranges[0, 1].tolist() == [0, 0, 0, 64]  # of three documents
        assert ranges[0, 2].tolist() == [16, 32, 48, 64]  # 23 to 60 are of one


@runs_kernels
def test_ranges_of_long_sequences():
    """More places than are looked at in one step."""
    q, k, _ = qkv(5000, 5000, 16, b=1)
    numbers = torch.arange(5000, device=DEVICE)[None] // 1250
    masks = mask_arguments(q, k, Masking(keys=numbers, keys_are="documents"))
    ranges = document_ranges(masks, 1, 128, 64)[0].tolist()
    assert ranges[0] == [0, 0, 1216, 1280] and ranges[9] == [0, 0, 0, 2560]
    assert ranges[20] == [2496, 2560, 3712, 3776] and ranges[39] == [3712, 3776, 4992, 5000]


def ids_of(x):
    return (x == 1).cumsum(-1)


def same(x):
    numbers = ids_of(x)
    return numbers[:, None, :, None] == numbers[:, None, None, :]


def causal(x):
    return torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).tril()


def sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask)


def by_hand(q, k, v, mask, fill=float("-inf")):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, fill)
    return torch.softmax(scores, -1) @ v


FOUND = {
    "SDPA": lambda q, k, v, x: sdpa(q, k, v, same(x) & causal(x)),
    "both ways": lambda q, k, v, x: sdpa(q, k, v, same(x)),
    "by hand": lambda q, k, v, x: by_hand(q, k, v, causal(x) & same(x)),
    "a finite fill": lambda q, k, v, x: by_hand(q, k, v, causal(x) & same(x), -1e9),
    "added": lambda q, k, v, x: sdpa(
        q, k, v, torch.where(causal(x) & same(x), 0.0, torch.finfo(q.dtype).min)
    ),
    "of the first sequence": lambda q, k, v, x: sdpa(q, k, v, same(x[:1])),
    "a window": lambda q, k, v, x: sdpa(q, k, v, same(x) & causal(x) & causal(x).triu(-9)),
    "of one dimension": lambda q, k, v, x: sdpa(q, k, v, (n := ids_of(x[0]))[:, None] == n),
    "grouped heads": lambda q, k, v, x: F.scaled_dot_product_attention(
        q, k[:, :1], v[:, :1], same(x) & causal(x), enable_gqa=True
    ),
    "given": lambda q, k, v, x: sdpa(q, k, v, x[:, None, None, :] == x[:, None, :, None]),
}
DENSE = {
    "not equal": lambda q, k, v, x: sdpa(q, k, v, ~same(x)),
    "or causal": lambda q, k, v, x: sdpa(q, k, v, same(x) | causal(x)),
    "without itself": lambda q, k, v, x: by_hand(q, k, v, same(x) & causal(x).tril(-1), -1e9),
    "and padding": lambda q, k, v, x: sdpa(q, k, v, same(x) & (x > 0)[:, None, None, :]),
    "of numbers that are no integers": lambda q, k, v, x: sdpa(
        q, k, v, x.float()[:, None, :, None] == x.float()[:, None, None, :]
    ),
    "of different places": lambda q, k, v, x: sdpa(
        q, k, v, x[:, None, :, None] == x.roll(1, 1)[:, None, None, :]
    ),
    "of heads, as many as there are batches": lambda q, k, v, x: sdpa(
        q, k, v, x[:, :, None] == x[:, None, :]
    ),
    "of heads, and causal": lambda q, k, v, x: by_hand(
        q, k, v, (x[:, :, None] == x[:, None, :]) & causal(x), -1e9
    ),
    "only later ones": lambda q, k, v, x: by_hand(q, k, v, same(x) & causal(x).mT.triu(1), -1e9),
    "of another sequence": lambda q, k, v, x: sdpa(q, k, v, same(x)[1:2]),
    "of later places": lambda q, k, v, x: sdpa(q, k, v, same(F.pad(x, (0, 4)))[..., 3:67, 3:67]),
    "in reverse": lambda q, k, v, x: sdpa(
        q, k, v, (n := ids_of(x).flip(1))[:, None, :, None] == n[:, None, None, :]
    ),
    "fewer queries": lambda q, k, v, x: sdpa(q[:, :, :32], k, v, same(x)[:, :, :32]),
    "of 8 bits": lambda q, k, v, x: sdpa(
        q, k, v, x.to(torch.uint8)[:, None, :, None] == x.to(torch.uint8)[:, None, None, :]
    ),
    "a fill that scores reach": lambda q, k, v, x: by_hand(q, k, v, same(x), -3.0),
}
POSITIONS = torch.cat([torch.arange(1, 21), torch.arange(1, 41), torch.arange(1, 5)])
POSITIONS = torch.stack([POSITIONS, torch.arange(1, 65)])


CASES = [(f, 1) for f in FOUND.values()] + [(f, 0) for f in DENSE.values()]


@runs_kernels
@pytest.mark.parametrize("fn, found", CASES, ids=[*FOUND, *DENSE])
def test_recognition(fn, found, monkeypatch):
    """As if there were a GPU: the kernels give what the code gives."""
    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)
    inputs = [randn(2, 2, 64, 16).requires_grad_() for _ in "qkv"]
    x = POSITIONS.to(DEVICE)
    backend = Kernels({"fusion.gate": "always", "fusion.only": "attention"})

    def run(f):
        out = f(*inputs, x)
        return [
            out,
            *torch.autograd.grad((out * torch.linspace(1, 2, 16, device=DEVICE)).sum(), inputs),
        ]

    got, want = run(torch.compile(fn, backend=backend)), run(fn)
    calls = [n for n in fused_nodes(backend.graphs[0]) if "masked_attention" in str(n.target)]
    assert len(calls) == 1  # those with a dense mask, too
    assert sum("documents" in map(str, (*n.args, *n.kwargs.values())) for n in calls) == found
    if found:
        assert "documents by" in backend.report.fused[0].reason
    for g, w in zip(got, want, strict=True):
        assert distance(g, w) < 2e-5


def test_what_the_kernels_refuse():
    q, k, v = qkv(8, 8, 16)

    def refused(numbers, q=q, hidden="zero"):
        given = dict(q=q, k=k, v=v, keys=numbers, scale=1.0, padded="documents", hidden=hidden)
        answer = masked_attention.guard_fn(*(given.get(p.name) for p in masked_attention.params))
        return isinstance(answer, Reject)

    assert not refused(torch.zeros(2, 8, dtype=torch.int64))
    assert not refused(torch.zeros(8, dtype=torch.int32))
    assert refused(torch.zeros(2, 8)) and refused(torch.zeros(3, 8, dtype=torch.int64))
    assert refused(torch.zeros(2, 7, dtype=torch.int64))
    assert refused(torch.zeros(2, 8, dtype=torch.int64), q[:, :, :7])
    assert refused(torch.zeros(2, 1, 1, 8, dtype=torch.int64))
    assert refused(torch.zeros(2, 8, dtype=torch.int64), hidden="fill")
