"""Rules of losses of rows of logits against probabilities: cross entropy with soft targets, and the
Kullback-Leibler divergence.

Their terms, one for each class, are one operator: of the logits x and their scale, and of the
probabilities (given, or a teacher's logits and their scale). The attribute says what is added up.
"""

from __future__ import annotations

from fusion_backend.capture.sizes import same
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr, graph_value, is_const, peel
from fusion_backend.ir.rules import composite, rule
from fusion_backend.ir.rules_loss import REDUCTIONS, is_negation, normalised
from fusion_backend.ir.rules_shape import of_rows, undetached
from fusion_backend.ir.schema_args import Call
from fusion_backend.ir.scores import without_factor

TERMS = "terms_of_soft_loss"
SIGNS = {"-p log q": "p log q", "p log q": "-p log q"}


def terms_of(
    c: Builder, log_q: Expr, target: Expr, attr: str, shape, more: tuple[Expr, ...] = ()
) -> Expr | None:
    """Of log-probabilities; None of anything else. target: probabilities; their logarithm if attr
    begins with e^t.
    """
    logits, target = logits_of(c, log_q), peel(target)
    if logits is None or not same(target.shape, shape) or not same(logits.shape, shape):
        return None
    logarithm, teacher = attr.startswith("e^t"), None
    if logarithm:
        teacher = logits_of(c, target)
    elif not more:
        teacher = of_softmax(c, target)
    if teacher is not None:
        operands = (*with_scale(c, logits), *with_scale(c, teacher))
        return c.make(TERMS, operands, f"{attr}, of a teacher", shape)
    if logarithm or logits_of(c, target) is not None:  # as in (log q)²
        return None
    return c.make(TERMS, (*with_scale(c, logits), target, *more), attr, shape)


def logits_of(c: Builder, e: Expr) -> Expr | None:
    """x of log_softmax(x) or x - logsumexp(x), over the last dimension."""
    e = peel(e)
    if e.op not in ("log_softmax", "add"):  # asked about every product
        return None
    logits, total, _ = normalised(c, e, -1, True)
    return logits if total is not None and total[1] == "dimension -1" else None


def of_softmax(c: Builder, e: Expr) -> Expr | None:
    """x of softmax(x) over the last dimension."""
    e = peel(e)
    here = (e.op, e.attr, e.state) == ("softmax", -1, c.state) and e.shape is not None
    return graph_value(e.args[0]) if here else None


def with_scale(c: Builder, x: Expr) -> tuple[Expr, Expr]:
    """x and the number that multiplies it, inside a cast or not."""
    inner, number = without_factor(peel(x))
    if number is None:
        return x, c.const(1.0)
    return inner, c.const(number) if isinstance(number, float) else number


@rule("aten::kl_div")
def divergence(
    c: Builder, call: Call, self: Expr, target: Expr, reduction: int, log_target: bool
):  # fmt: skip
    if self.shape is None or not self.shape:
        return None
    attr = "e^t (t - log q)" if log_target else "p (log p - log q)"
    terms = terms_of(c, self, target, attr, self.shape)
    if terms is None or REDUCTIONS[reduction] == "none":
        return terms
    return c.reduce(REDUCTIONS[reduction], terms, None, False, call.shape)


@rule("aten::cross_entropy_loss")
def soft_cross_entropy(
    c: Builder, call: Call, self: Expr, target: Expr, weight: Expr | None, label_smoothing: float
):
    """Of probabilities as targets, over the last of two dimensions."""
    if not call["target"].dtype.is_floating_point or call["self"].dim() != 2:
        return None
    grad_mode = not c.state or c.state[0]
    if weight is not None and grad_mode and undetached(weight) is peel(weight):
        if any(map(c.trains, weight.nodes)):  # beside probabilities it has a gradient
            return None
    smoothing = c.const(label_smoothing)
    smoothed = () if is_const(smoothing) and not smoothing.attr else (smoothing,)
    more = (*(() if weight is None else (undetached(weight),)), *smoothed)
    words = ["-p log q", *(["weighted"] if weight is not None else [])]
    words += ["smoothed"] if smoothed else []
    reduction = REDUCTIONS[call["reduction"]]
    if reduction != "none":  # whatever shape the rows had before
        unflattened = of_rows(c, self), of_rows(c, target)
        if same(*(e.shape for e in unflattened)):
            self, target = unflattened
    log_q = c.make("log_softmax", (self,), -1, self.shape)
    terms = terms_of(c, log_q, target, ", ".join(words), self.shape, more)
    if terms is None:
        return None
    if reduction == "none":
        return c.reduce("sum", terms, [-1], False, call.shape)
    if reduction == "sum":
        return c.reduce("sum", terms, None, False, ())
    return c.make("mean_of_rows", (terms,), None, ())


@composite("squeeze")
def over_everything(c: Builder, x: Expr, shape):
    """A sum or mean of all terms, of however many dimensions."""
    if x.op not in ("sum", "mean") or shape != () or peel(x.args[0]).op != TERMS:
        return None
    return c.make(f"{x.op}_of_everything", (peel(x.args[0]),), None, shape)


@composite("mul")
def product_with_log_probabilities(c: Builder, x: Expr, y: Expr, shape):
    """p · log q, and p (log p - log q), whose p may be the exponential of log p."""
    if shape is None:
        return None
    for one, other in ((x, y), (y, x)):
        if is_const(other) and other.attr == -1.0 and one.op == TERMS:
            sign, comma, more = one.attr.partition(",")
            if sign not in SIGNS or one.state != c.state:
                return None
            return c.make(TERMS, one.args, SIGNS[sign] + comma + more, shape)
        log = peel(other)
        if logits_of(c, log) is not None:
            sign, target = "p log q", one
            if is_negation(target):
                sign, target = "-p log q", next(a for a in target.args if not is_const(a))
            return None if is_const(target) else terms_of(c, log, target, sign, shape)
        if log.op == "add" and (found := of_difference(c, one, log, shape)) is not None:
            return found
    return None


def of_difference(c: Builder, p: Expr, difference: Expr, shape) -> Expr | None:
    """p (log p - log q), with p the softmax of which log p is the logarithm."""
    p = peel(p)
    if p.op not in ("softmax", "exp"):
        return None
    for log_p, minus in (difference.args, difference.args[::-1]):
        minus, log_p = peel(minus), peel(log_p)
        if not is_negation(minus):
            continue
        log_q = next(a for a in minus.args if not is_const(a))
        if p.op == "exp":
            same_one = peel(p.args[0]) is log_p
        else:
            teacher, logits = of_softmax(c, p), logits_of(c, log_p)
            same_one = None not in (teacher, logits) and peel(teacher) is peel(logits)
        if same_one:
            return terms_of(c, log_q, log_p, "e^t (t - log q)", shape)
    return None
