"""Two processes train with FSDP2 and tensor parallelism: the losses are those of eager, and
sites are fused.
"""

import pytest

from .trainings import JOBS, STEPS

# What is fused: in all of the model, or where it is cut at its blocks, which it calls in a loop, in
# these. Under tensor parallelism what reads a DTensor is no site, here the linear layers.
BLOCK = {"attention", "gelu"}
WHOLE = {*BLOCK, "cross_entropy"}
FUSED = {name: WHOLE if name == "tensor parallel" else BLOCK for name in JOBS}
NORMS = {"layer_norm", "add_layer_norm", "norm_linear"}


@pytest.mark.parametrize("job", JOBS)
def test_the_losses_are_those_of_eager(ranks, job):
    rel = 2e-3 if "mixed" in job else 1e-5
    for seen in ranks:
        eager, ours = (seen["trainings"][job, backend] for backend in ("eager", "fusion"))
        assert len(ours["losses"]) == STEPS and not ours["errors"]
        assert ours["losses"] == pytest.approx(eager["losses"], rel=rel)
        first, _, third, _ = eager["losses"]
        assert abs(third / first - 1) > 10 * rel  # the same batch, after two steps


@pytest.mark.parametrize("job", JOBS)
def test_sites_are_fused_on_both_ranks_alike(ranks, job):
    one, other = (seen["trainings"][job, "fusion"]["fused"] for seen in ranks)
    assert one == other and {*one} - NORMS == FUSED[job] and {*one} & NORMS
