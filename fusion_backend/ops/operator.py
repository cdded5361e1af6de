"""Op -> torch.ops.fusion.<name>: dispatch, shape rule, autograd.

The op is a triton_op, so AOTAutograd opens it up and Inductor launches the kernels from its own
wrapper. Its keyword arguments are the gate's decision: `forward` is "kernel" or "reference"
(inlined, for Inductor to fuse as if we were not there), `backward` is "kernel", "formula" (the
op's own, in plain torch) or "vjp" (of the reference), `save` says whether anybody will
differentiate, `unread` names the results that nobody reads, by their place: "1", or "0 2", and
`narrow` is the 16-bit dtype to which the first result is rounded, "bfloat16", or "".
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types

import torch
from torch import Tensor

from fusion_backend.compat.torch import new_op, plain_tensors, remove_op, statically_known_true
from fusion_backend.kernels.common.launch import interpreting, on_gpu
from fusion_backend.ops.op import Op
from fusion_backend.ops.registry import registered
from fusion_backend.reporting.reject import PatternError

DECISION = {"forward": "kernel", "backward": "kernel", "save": True, "unread": "", "narrow": ""}
# An operator that AOTAutograd and Inductor know draws the seed of an op with random numbers. The
# seed therefore follows torch.manual_seed, is kept for the backward, and is the same when a
# checkpoint recomputes.
DRAW = torch.ops.aten.randint.low


class Operator:
    """The registered operators of one op, and how arguments map to their schema."""

    def __init__(self, op: Op):
        self.op = op
        self.fields = [field for p in op.params for field in fields(p)]
        self.tensors = [p.name for p in op.params if p.tensor]
        self.tensor_fields = [
            i for i, f in enumerate(self.fields) if f.annotation in (Tensor, Tensor | None)
        ]
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.fields += [
            inspect.Parameter(name, plain, annotation=Tensor) for name in op.seed_arguments
        ]
        # runs where the kernel does not
        self.reference = op.seeded_fn or op.reference
        self.results = op.outputs + len(op.saves)
        self.call = new_op(f"fusion::{op.name}", signed(self.forward, self.schema()))
        self.call.register_autograd(self.gradient, setup_context=self.keep)
        self.backward_call = None
        if op.backward_fn is not None and not op.backward_plain:
            name = f"fusion::{op.name}_backward"
            self.backward_call = new_op(name, signed(self.backward, self.backward_schema()))

    def remove(self) -> None:
        """Unregister the operators from torch, because the op's name may get another meaning."""
        for call in (self.call, self.backward_call):
            if call is not None:
                remove_op(call)

    @property
    def overload(self):
        """The torch operator that goes into graphs."""
        return getattr(torch.ops.fusion, self.op.name).default

    # Schemas. A `Tensor | float` argument has two fields, of which one is None.

    def schema(self) -> inspect.Signature:
        keep = inspect.Parameter.KEYWORD_ONLY
        decision = [
            inspect.Parameter(k, keep, default=v, annotation=type(v)) for k, v in DECISION.items()
        ]
        return inspect.Signature([*self.fields, *decision], return_annotation=returns(self.results))

    def backward_schema(self) -> inspect.Signature:
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        kinds = [Tensor | None if may else Tensor for may in self.op.backward_missing]
        first = [
            inspect.Parameter(f"grad_{i}", plain, annotation=kind) for i, kind in enumerate(kinds)
        ]
        results = range(self.op.outputs if self.op.backward_result else 0)
        first += [inspect.Parameter(f"result_{i}", plain, annotation=Tensor) for i in results]
        saved = [
            inspect.Parameter(f"saved_{name}", plain, annotation=Tensor) for name in self.op.saves
        ]
        needs = inspect.Parameter("needs", plain, annotation=list[bool])
        return inspect.Signature(
            [*first, *saved, needs, *self.fields], return_annotation=returns(len(self.tensors))
        )

    def flatten(self, arguments: dict[str, object]) -> list:
        """Arguments of the reference -> arguments of the operator: tensors, fakes or nodes."""
        out = []
        for p in self.op.params:
            value = arguments[p.name]
            number = isinstance(value, (int, float))
            if p.words or p.text:
                out.append(value)
            if p.tensor:
                out.append(None if number else value)
            if p.scalar is not None:
                out.append(p.scalar(value) if number else None)
        return out + [arguments[name] for name in self.op.seed_arguments]

    def unflatten(self, flat: tuple) -> list:
        rest = iter(flat)
        out = []
        for p in self.op.params:
            values = [next(rest) for _ in fields(p)]
            out.append(next((v for v in values if v is not None), None))
        return [*out, *rest]

    # What the operators do.

    def forward(self, *flat, forward="kernel", backward="kernel", save=True, unread="", narrow=""):
        op, args = self.op, self.unflatten(flat)
        with without_autocast():
            if forward == "kernel" and self.kernel_takes(args):
                skipped = self.left_out(backward, save, unread)
                out = op.launched(args, save, skipped, narrowed_to(narrow))
                out = out if isinstance(out, tuple) else (out,)
            else:
                out = self.plain(args, narrow)
                out += self.saved(args, save and backward != "vjp", out[0])
        if len(out) != self.results:
            raise PatternError(
                f"{op.where}: the kernel returns {len(out)} tensors, not {self.results}"
            )
        return out[0] if self.results == 1 else out

    def plain(self, args: list, narrow: str) -> tuple[Tensor, ...]:
        """The results of the reference."""
        out = self.reference(*args)
        first, *rest = out if isinstance(out, tuple) else (out,)
        return first.to(narrowed_to(narrow) or first.dtype), *rest

    def left_out(self, backward: str, save: bool, unread: str) -> tuple[int, ...]:
        """The results that the kernel need not write; none if the op has a backward of its own,
        which may read any.
        """
        own = save and backward != "vjp" and self.op.backward_fn is not None
        return () if own else tuple(map(int, unread.split()))

    def kernel_takes(self, args: list) -> bool:
        """May the kernel run? The gate has asked the guard before; a direct call of the op runs the
        reference if the guard refuses.
        """
        p = self.op
        if p.kernel_fn is None or not runs_kernel(args):
            return False
        return p.ask("guard", *args[: len(p.params)]) is None

    def saved(self, args: list, wanted: bool, like: Tensor) -> tuple[Tensor, ...]:
        if wanted and self.op.saved_fn is not None:
            out = self.op.saved_fn(*args)
            return out if isinstance(out, tuple) else (out,)
        return tuple(like.new_empty(0, dtype=torch.float32) for _ in self.op.saves)

    def keep(self, ctx, inputs, keyword_only_inputs, output) -> None:
        out = output if isinstance(output, tuple) else (output,)
        saves = out[self.op.outputs :]
        ctx.mark_non_differentiable(*saves)
        ctx.numbers = [None if isinstance(a, Tensor) else a for a in inputs]
        ctx.has = [isinstance(a, Tensor) for a in inputs]
        ctx.decision = {**DECISION, **keyword_only_inputs}
        own = self.op.backward_result and ctx.decision["backward"] != "vjp"
        # of one result: a gradient that is missing goes on as missing, as autograd's own does
        ctx.set_materialize_grads(
            self.op.outputs > 1 and not (own and any(self.op.backward_missing))
        )
        kept = out if own else saves  # a kept result may not be written to in place
        ctx.save_for_backward(*(a for a in inputs if isinstance(a, Tensor)), *kept)

    def gradient(self, ctx, *grads):
        """The backward formula, run by autograd; under AOTAutograd it is traced."""
        tensors = iter(ctx.saved_tensors)
        flat = [
            next(tensors) if has else number
            for has, number in zip(ctx.has, ctx.numbers, strict=True)
        ]
        results = list(tensors)  # and what the kernel saved
        # a result that was left out has a shape of its own, and no gradient
        unread = self.left_out(*(ctx.decision[k] for k in ("backward", "save", "unread")))
        grads = [None if i in unread else g for i, g in enumerate(grads[: self.op.outputs])]
        needs = list(ctx.needs_input_grad[: len(flat)])
        if all(g is None for g in grads):
            return tuple(None for _ in needs)
        choice, op, args = ctx.decision, self.op, self.unflatten(flat)
        plain = functools.partial(self.vjp, flat, needs, grads, choice["narrow"])
        own = op.backward_fn is not None and choice["save"] and choice["backward"] != "vjp"
        taken = self.kernel_takes(args)
        if not own or not (op.can_inline_forward or (taken and choice["forward"] == "kernel")):
            return plain()
        if torch.is_grad_enabled() and (op.saves or not op.backward_plain):
            return plain()  # to autograd, what a kernel saved is a constant
        needed = {name: needs[i] for name, i in zip(self.tensors, self.tensor_fields, strict=True)}
        for name, other in op.backward_same.items():
            if other in needed:
                needed[other] |= needed[name]
        wanted = list(needed.values())
        zeros = [g is None and not may for g, may in zip(grads, op.backward_missing, strict=True)]
        if any(zeros):
            grads = [
                torch.zeros_like(r) if no else g
                for no, g, r in zip(zeros, grads, results, strict=False)
            ]
        if op.backward_plain:
            found = self.run_backward(*grads, *results, wanted, *flat)
        elif taken:
            found = self.backward_call(*grads, *results, wanted, *flat)
            found = found if isinstance(found, tuple) else (found,)
            tensors = (flat[i] for i in self.tensor_fields)
            found = [None if missing(g, t) else g for g, t in zip(found, tensors, strict=True)]
        else:
            return plain()
        gradients = dict(zip(self.tensors, found, strict=True))
        gradients |= {
            name: grads[other] if isinstance(other, int) else gradients[other]
            for name, other in op.backward_same.items()
            if gradients[name] is None
        }
        by_field = dict(zip(self.tensor_fields, gradients.values(), strict=True))
        return tuple(by_field.get(i) if need else None for i, need in enumerate(needs))

    def backward(self, *flat):
        """The backward as an operator: a gradient that nobody wants is an empty tensor."""
        out = tuple(flat[0].new_empty(0) if g is None else g for g in self.run_backward(*flat))
        return out[0] if len(out) == 1 else out

    def run_backward(self, *flat):
        n, k = self.op.outputs, len(self.op.saves)
        m = n if self.op.backward_result else 0
        grads, results, saves = flat[:n], flat[n : n + m], flat[n + m : n + m + k]
        needs, args = flat[n + m + k], self.unflatten(flat[n + m + k + 1 :])
        names = (*(p.name for p in self.op.params), *self.op.seed_arguments)
        saved = types.SimpleNamespace(**dict(zip(names, args, strict=True)))
        for name, tensor in zip(self.op.saves, saves, strict=True):
            setattr(saved, name, tensor)
        if m:
            saved.result = results if n > 1 else results[0]
        saved.needs = {
            name: need and getattr(saved, name) is not None  # an argument that may be missing
            for name, need in zip(self.tensors, needs, strict=True)
        }
        with without_autocast():
            out = self.op.backward_fn(saved, *grads)
        out = out if isinstance(out, tuple) else (out,)
        if len(out) != len(self.tensors):
            raise PatternError(
                f"{self.op.where}: the backward returns {len(out)} gradients, not "
                f"{len(self.tensors)}"
            )
        return out

    def vjp(self, flat: list, needs: list[bool], grads, narrow: str):
        """The gradient of the reference. Differentiable again when autograd is recording."""
        again = torch.is_grad_enabled()
        with torch.enable_grad(), without_autocast():
            inputs = [a.view_as(a) if need else a for a, need in zip(flat, needs, strict=True)]
            out = self.plain(self.unflatten(inputs), narrow)
            pairs = [
                (o, g) for o, g in zip(out, grads, strict=True) if o.requires_grad and g is not None
            ]
            wanted = [i for i, need in zip(inputs, needs, strict=True) if need]
            found = iter(
                torch.autograd.grad(
                    [o for o, _ in pairs],
                    wanted,
                    [g for _, g in pairs],
                    allow_unused=True,
                    create_graph=again,
                )
                if pairs
                else [None] * len(wanted)
            )
        return tuple(next(found) if need else None for need in needs)


def narrowed_to(narrow: str) -> torch.dtype | None:
    return getattr(torch, narrow) if narrow else None


def missing(gradient: Tensor | None, t: Tensor | None) -> bool:
    """Is it the empty tensor that stands for no gradient, and not the gradient of an empty t?"""
    if gradient is None or t is None:
        return True
    return is_empty_vector(gradient) and not is_empty_vector(t)


def is_empty_vector(t: Tensor) -> bool:
    return t.dim() == 1 and statically_known_true(t.shape[0] == 0)


def how_to_draw(device: torch.device) -> tuple[tuple, dict]:
    """The arguments of DRAW for one seed."""
    return (0, 2**63 - 1, [1]), dict(dtype=torch.int64, device=device)


def draw(device: torch.device) -> Tensor:
    """A seed, as a rewritten graph draws it."""
    args, kwargs = how_to_draw(device)
    return DRAW(*args, **kwargs)


def fake_seed(like: Tensor) -> Tensor:
    """A fake seed on the device of the fake tensor `like`."""
    with like.fake_mode:
        return draw(like.device)


def fields(p) -> list[inspect.Parameter]:
    """The schema arguments of one argument of the reference."""
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    either = p.tensor and p.scalar is not None
    out = []
    if p.words or p.text:
        out.append(inspect.Parameter(p.name, plain, annotation=str))
    if p.tensor:
        hint = Tensor | None if p.optional or either else Tensor
        out.append(inspect.Parameter(p.name, plain, annotation=hint))
    if p.scalar is not None:
        name = f"{p.name}_{p.scalar.__name__}" if either else p.name
        hint = p.scalar | None if either or p.optional else p.scalar
        out.append(inspect.Parameter(name, plain, annotation=hint))
    return out


def returns(n: int):
    return Tensor if n == 1 else tuple[(Tensor,) * n]


def signed(method, signature: inspect.Signature):
    """A function with the signature that the schema is read from."""

    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return method(*bound.args, **bound.kwargs)

    call.__signature__ = signature
    call.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {
        "return": signature.return_annotation
    }
    return call


@contextlib.contextmanager
def without_autocast():
    """Run without autocast: the casts of a fused site are explicit on its inputs."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def runs_kernel(args: list) -> bool:
    """Kernels run on CUDA, and on real CPU tensors in Triton's interpreter."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    return all(map(on_gpu, tensors)) or (interpreting() and plain_tensors(tensors))


def operator_of(op: Op) -> Operator:
    """The operator of an op, registered at first use."""
    if "operator" not in op.memo:
        if not registered(op):
            raise PatternError(
                f"{op.where}: another definition has its name, and the operator of that name"
            )
        op.memo["operator"] = Operator(op)
    return op.memo["operator"]


def call(op: Op, args: tuple):
    """Run an op as a user calls it: kernel and gradient where they are possible, a seed drawn."""
    operator = operator_of(op)
    tensors = [a for a in args if isinstance(a, Tensor)]
    if len(args) != len(op.params) or not tensors:
        names = ", ".join(p.name for p in op.params)
        raise TypeError(f"{op.name} takes ({names}), of which some are tensors")
    given = dict(zip((p.name for p in op.params), args, strict=True))
    given |= {name: draw(tensors[0].device) for name in op.seed_arguments}
    save = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    out = operator.overload(*operator.flatten(given), save=save)
    if not isinstance(out, tuple):
        return out
    return out[0] if op.outputs == 1 else out[: op.outputs]
