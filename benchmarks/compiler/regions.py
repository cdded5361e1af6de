"""The regions in which the gate would measure the sites of a graph, and whether each site computes
there what its region does.
"""

from __future__ import annotations

import functools

import torch

from fusion_backend.capture.tracer import capture
from fusion_backend.compat.torch import fake_mode_of, no_new_guards, refusals_unlogged
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.kernels.common.target import as_on, gpu
from fusion_backend.measure.agreement import Value, disagreement
from fusion_backend.measure.cut import Cut
from fusion_backend.measure.derived import passed_on
from fusion_backend.measure.inputs import made_up
from fusion_backend.measure.judge import Judge, cut_of
from fusion_backend.measure.region import regions
from fusion_backend.options import Options
from fusion_backend.pipeline import Scope, analyse, decide, match, scope_of
from fusion_backend.reporting.records import GraphRecord

CPU = torch.device("cpu")


def scopes(fn, *inputs, options: Options | None = None, dynamic=None) -> list[Scope]:
    """The decided scopes of the graphs of a function, without a judge."""
    found: list[Scope] = []

    def backend(gm, example_inputs):
        with refusals_unlogged(), no_new_guards(fake_mode_of(gm)):
            top = scope_of(capture(gm))
            chosen = options or Options(gate="always")
            analyse(top, chosen)
            match(top, usable(patterns()), chosen)
            decide(top, chosen, Judge(chosen, GraphRecord(0), False))
        found.append(top)
        return gm.forward

    torch.compiler.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    return found


def disagreements(fn, *inputs, dynamic=None) -> list[str]:
    """Where a site, decided as for an H200, computes something else than its region, on the inputs
    that the gate makes up for it. The gate would leave such a site to Inductor. Regions that are
    alike are compared once; operators run one by one, on a CPU, where kernels are plain torch code.
    """
    with as_on(gpu("H200")):
        cuts = {}
        for top in scopes(fn, *inputs, dynamic=dynamic):
            for region in regions(top.facts, [d for d in top.decisions if d.fused]):
                found = cut_of(top.gate, region)
                cuts.setdefault(found.text(), found)
    return [words for cut in cuts.values() if (words := differing(cut))]


def differing(cut: Cut) -> str:
    """How results or gradients of the region differ with its sites replaced; "" if they agree."""
    inputs = made_up(cut, CPU)
    plain, ours = (values_of(cut, sites, inputs) for sites in ([], cut.region.sites))
    dtypes = {v.value.dtype for v in plain if v.value is not None}
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    words = disagreement(ours, plain, functools.partial(values_of, cut, [], inputs), coarsest)
    names = ", ".join(d.match.pattern.name for d in cut.region.sites)
    return words and f"{names}: {words}"


def values_of(cut: Cut, sites: list, inputs: list[torch.Tensor]) -> list[Value]:
    """Results and gradients of a region with these sites replaced, operator by operator."""
    with torch.set_grad_enabled(bool(cut.grads)):
        results = [*cut.graph(sites)(*inputs)]
    wanted = [t for t in inputs if t.requires_grad]
    trained = [t for t in results if t.requires_grad]
    gradients = []
    if wanted and trained:
        torch.manual_seed(0)
        tangents = [torch.randn_like(t) for t in trained]
        gradients = [*torch.autograd.grad(trained, wanted, tangents, allow_unused=True)]
        gradients = passed_on(cut, inputs, gradients)
    named = [(f"result {i}", t) for i, t in enumerate(results)]
    named += [(f"gradient {i}", t) for i, t in enumerate(gradients)]
    return [Value(name, t) for name, t in named if t is None or t.is_floating_point()]
