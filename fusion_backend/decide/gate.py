"""May we, should we, does the user want it: one Decision a site, each refusal a sentence.

Order of the questions: is the pattern wanted; may the graph be changed there; may the kernel take
these inputs; is it worth it. A decision names who computes the forward and the backward,
separately: our kernel or the reference, inlined.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from fusion_backend.capture.aliases import storages, written_by
from fusion_backend.capture.sizes import same
from fusion_backend.capture.view import View, is_lowered
from fusion_backend.compat.torch import (
    FakeTensor,
    enable_python_dispatcher,
    inductor_config,
    statically_known_true,
    storage_id,
)
from fusion_backend.decide import replacement as library
from fusion_backend.decide.kernel_trials import Trials
from fusion_backend.decide.neighbours import Neighbours
from fusion_backend.ir.argument_views import Viewed, geometry, original, value_of
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.expr import FREE, LIKE, peel
from fusion_backend.kernels.common.launch import on_gpu, trial
from fusion_backend.masks.analysis import Masks
from fusion_backend.match.matcher import Match
from fusion_backend.ops.operator import DECISION, op_of, seed_of
from fusion_backend.ops.pattern import LibraryCall, Pattern
from fusion_backend.options import Options
from fusion_backend.reporting.faults import of_kernel, refusal
from fusion_backend.reporting.reject import Reject
from fusion_backend.reporting.report import location

FLOATS = {torch.float32, torch.bfloat16, torch.float16}


@dataclasses.dataclass
class Decision:
    """What happens at a site. `forward` and `backward` are providers: kernel, reference, vjp, or
    None (untouched).
    """

    match: Match
    fused: bool
    reason: str
    forward: str | None = None
    backward: str | None = None
    save: bool = False
    value: object = None  # fake result of the op
    bytes_saved: int | None = None
    covered: bool = False  # by a larger site that is fused
    call: LibraryCall | None = None  # of the library provider
    copy: bool = False  # its result, because of the strides
    # a fault of ours or of the pattern's author, told to the user as a warning
    failure: str | None = None


class Gate:
    """Decides the sites of one view, in the order in which it is asked."""

    def __init__(
        self, view: View, canon: Canon, options: Options, inside: dict[str, dict] | None = None
    ):
        self.view, self.canon, self.options = view, canon, options
        self.order = {n: i for i, n in enumerate(view.graph.nodes)}
        self.trials = Trials()
        self.claimed: dict[fx.Node, Match] = {}
        self.fused = 0  # sites, in this view and before
        self.tried: dict[tuple, list[tuple]] = {}  # an op on arguments -> what its results are like
        self.writers: dict[int, list[fx.Node]] = {}  # storage -> nodes that may change it
        for n in view.graph.nodes:
            for storage in written_by(n, view, inside or {}):
                self.writers.setdefault(storage, []).append(n)
        self.masks = Masks(view, canon, self.writers, options.exact_masks)

    def decide_all(self, matches: list[Match], fused: int = 0) -> list[Decision]:
        """In the order given, after `fused` sites elsewhere; what `decide` has no answer for is
        left out.
        """
        for _ in self.trials.rounds():
            self.claimed, self.fused, self.tried = {}, fused, {}
            found = [d for d in map(self.decide, matches) if d is not None]
        return found

    def decide(self, match: Match) -> Decision | None:
        """None when the same pattern is already fused there, in a larger form."""
        try:
            return self.decided(match)
        except Exception as error:
            reason, fault = refusal(error, "deciding it")
            return Decision(match, False, reason, failure=fault)

    def decided(self, match: Match) -> Decision | None:
        if any(r in self.claimed and self.claimed[r].pattern is match.pattern for r in match.roots):
            return None
        covered = self.overlap(match)
        if covered:
            return Decision(match, False, covered, covered=True)
        for question in (self.unwanted, self.not_movable, self.not_supported):
            reason = question(match)
            if reason:
                return Decision(match, False, reason)
        decision = self.provide(match, self.training(match))
        decision.bytes_saved = match.bytes_inside(self.canon)
        if decision.fused:
            self.fused += 1
            results = {self.canon.of[r] for r in match.roots}
            again = [n for n in match.interior if self.canon.of[n] in results]
            self.claimed |= dict.fromkeys((*match.roots, *again, *self.computed(match)), match)
        return decision

    def computed(self, match: Match) -> list[fx.Node]:
        """What is computed inside; an argument, whatever it is cast to, or a result again, after a
        dropout in evaluation, say, is not.
        """
        of = self.canon.of
        given = {
            id(peel(of[v if isinstance(v, fx.Node) else v.node])) for v in match.tensors.values()
        }
        again = {id(of[r]) for r in match.roots}
        return [
            n for n in match.interior if id(of[n]) not in again and id(peel(of[n])) not in given
        ]

    def training(self, match: Match) -> bool:
        grad = all(self.view.region.get(r, (True,))[0] for r in match.roots)
        grad = grad and any(r.meta["val"].is_floating_point() for r in match.roots)
        names = {v.node if not isinstance(v, fx.Node) else v for v in match.tensors.values()}
        return grad and any(
            n in self.view.requires_grad or self.from_training(n) for n in (*names, *match.roots)
        )

    def from_training(self, n: fx.Node) -> bool:
        """A node between Dynamo nodes has no flag of its own: ask the Dynamo node's inputs."""
        owner = self.view.owner.get(n)
        examples = (
            [a.meta.get("example_value") for a in (owner, *owner.all_input_nodes)] if owner else []
        )
        return any(isinstance(v, torch.Tensor) and v.requires_grad for v in examples)

    # Does the user want it?

    def overlap(self, match: Match) -> str:
        costly = [n for n in self.computed(match) if self.canon.of[n].op not in FREE]
        other = next((self.claimed[n] for n in (*match.roots, *costly) if n in self.claimed), None)
        if other is None:
            return ""
        larger = other.template.size > match.template.size
        return f"overlaps {other.pattern.name}, which is {'larger' if larger else 'as large and was registered first'}"

    def unwanted(self, match: Match) -> str:
        name, o = match.pattern.name, self.options
        if o.gate == "never":
            return "fusion.gate is never"
        if (o.only and name not in o.only) or name in o.skip:
            return f"switched off by fusion.{'skip' if name in o.skip else 'only'}"
        if o.limit is not None and self.fused >= o.limit:
            return f"fusion.limit is {o.limit}"
        if draws(match) and inductor_config.fallback_random:
            return "Inductor's fallback_random asks for the random numbers that eager draws"
        return ""

    # May the graph be changed here?

    def not_movable(self, match: Match) -> str:
        inside = {*match.interior, *match.roots}
        arguments = [v if isinstance(v, fx.Node) else v.node for v in match.tensors.values()]
        names = {self.canon.of[a] for a in arguments if not a.meta["val"].is_floating_point()}
        stateful = [n for n in inside if n.op == "call_function" and self.canon.of[n] not in names]
        if self.crosses_state(stateful):  # a mask may come from anywhere: it has no gradient
            return "it crosses a change of grad mode, autocast or other state"
        for n in self.computed(match):
            if self.canon.of[n].op in FREE:
                continue
            for u in n.users:
                if (
                    u not in inside
                    and (u.users or u.target is not operator.getitem)
                    and not reads_only_kind(u, n)
                ):
                    return f"{n.name} inside it is used elsewhere too, at {location(u)}"
            for m in self.canon.of[n].nodes:
                if m not in inside and m.users and not inside.issuperset(m.users):
                    return f"{n.name} inside it is used elsewhere too, at {location(m)}"
        first_root = min(self.order[r] for r in match.roots)
        for a in arguments:
            if self.order[a] > first_root:
                return f"its argument {a.name} is computed after its first result"
        return self.changed(match, arguments) if self.writers else ""

    def changed(self, match: Match, arguments: list[fx.Node]) -> str:
        """Does something write to what the match reads, keeps or computes?"""
        held = set().union(*map(storages, arguments))
        within = set().union(*map(storages, match.interior)) - held
        results = set().union(*map(storages, match.roots)) - held - within
        first = min(self.order[n] for n in (*match.interior, *match.roots))
        last_root = max(self.order[r] for r in match.roots)
        for m in (m for storage in within for m in self.writers.get(storage, ())):
            if self.order[m] > first:  # a view of it, say, that is the result
                return f"a value inside is changed, at {location(m)}"
        for m in (m for storage in results for m in self.writers.get(storage, ())):
            if self.order[m] < last_root:
                return f"a result is changed before the last one, at {location(m)}"
        for storage in held | results:
            for m in self.writers.get(storage, ()):
                if storage in held and first < self.order[m] < last_root:
                    return f"an argument may be changed in between, at {location(m)}"
                # the op keeps its arguments for backward, where plain autograd may keep only what
                # it made of them
                later = (
                    is_lowered(m) and self.order[m] > last_root and isinstance(m.args[0], fx.Node)
                )
                kept = storage in held or match.pattern.backward_result
                if later and kept and storage in storages(m.args[0]) and self.training(match):
                    what = "an argument" if storage in held else "a result"
                    return f"{what} that backward reads is changed afterwards, at {location(m)}"
        return ""

    def crosses_state(self, nodes: list[fx.Node]) -> bool:
        """Casts, of which some do nothing, are the same under any autocast, but not under another
        grad mode.
        """
        of, regions = self.canon.of, {n: self.view.region.get(n) for n in nodes}
        casts = {n for n in nodes if any(peel(of[a]) is peel(of[n]) for a in n.all_input_nodes)}
        whole = {r for n, r in regions.items() if n not in casts}
        without_autocast = {r and (r[0], r[1], r[3]) for r in regions.values()}
        return len(whole) > 1 or len(without_autocast) > 1

    # May the kernel take it?

    def not_supported(self, match: Match) -> str:
        for name, node in match.tensors.items():
            v = original(node)
            if type(v) is not FakeTensor:
                return f"{name} is a {type(v).__name__}"
            if v.layout != torch.strided or v.is_quantized:
                return f"{name} is {'quantized' if v.is_quantized else v.layout}"
            exact = match.pattern.memo.get("dtypes", {}).get(name)
            if v.dtype not in FLOATS if exact is None else v.dtype != exact:
                wanted = (
                    "float32, bfloat16 and float16"
                    if exact is None
                    else str(exact).removeprefix("torch.")
                )
                return f"{name} is {str(v.dtype).removeprefix('torch.')}; kernels take {wanted}"
            if isinstance(node, Viewed) and any(
                step in ("half", "slice") for step, _ in node.steps
            ):
                v = node.value
            if statically_known_true(v.numel() == 0):
                return f"{name} is empty"
        devices = {v.device for v in map(original, match.tensors.values()) if v.dim()}
        if len(devices) > 1:
            return f"arguments on {' and '.join(sorted(map(str, devices)))}"
        return ""

    # Is it worth it, and who computes it?

    def provide(self, match: Match, training: bool) -> Decision:
        pattern = match.pattern
        cuda = all(on_gpu(original(a)) for a in match.tensors.values())
        offered = (
            library.offer(match, self.masks, training) if pattern.library_fn is not None else None
        )
        if isinstance(offered, LibraryCall):
            no = self.own_refused(match, offered, training, cuda)
            if no is None:
                return self.called(match, offered, training)
            offered = Reject(f"{offered.stays}: {offered.why}")
        else:
            no = self.kernel_refused(match, training, cuda)
            if offered and pattern.kernel_fn is None:  # the library's reason is the whole reason
                no, offered = offered, None
        backward = self.backward_provider(pattern, cuda) if training else None
        random = draws(match)
        inline = (
            not cuda
            and self.options.gate == "always"
            and (not random or pattern.seeded_fn is not None)
        )
        # dropout in torch is slow
        own = backward != "vjp" and training and pattern.can_inline_forward and not random
        inline |= no is not None and no.forward_only and own
        said = "" if no is None else f"{offered.reason}; {no.reason}" if offered else no.reason
        if no is not None and not inline:
            return Decision(match, False, said)
        forward = "kernel" if no is None else "reference"
        reason = "" if no is None else f"forward inlined: {said}"
        decision = Decision(match, True, reason, forward, backward, training)
        values = [value_of(match.arguments[p.name]) for p in pattern.params]
        failure = self.try_out(decision, values)
        if failure:
            return Decision(match, False, failure, failure=failure)
        wrong = result_differs(decision, values)
        return Decision(match, False, wrong) if wrong else decision

    def called(self, match: Match, call: LibraryCall, training: bool) -> Decision:
        """The library provider's decision: autograd goes through its call."""
        root, own = match.roots[0], call.op if isinstance(call.op, Pattern) else None
        providers = ("library", "autograd")
        if own:
            formula = "formula" if own.backward_fn else "vjp"
            providers = ("kernel", "kernel") if own.kernel_fn else ("reference", formula)
            chosen = {
                "forward": providers[0],
                "backward": providers[1] if training else "vjp",
                "save": training,
            }
            call = dataclasses.replace(call, op=op_of(own).overload, options=call.options | chosen)
        try:
            results = library.results_of(match, call)
        except Exception as error:
            return Decision(match, False, f"{call.op} refuses it: {type(error).__name__}: {error}")
        wrong = library.differs(results[0], root.meta["val"])
        if wrong:
            return Decision(match, False, wrong)
        copy = library.needs_copy(root, results[0], self.writers)
        backward = providers[1] if training else None
        decision = Decision(
            match, True, call.why, providers[0], backward, training, results, call=call, copy=copy
        )
        if own and torch.cuda.is_available():
            numbers = [value for name, value in call.options.items() if name not in DECISION]
            try:
                with results[0].fake_mode, torch.no_grad():
                    self.compile_kernels(
                        op_of(own), [*library.values_of(match, call), *numbers], decision
                    )
            except Exception as error:
                return Decision(match, False, of_kernel(error), failure=of_kernel(error))
        return decision

    def own_refused(
        self, match: Match, call: LibraryCall, training: bool, cuda: bool
    ) -> Reject | None:
        """Where the operator is that of a pattern: does its kernel take it, and is it worth it?"""
        if not isinstance(call.op, Pattern):
            return None
        reads = training and call.op.backward_result
        if reads and any(storage in self.writers for r in match.roots for storage in storages(r)):
            return Reject("its result, which backward reads, is changed afterwards")
        if draws(match) and call.SEED not in call.tensors:
            return Reject("it draws random numbers and its call takes no seed")
        values = [*library.values_of(match, call), *call.options.values()]
        return self.kernel_refused(match, training, cuda, call.op, values)

    def backward_provider(self, pattern: Pattern, cuda: bool) -> str:
        if pattern.backward_fn is None:
            return "vjp"
        return "formula" if pattern.backward_plain else "kernel" if cuda else "vjp"

    def kernel_refused(
        self, match: Match, training: bool, cuda: bool, pattern=None, values=None
    ) -> Reject | None:
        """Of the match's pattern, or of another that is called in its place on these values."""
        # its gradient is what is gained, in torch code
        plain = pattern is not None and pattern.kernel_fn is None
        pattern = pattern or match.pattern
        if pattern.kernel_fn is None and not plain:
            return Reject("no kernel yet")
        if draws(match) and pattern is match.pattern and pattern.seeded_fn is None:
            return Reject("it draws random numbers and has no seeded reference")
        if not cuda and not (plain and self.options.gate == "always"):
            return Reject(
                "it has been timed on CUDA only" if plain else "the kernel needs CUDA tensors"
            )
        values = values or [value_of(match.arguments[p.name]) for p in pattern.params]
        around, auto = Neighbours(match), self.options.gate != "always"
        questions = [(pattern, "guard", values)]
        if auto:
            questions.append((match.pattern, "neighbours", [around, training]))
            questions.append((pattern, "worthwhile", [*values, training]))
        for asked, question, given in questions:
            answer = asked.asked(question, *given)
            if isinstance(answer, Reject) and not answer.forward_only:
                return answer
        half = answer if isinstance(answer, Reject) else None
        beside = around.fusable(self.canon, training) if pattern.inductor and auto else None
        return beside if half is None or (beside and not beside.forward_only) else half

    def try_out(self, decision: Decision, values: list) -> str:
        """Run the op on fakes, and compile its kernels, before the graph depends on them."""
        pattern = decision.match.pattern
        op = op_of(pattern)
        tensor = next(v for v in values if isinstance(v, torch.Tensor))
        given = {p.name: v for p, v in zip(pattern.params, values, strict=True)}
        flat = op.flatten(given | seed_of(pattern, tensor))
        chosen = {
            "forward": decision.forward,
            "backward": decision.backward or "vjp",
            "save": decision.save,
        }
        mode = tensor.fake_mode
        key = (pattern.name, *chosen.values(), *map(geometry, values))
        try:
            # without it expand may refuse symbolic sizes
            with mode, torch.no_grad(), enable_python_dispatcher():
                if key in self.tried:  # the layers of a model are alike
                    known = self.tried[key]
                    decision.value = tuple(
                        torch.empty_strided(*g[2:4], dtype=g[0], device=g[1]) for g in known
                    )
                    return ""
                out = op.overload(*flat, **chosen)
                decision.value = out if isinstance(out, tuple) else (out,)
                if torch.cuda.is_available() and "kernel" in (decision.forward, decision.backward):
                    self.compile_kernels(op, flat, decision)
        except Exception as error:
            return of_kernel(error)
        if not shares_memory(decision.value, values):
            self.tried[key] = [(o.dtype, o.device, o.shape, o.stride()) for o in decision.value]
        return ""

    def compile_kernels(self, op, flat: list, decision: Decision) -> None:
        with trial(self.trials):
            if decision.forward == "kernel":
                op.forward(*flat, forward="kernel", backward="vjp", save=decision.save)
            if decision.backward == "kernel":
                results = decision.value[: op.pattern.outputs]
                kept = (
                    decision.value
                    if op.pattern.backward_result
                    else decision.value[op.pattern.outputs :]
                )
                op.backward(*results, *kept, [True] * len(op.tensors), *flat)


def draws(match: Match) -> bool:
    """Are there random numbers in this form of the pattern?"""
    return match.template.kinds in match.pattern.memo.get("random", ())


def shares_memory(results: tuple, values: list) -> bool:
    given = {storage_id(v) for v in values if isinstance(v, torch.Tensor)}
    return any(storage_id(out) in given for out in results)


def result_differs(decision: Decision, values: list) -> str:
    """Later views rely on the strides that the graph was traced with, and later in-place code on
    fresh memory.
    """
    if shares_memory(decision.value, values):
        return "the result would share memory with an argument"
    for out, root in zip(decision.value, decision.match.roots, strict=False):
        want = root.meta["val"]
        if out.dtype != want.dtype:
            return f"the kernel gives {out.dtype}, the graph has {want.dtype}"
        if not same(out.shape, want.shape):
            return f"the kernel gives {tuple(out.shape)}, the graph has {tuple(want.shape)}"
        if not library.laid_out_as(out, want):
            return f"the result has strides {tuple(out.stride())}, the graph has {tuple(want.stride())}"
    return ""


def reads_only_kind(user: fx.Node, n: fx.Node) -> bool:
    """Is it the y of x.type_as(y) or its like?"""
    return user.target in LIKE and n is not user.args[0]
