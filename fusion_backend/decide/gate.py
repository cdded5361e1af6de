"""Makes one decision for each site: whether it is fused, with which providers, and why. Every
refusal is a sentence.

The questions, in order: does the user want the pattern? May the graph be changed there (legality)?
What would replace the site? Does the replacement take these inputs? Is it faster (profitability)? A
decision names the *providers*, which compute the forward and the backward, separately: a kernel,
the reference, inlined for Inductor, or a library call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch

from fusion_backend.compat.torch import storage_id
from fusion_backend.decide.call import (
    COPIED,
    NARROWED,
    Call,
    by_name,
    call_of_op,
    call_of_torch,
    differs,
    draws_random_numbers,
    replacement_of,
    seedless,
    to_copy,
    values_of,
    written,
)
from fusion_backend.decide.claims import Claims
from fusion_backend.decide.evidence import Evidence, Measured
from fusion_backend.decide.facts import Facts
from fusion_backend.decide.inductor_asks import asked
from fusion_backend.decide.kernel_trials import Trials, compile_kernels
from fusion_backend.decide.legality import Legality
from fusion_backend.decide.neighbours import Neighbours
from fusion_backend.ir.argument_views import geometry, original
from fusion_backend.kernels.common.launch import on_gpu
from fusion_backend.kernels.common.target import TARGET
from fusion_backend.match.matcher import Match
from fusion_backend.ops.extension import Extension
from fusion_backend.ops.op import Op
from fusion_backend.ops.rule import SEED, Replacement
from fusion_backend.options import Options
from fusion_backend.reporting.faults import of_kernel, refusal
from fusion_backend.reporting.records import (
    COVERED,
    FAILED,
    ILLEGAL,
    NO_GPU,
    NO_KERNEL,
    SWITCHED_OFF,
    UNPROFITABLE,
    UNSUPPORTED,
)
from fusion_backend.reporting.reject import BackwardOnly, Reject, Settled

# Of extended matches only these refusals are reported, and measured ones. The match that was
# extended is reported in any case.
ABOUT_EXTENSIONS = (UNSUPPORTED, FAILED)


@dataclasses.dataclass
class Decision:
    """What happens at a site. `forward` and `backward` are providers: "kernel", "reference",
    "library", "formula", "vjp", "autograd", or None (untouched).
    """

    match: Match
    fused: bool
    reason: str
    forward: str | None = None
    backward: str | None = None
    call: Call | None = None  # what is written at the site
    op: Op | None = None  # of ours, that is called
    doubt: Reject | None = None  # of a proposal: why the tables refuse it
    bytes_saved: int | None = None
    cause: str | None = None  # of a refusal: one of the words of reporting/records.py
    alternative: bool = False  # another refused site shares nodes with it and is counted instead
    # a fault of ours or of the pattern's author, which a warning reports
    failure: str | None = None

    @property
    def providers(self) -> str:
        return f"{self.forward}/{self.backward}"


class Gate:
    """Decides the sites of one graph, in the order in which they come. `other_readings` is the
    matcher's; a judge may add to `evidence` between rounds.
    """

    def __init__(
        self,
        facts: Facts,
        options: Options,
        other_readings: Callable[[Match], Iterable[Match]],
    ):
        self.evidence = Evidence()
        self.other_readings = other_readings
        self.facts, self.canon, self.options = facts, facts.canon, options
        self.legality = Legality(facts)
        self.trials = Trials()
        self.claims = Claims(self.legality)
        self.fused = 0  # sites, in this graph and before
        self.tried: dict[tuple, list[tuple]] = {}  # an op on arguments -> what its results are like
        self.provided: dict[int, tuple] = {}  # a match -> the evidence, and what was decided by it
        self.found: list[Decision] = []  # the latest

    def decide_all(self, matches: list[Match], fused: int = 0) -> list[Decision]:
        """Decide matches in the order given, after `fused` sites in other scopes. A match for which
        `decide` returns None is left out.
        """
        for number, _ in enumerate(self.trials.rounds()):
            self.claims, self.fused = Claims(self.legality), fused
            if number:  # a kernel on which a decision relied has failed
                self.tried, self.provided = {}, {}
            self.found = [d for d in map(self.decide, matches) if d is not None]
        return self.found

    def decide(self, match: Match) -> Decision | None:
        """The decision about one match; None if it is not reported: a larger form of the pattern is
        fused there, or it was extended and is not even proposed.
        """
        try:
            found = self.decided(match)
            if found is None or found.fused or not isinstance(match.pattern, Extension):
                return found
            told = found.cause in ABOUT_EXTENSIONS or self.evidence.lost(match)
            return found if told else None
        except Exception as error:
            reason, fault = refusal(error, "deciding it")
            cause = FAILED if fault else UNSUPPORTED
            return Decision(match, False, reason, cause=cause, failure=fault)

    def decided(self, match: Match) -> Decision | None:
        claimed = self.claims.computed
        if any(r in claimed and claimed[r].pattern is match.pattern for r in match.roots):
            return None
        if covered := self.claims.overlap(match):
            return Decision(match, False, covered, cause=COVERED)
        if reason := self.unwanted(match):
            return Decision(match, False, reason, cause=SWITCHED_OFF)
        if reason := self.illegal(match):
            if (other := self.legal_reading(match)) is None:
                return Decision(match, False, reason, cause=ILLEGAL)
            match = other
        decision = self.provided_once(match)
        if decision.fused and (answer := self.evidence.of(match)):
            decision = self.as_measured(decision, answer)
        decision.bytes_saved = match.bytes_inside(self.canon)
        if decision.fused:
            self.fused += 1
            self.claims.add(match)
        return decision

    def legal_reading(self, match: Match) -> Match | None:
        """Another way to match the pattern at this node that is legal and overlaps no fused site. A
        pattern without a kernel, or of two operators, is not worth the search.
        """
        rule = match.pattern
        kernel = not isinstance(rule, Op) or rule.kernel_fn or rule.replacement_fn
        if isinstance(rule, Extension) or not kernel or match.template.size <= 2:
            return None
        others = (o for o in self.other_readings(match) if not self.claims.overlap(o))
        return next((other for other in others if not self.illegal(other)), None)

    def illegal(self, match: Match) -> str:
        return self.legality.refusal(match) or self.claims.conflict(match)

    def as_measured(self, decision: Decision, answer: Measured) -> Decision:
        """The decision that follows from a measured answer."""
        if not answer.take:
            return Decision(decision.match, False, answer.reason, cause=UNPROFITABLE)
        if answer.take != decision.providers:
            other = self.other_half(decision)
            if other is None or answer.take != other.providers:
                why = f"the measured choice, {answer.take}, is not possible here"
                return Decision(decision.match, False, why, cause=UNPROFITABLE)
            decision = other
        return dataclasses.replace(decision, reason=answer.reason, doubt=None)

    def other_half(self, decision: Decision) -> Decision | None:
        """The same site with the other provider of the forward: Inductor instead of the kernel, or
        the reverse. None if only one is possible.
        """
        op, match = decision.op, decision.match
        if op is None or op is not match.pattern or decision.backward in (None, "vjp"):
            return None
        if not op.can_inline_forward or draws_random_numbers(match) or op.kernel_fn is None:
            return None
        forward = "reference" if decision.forward == "kernel" else "kernel"
        own = Replacement(op, tuple(match.arguments[p.name] for p in op.params))
        other = self.op_call(match, own, True, True, forward)
        return other if other.fused else None

    # Does the user want it?

    def unwanted(self, match: Match) -> str:
        name, o = match.pattern.name, self.options
        if o.gate == "never":
            return "fusion.gate is never"
        if (o.only and name not in o.only) or name in o.skip:
            return f"switched off by fusion.{'skip' if name in o.skip else 'only'}"
        if o.limit is not None and self.fused >= o.limit:
            return f"fusion.limit is {o.limit}"
        return asked(match)

    # What would replace it, does that take the inputs, is it faster?

    def provided_once(self, match: Match) -> Decision:
        """`provide`, called again only if the evidence has changed."""
        evidence = (self.evidence.of(match), self.evidence.wanted)
        known = self.provided.get(id(match))
        if known is None or known[1] != evidence:
            decision = self.provide(match, self.facts.training(match))
            known = self.provided[id(match)] = (match, evidence, decision)
        return dataclasses.replace(known[2])

    def provide(self, match: Match, training: bool) -> Decision:
        """The decision with the replacement; if it is refused, the rule's own op may be inlined."""
        rule, cuda = match.pattern, all(on_gpu(original(a)) for a in match.tensors.values())
        answer = replacement_of(match, self.facts, training)
        refused, cause = answer, UNSUPPORTED
        if isinstance(answer, Replacement):
            refused, cause = self.refused(match, answer, training, cuda)
            if refused is None and not isinstance(answer.op, Op):
                return self.library_call(match, answer, training)
            if refused is None:
                return self.op_call(match, answer, training, cuda)
        said = refused.reason
        if isinstance(answer, Replacement) and answer.op is not rule:
            said = f"{answer.otherwise}: {answer.why}; {said}"
        if not isinstance(rule, Op) or not self.inlines(match, rule, refused, training, cuda):
            open_to_doubt = cause == UNPROFITABLE and not isinstance(refused, Settled)
            if open_to_doubt and (self.evidence.wanted or self.evidence.won(match)):
                doubt = dataclasses.replace(refused, reason=said)
                return self.op_call(match, answer, training, cuda, doubt=doubt)
            return Decision(match, False, said, cause=cause)
        own = Replacement(rule, tuple(match.arguments[p.name] for p in rule.params))
        return self.op_call(match, dataclasses.replace(own, why=said), training, cuda, "reference")

    def refused(
        self, match: Match, answer: Replacement, training: bool, cuda: bool
    ) -> tuple[Reject | None, str | None]:
        """Why the replacement does not take the site, and the cause."""
        op = answer.op
        if op is match.pattern:
            if op.kernel_fn is None:
                return Reject("no kernel yet"), NO_KERNEL
            refused = seedless(match, op)
        else:
            refused = self.other_op_refused(match, answer, training)
        if refused is not None:
            return refused, UNSUPPORTED
        if not isinstance(op, Op):
            return None, None
        in_torch = op.kernel_fn is None  # a formula or a gradient, for Inductor to compile
        if not cuda and not (in_torch and self.options.gate == "always"):
            why = "it has been timed on CUDA only" if in_torch else "the kernel needs CUDA tensors"
            return Reject(why), NO_GPU
        values = [*by_name(op, *values_of(answer)).values()]
        if (refused := op.answer("guard", *values)) is not None:
            return refused, UNSUPPORTED
        if self.options.gate != "always":
            refused = self.not_worthwhile(match, op, values, training)
        if refused is None and answer.at_last is not None:
            return answer.at_last(), UNSUPPORTED
        return refused, UNPROFITABLE

    def other_op_refused(self, match: Match, answer: Replacement, training: bool) -> Reject | None:
        ours = isinstance(answer.op, Op)
        keeps = answer.op.backward_result if ours else True  # an operator of torch's may
        if training and keeps and self.legality.written_to(match.roots):
            return Reject("its result, which the backward reads, is written to afterwards")
        if ours and draws_random_numbers(match) and SEED not in answer.args:
            return Reject("it draws random numbers and its replacement takes no seed")
        return None

    def not_worthwhile(self, match: Match, op: Op, values: list, training: bool) -> Reject | None:
        """Why the op is not faster here, by the tables of the op and by its neighbours."""
        if op.narrows and op is match.pattern and self.legality.narrow(match):
            return NARROWED
        around = Neighbours(match, self.legality.unread(match), self.facts.view.lies_otherwise)
        if isinstance(op, Extension):
            refused = around.beside_extension(self.canon, training)
        else:
            refused = match.pattern.answer("neighbours", around, training)
        if refused is not None:
            return refused
        refused = op.answer("worthwhile", *values, training)
        if refused is not None and not isinstance(refused, BackwardOnly):
            return refused
        fusable = around.fusable(self.canon, op.inductor, training) if op.inductor else None
        if fusable is not None and not isinstance(fusable, BackwardOnly):
            return fusable
        return refused or fusable

    def inlines(self, match: Match, op: Op, refused: Reject, training: bool, cuda: bool) -> bool:
        """Is the reference of the rule's own op written into the graph, for Inductor to compile?"""
        random = draws_random_numbers(match)
        if not cuda and self.options.gate == "always" and not (random and op.seeded_fn is None):
            return True
        pays = isinstance(refused, BackwardOnly) and training and op.can_inline_forward
        # dropout in torch is slow
        return pays and not random and self.backward_provider(op, cuda) != "vjp"

    def backward_provider(self, op: Op, cuda: bool) -> str:
        if op.backward_fn is None:
            return "vjp"
        return "formula" if op.backward_plain else "kernel" if cuda else "vjp"

    def library_call(self, match: Match, answer: Replacement, training: bool) -> Decision:
        """Decide for a torch operator, of which Inductor and torch compute forward and backward."""
        try:
            call = call_of_torch(answer)
        except Exception as error:
            told = f"{answer.op} refuses it: {type(error).__name__}: {error}"
            return Decision(match, False, told, cause=UNSUPPORTED)
        backward = "autograd" if training else None
        return self.checked(Decision(match, True, answer.why, "library", backward, call))

    def op_call(
        self,
        match: Match,
        answer: Replacement,
        training: bool,
        cuda: bool,
        forward: str = "",
        doubt: Reject | None = None,
    ) -> Decision:
        """Decide for an op of ours, which first runs on fake tensors. Its kernels are compiled
        here, unless a measurement does that.
        """
        op = answer.op
        forward = forward or ("kernel" if op.kernel_fn else "reference")
        backward = self.backward_provider(op, cuda) if training else None
        chosen = {"forward": forward, "backward": backward or "vjp", "save": training}
        # a backward of the op's own may read any result
        skips = op.skips and op is match.pattern and chosen["backward"] == "vjp"
        if skips and forward == "kernel" and (unread := self.legality.unread(match)):
            chosen["unread"] = " ".join(map(str, unread))
        if op.narrows and op is match.pattern and (narrow := self.legality.narrow(match)):
            chosen["narrow"] = narrow
        values = by_name(op, *values_of(answer))
        arguments = by_name(op, answer.args, answer.kwargs)
        known = self.evidence.of(match)
        doubt = None if known and known.take else doubt
        decision = Decision(match, True, answer.why, forward, backward, op=op, doubt=doubt)
        try:
            trial = doubt is None and not self.evidence.runs(match)
            decision.call = self.tried_out(op, arguments, values, answer.kwargs, chosen, trial)
        except Exception as error:
            if doubt is not None:
                return Decision(match, False, doubt.reason, cause=UNPROFITABLE)
            told = of_kernel(error)
            return Decision(match, False, told, cause=FAILED, failure=told)
        return self.checked(decision, own=op is match.pattern)

    def tried_out(
        self, op: Op, arguments: dict, values: dict, named, chosen: dict, compiles: bool
    ) -> Call:
        """Run the op on fakes, and compile its kernels. The layers of a model are alike."""
        key = (op.name, compiles, *chosen.values(), *((k, geometry(v)) for k, v in values.items()))
        if key in self.tried:
            mode = next(v for v in values.values() if isinstance(v, torch.Tensor)).fake_mode
            with mode:
                known = tuple(
                    torch.empty_strided(shape, stride, dtype=dtype, device=device)
                    for dtype, device, shape, stride in self.tried[key]
                )
            return written(op, arguments, named, chosen, known)
        call = call_of_op(op, arguments, values, named, chosen)
        kernel = "kernel" in (chosen["forward"], chosen["backward"])
        if compiles and kernel and torch.cuda.is_available() and TARGET.get() is None:
            compile_kernels(self.trials, op, values, call, chosen)
        given = {storage_id(v) for v in values.values() if isinstance(v, torch.Tensor)}
        if not any(storage_id(out) in given for out in call.values):
            self.tried[key] = [(o.dtype, o.device, o.shape, o.stride()) for o in call.values]
        return call

    def checked(self, decision: Decision, own: bool = False) -> Decision:
        """The decision, or a refusal if the results of the call cannot replace the site's."""
        match, call = decision.match, decision.call
        if wrong := differs(call, match, own):
            return Decision(match, False, wrong, cause=UNSUPPORTED)
        call.copied = to_copy(call, match, self.facts.writers)
        if own and call.copied and self.options.gate != "always" and not self.evidence.won(match):
            if not self.evidence.wanted:
                return Decision(match, False, COPIED.reason, cause=UNPROFITABLE)
            decision.doubt = decision.doubt or COPIED
        return decision
