"""Large graphs: cost grows linearly, nothing recurses as deep as the graph, nothing is
forgotten.
"""

import gc
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.compiler.matching import cost
from benchmarks.compiler.synthetic import chain, decoder
from fusion_backend import explain
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.options import parse
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.records import GraphRecord
from fusion_backend.testing import fused_nodes
from tests.machine import slowness

# Milliseconds for reading and matching a node (benchmarks.match_cost) on an idle machine, which
# takes 0.05 to 0.15.
LIMIT_MS = 0.3
STEPS = {
    "add": torch.add,
    "mul": torch.mul,
    "div": lambda x, y: x / 3.0,
    "constants": lambda x, y: x * 1.5 * 2.0,
    "maximum": torch.maximum,
    "sites": lambda x, y: (x + y) * y,
    "sin": lambda x, y: torch.sin(x),
    "squeezes": lambda x, y: x.unsqueeze(0).squeeze(0),
    "transposes": lambda x, y: x.t() + y,
    "casts": lambda x, y: x.to(torch.bfloat16).to(torch.float32) + y,
}


def passed(gm: torch.fx.GraphModule):
    """The whole pass over a graph: what comes out, what is reported, and the CPU seconds that it
    took this thread.
    """
    options, _ = parse({"fusion.gate": "always"}, [p.name for p in patterns()])
    record = GraphRecord(0)
    gc.collect()  # not in between: the tests before leave much behind
    started = time.thread_time()
    new, _ = fuse_graph(gm, options, record, usable(patterns()))
    return new, record, time.thread_time() - started


@pytest.fixture(scope="module", autouse=True)
def traced():
    """No test pays for the tracing of the patterns."""
    passed(decoder(1))


def test_matching_is_linear_and_fast():
    small, large = cost(decoder(14), 3), cost(decoder(56), 3)
    per_node = [(c["read"] + c["match"]) * 1e3 / c["nodes"] for c in (small, large)]
    assert large["sites"] == pytest.approx(4 * small["sites"], abs=8)
    assert max(per_node) < LIMIT_MS * slowness(), per_node
    assert per_node[1] < 2 * per_node[0], per_node


@pytest.mark.parametrize("step", STEPS)
def test_deep_chains(step):
    """A chain is deeper than Python's stack; four times the nodes cost about four times
    the time.
    """
    short, long = (passed(chain(STEPS[step], n)) for n in (400, 1600))
    sites = [sum(s.fused for s in record.sites) for _, record, _ in (short, long)]
    assert sites == ([400, 1600] if step == "sites" else [0, 0])
    assert [len(fused_nodes(gm)) for gm, _, _ in (short, long)] == sites
    most = 4 * 2.5 * short[2] + 0.1
    # once more: it may be somebody else's load
    assert long[2] < most or passed(chain(STEPS[step], 1600))[2] < most


def test_one_tensor_written_to_again_and_again():
    def model(x):
        y = x + 1
        for _ in range(1500):
            y.mul_(2)
        return y

    from benchmarks.compiler.synthetic import graph

    _, record, seconds = passed(graph(model, [(4, 4)]))
    assert record.error is None and seconds < 15


class Nested(nn.Module):
    """Checkpoints in checkpoints, with a site in each."""

    def __init__(self, depth: int):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = Nested(depth - 1) if depth else nn.Identity()

    def forward(self, x):
        return checkpoint(self.inner, self.norm(x), use_reentrant=False) + x


def test_higher_order_operators_within_each_other():
    report = explain(
        Nested(12), torch.randn(2, 8, requires_grad=True), options={"fusion.gate": "always"}
    )
    assert [g.error for g in report.graphs] == [None]
    assert sum("layer_norm" in s.pattern for s in report.fused) == 13
