"""Runs of a compiled graph on twins of its inputs: their results and their times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fusion_backend.compat.memory import saves_unseen
from fusion_backend.compat.torch import plain_tensors, pytree
from fusion_backend.frontends.twins import Twins
from fusion_backend.measure.agreement import Value
from fusion_backend.measure.timing import Clock
from fusion_backend.reporting import report as reporting

NUMBERS = (int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool, type(None))
LONG_MS = 100.0
Compiled = Callable[..., object]


class NotVerified(Exception):
    """Why the two are not compared, in words."""


class Runs:
    """Runs on twins, forward and, where gradients are wanted, backward."""

    def __init__(self, twins: Twins, device: torch.device):
        self.twins, self.device = twins, device
        self.tangents: list[Tensor] | None = None

    def run(self, fn: Compiled) -> tuple[list, list, list]:
        """The arguments, the results and the gradients."""
        args = self.twins.arguments()
        out = pytree.tree_leaves(fn(*args))
        smooth = [o for o in out if isinstance(o, Tensor) and o.requires_grad]
        if not self.twins.leaves or not smooth:
            return args, out, []
        if self.tangents is None:
            self.tangents = [tangent(o) for o in smooth]
        with torch.autocast(self.device.type, enabled=False):
            leaves = list(self.twins.leaves.values())
            grads = torch.autograd.grad(smooth, leaves, self.tangents, allow_unused=True)
        return args, out, list(grads)

    def values(self, fn: Compiled) -> tuple[list[Value], bool]:
        """All values that a run computes, and whether it drew random numbers. Raises NotVerified if
        twins cannot replace the inputs.
        """
        self.twins.put_back()
        before = random_state(self.device)
        args, out, grads = self.run(fn)
        if self.twins.written_unseen():
            told = "it writes to a parameter, and no call says so by its name"
            reporting.warn_once(f"verify {told}", f"fusion: a graph ran once too often: {told}")
            raise NotVerified(told)
        if self.twins.moved(args):
            raise NotVerified("it changes the shape or the memory of an input")
        random = not all(map(torch.equal, before, random_state(self.device)))
        found = [(f"result {i}", o.detach()) for i, o in enumerate(out) if isinstance(o, Tensor)]
        left = enumerate(self.twins.content())
        found += [(f"input {i} after the call", t) for i, t in left if t is not None]
        pairs = zip(self.twins.leaves, grads, strict=False)
        found += [(f"the gradient of input {i}", g) for i, g in pairs]
        return [Value(name, part) for name, t in found for part in dense_parts(t)], random

    def clock(self) -> Clock:
        return OnTwins(self.device, self.twins)


class OnTwins(Clock):
    """A clock for runs on twins: each sample begins with the content of the user's inputs. A long
    call is not repeated to hide the host's time.
    """

    def __init__(self, device: torch.device, twins: Twins):
        super().__init__(device)
        self.twins = twins

    def __call__(self, call: Callable[[], object]) -> float:
        if self.buffer is None:
            self.twins.put_back()
        return super().__call__(call)

    def once(self, call: Callable[[], object]) -> tuple[float, bool]:
        self.twins.put_back()
        ms, exposed = super().once(call)
        return ms, exposed and ms < LONG_MS


@contextlib.contextmanager
def apart(args: tuple) -> Iterator[torch.device]:
    """Inside, runs leave the random state as it was, and no hook of the user's sees what autograd
    saves. Gives the device that is timed.
    """
    on_cuda = [a.device for a in args if isinstance(a, Tensor) and a.device.type == "cuda"]
    device = on_cuda[0] if on_cuda else torch.device("cpu")
    here = torch.cuda.device(device) if on_cuda else contextlib.nullcontext()
    current = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    generators = {*current, *(d.index for d in on_cuda)}
    with torch.random.fork_rng(devices=sorted(generators)), here, saves_unseen():
        yield device


def check(args: tuple) -> None:
    """Raise NotVerified for inputs that cannot be had twice."""
    for i, a in enumerate(args):
        if not isinstance(a, Tensor):
            if not isinstance(a, NUMBERS):
                raise NotVerified(f"input {i} is a {type(a).__name__}")
        elif not plain_tensors([a]) or a.is_conj() or a.is_neg():
            raise NotVerified(f"input {i} is a tensor of a kind of its own")
        elif a.layout != torch.strided or a.device.type == "meta":
            raise NotVerified(f"input {i} has no memory that could be copied")


def tangent(out: Tensor) -> Tensor:
    """An output's gradient: 1 for a loss, random for anything else."""
    if out.numel() == 1:
        return torch.ones_like(out)
    generator = torch.Generator(out.device).manual_seed(0)
    return torch.empty_like(out.detach()).normal_(generator=generator)


def dense_parts(t: Tensor | None) -> list[Tensor | None]:
    """The tensor; for a sparse one its indices and values, after the values of each place are added
    up.
    """
    if t is None or t.layout == torch.strided:
        return [t]
    t = t.to_sparse_coo().coalesce()
    return [t.indices(), t.values()]


def random_state(device: torch.device) -> list[Tensor]:
    """The random state of the CPU and of a device."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
