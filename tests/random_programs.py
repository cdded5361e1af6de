"""Random programs of what patterns are made of: the same values again, views, copies, writes in
place, grad modes, autocast and checkpoints. Each must come out as in eager, however it is fused:
`python -m tests.random_programs FIRST LAST` prints the programs of these seeds that do not.
"""

from __future__ import annotations

import random
import sys
import warnings

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fusion_backend.frontends.explain import Collector

ROWS, SIZE = 8, 16
# `a` and `b` are values of ROWS x SIZE, and so are the results.
PURE = """
a * 2
a + b
a * g + h
a - b
torch.relu(a)
F.gelu(a)
F.gelu(a, approximate="tanh")
F.silu(a) * b
torch.exp((a + b) * 0.02)
torch.sigmoid(F.linear(a, w, g)) * F.linear(a, w, h)
F.gelu(F.linear(a, w, g))
F.glu(F.linear(a, w2))
F.linear(a, w, g)
a @ w
x @ w
x * 1.5
torch.softmax(a, -1)
torch.softmax(a.masked_fill(mask, float("-inf")), -1)
F.log_softmax(a, -1)
F.layer_norm(a, (16,), g, h)
F.layer_norm(a + b, (16,))
F.layer_norm(a, (16,)) * (1 + g) + h
F.rms_norm(a, (16,), g)
a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * g
(a - a.mean(-1, keepdim=True)) * torch.rsqrt(a.var(-1, keepdim=True, unbiased=False) + 1e-5)
a / a.norm(dim=-1, keepdim=True).clamp(min=1e-6)
F.normalize(a, dim=-1)
F.group_norm(a.view(2, 4, 16), 2).view(8, 16)
F.batch_norm(a, None, None, g, h, True)
F.batch_norm(a, mean, var, g, h, True)
a * cos + torch.cat([-a[:, 8:], a[:, :8]], -1) * sin
F.scaled_dot_product_attention(*[t.view(1, 2, 4, 16) for t in (a, b, a)]).view(8, 16)
a * F.cross_entropy(b, target)
(a / 0.1 + 3).round().clamp(-128, 127).to(torch.int8).float()
torch.where(a > 0, a, b)
a.float()
a.double().float()
a.to(torch.bfloat16).float()
a.clone()
a.contiguous()
a.detach()
a.view(8, 16)
a.reshape(4, 32).reshape(8, 16)
a.unflatten(1, (2, 8)).flatten(1)
a.t().t()
a[None][0]
a.t().clone().t()
a.t().contiguous().t()
a.t().contiguous().t().contiguous()
torch.cat([a[:, :8], b[:, 8:]], -1)
torch.stack([a, b]).sum(0)
F.dropout(a, 0.5, False)
""".strip().splitlines()
WRITES = """
a[:, 0] = 0
a[1:3] += 1
a.mul_(2)
a.add_(b)
a.relu_()
a.clamp_(-1, 1)
a.copy_(b)
a.t()[0] = 1
a.view(4, 32)[:, 3:5].zero_()
a.data.mul_(1.5)
F.relu(a, inplace=True)
torch.add(a, b, out=a)
""".strip().splitlines()
AROUND = """
with torch.no_grad():
with torch.autocast("cpu", torch.bfloat16):
""".strip().splitlines()
NAMES = ("x", "w", "w2", "g", "h", "cos", "sin", "mean", "var", "mask", "target")


def program(seed: int) -> str:
    """The source of a function `f`."""
    draw = random.Random(seed)
    # a backward may read what .data.mul_ changes behind its back
    may_write = [w for w in WRITES if seed % 2 == 0 or ".data" not in w]
    writes, around, again = draw.random() < 0.6, draw.random() < 0.3, draw.random() < 0.2
    lines = ["x * 1.5", "x @ w"]
    lines = [f"v{i} = {line}" for i, line in enumerate(lines)]
    values = len(lines)
    for _ in range(draw.randint(3, 14)):
        names = {name: f"v{draw.randrange(values)}" for name in "ab"}
        if writes and draw.random() < 0.25:
            lines.append(with_names(draw.choice(may_write), names))
            continue
        line = with_names(draw.choice(PURE), names)
        if again and draw.random() < 0.2:
            line = f"checkpoint(lambda: {line}, use_reentrant=False)"
        line = f"v{values} = {line}"
        if around and draw.random() < 0.3:
            line = f"{draw.choice(AROUND)}\n        {line}"
        lines.append(line)
        values += 1
    share = draw.random()
    returned = [f"v{i}" for i in range(values) if draw.random() < share]
    returned = returned or [f"v{values - 1}"]
    lines.append(f"return [{', '.join(returned)}]")
    return "\n    ".join([f"def f({', '.join(NAMES)}):", *lines])


def with_names(line: str, names: dict[str, str]) -> str:
    """The line with variables in place of `a` and `b`."""
    words, word = [], ""
    for letter in [*line, ""]:
        if letter and (letter.isalnum() or letter in "_"):
            word += letter
            continue
        after = words and words[-1] == "."  # an attribute
        words += [word if after else names.get(word, word), letter]
        word = ""
    return "".join(words)


def inputs(grad: bool) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    floats = [normal(ROWS, SIZE), normal(SIZE, SIZE) / 4, normal(2 * SIZE, SIZE) / 4]
    floats = [t.requires_grad_(grad) for t in (*floats, normal(SIZE), normal(SIZE))]
    angle = normal(ROWS, SIZE)
    mask = normal(ROWS, SIZE) > 1
    target = torch.arange(ROWS)
    return [*floats, angle.cos(), angle.sin(), torch.zeros(SIZE), torch.ones(SIZE), mask, target]


def difference(seed: int) -> tuple[str, int]:
    """How the fused program differs from eager, "" if it does not, and the number of its sites. -1
    if eager refuses the program, or Dynamo breaks its graph or changes it.
    """
    made: dict = {"torch": torch, "F": F, "checkpoint": checkpoint}
    source = program(seed)
    exec(source, made)
    backend = Collector({"fusion.gate": "always"})
    try:
        told = compiled(made["f"], seed, backend, "bfloat16" in source)
    except RuntimeError:  # eager's, for example: the backward reads what was written to
        return "", -1
    if len(backend.graphs) > 1 or told and compiled(made["f"], seed, "eager", False):
        return "", -1
    errors = [record.error for record in backend.report.graphs if record.error]
    return "\n".join([*errors, told]).strip(), len(backend.report.fused)


def compiled(f, seed: int, backend, rounds: bool) -> str:
    """How `f` differs from eager if it is compiled with a backend."""
    grad = seed % 2 == 1
    theirs, mine = inputs(grad), inputs(grad)
    want = f(*theirs)
    loss(want)
    torch._dynamo.reset()
    try:
        got = torch.compile(f, backend=backend, dynamic=True if seed % 5 == 0 else None)(*mine)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return compared(got, want, mine, theirs, rounds)


def compared(got: list, want: list, mine: list, theirs: list, rounds: bool) -> str:
    """How results, what was written to inputs, and gradients differ."""
    least = 0.1 if rounds else 1e-3
    told = [
        f"result {i} {why}"
        for i, pair in enumerate(zip(got, want, strict=True))
        if (why := apart(*pair, least))
    ]
    if memory(got) != memory(want):
        told.append(f"results lie like {memory(got)}, not like {memory(want)}")
    told += [f"input {i} {why}" for i in (7, 8) if (why := apart(mine[i], theirs[i], least))]
    try:
        loss(got)
    except RuntimeError as error:
        return "\n".join([*told, f"backward: {error}"])
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if (a.grad is None) != (b.grad is None):
            told.append(f"gradient {i} is {a.grad}, not {b.grad}")
        elif a.grad is not None and (why := apart(a.grad, b.grad, least)):
            told.append(f"gradient {i} {why}")
    return "\n".join(told)


def apart(got: torch.Tensor | None, want: torch.Tensor, least: float) -> str:
    """What differs: the kind of tensor, or its values by more than `least` of their size."""
    if got is None:
        return "is missing"
    kinds = [(t.dtype, t.shape, t.requires_grad) for t in (got, want)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]}, not {kinds[1]}"
    got, want = got.detach().double(), want.detach().double()
    finite = want.isfinite()
    if not torch.equal(got[~finite].nan_to_num(7), want[~finite].nan_to_num(7)):
        return "has other infinities or NaNs"
    error = (got[finite] - want[finite]).norm() / want[finite].norm().clamp(min=1e-2)
    return f"is off by {error:.2g} of its size" if not error <= least else ""


def loss(values: list[torch.Tensor]) -> None:
    parts = [(v.sin() * (i + 1)).sum() for i, v in enumerate(values) if v.requires_grad]
    if parts:
        sum(parts).backward()


def memory(values: list[torch.Tensor]) -> list[tuple]:
    """Which of the values share it, and how they lie in it."""
    at = [v.untyped_storage().data_ptr() for v in values]
    return [(at.index(a), v.stride()) for a, v in zip(at, values, strict=True)]


def main(first: int, last: int) -> None:
    warnings.simplefilter("ignore")
    sites = refused = 0
    for seed in range(first, last):
        told, found = difference(seed)
        sites, refused = sites + max(found, 0), refused + (found < 0)
        if told:
            print(f"seed {seed}: {told}\n{program(seed)}\n", flush=True)
    print(f"{last - first} programs, {sites} sites, {refused} not run")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
