"""explain decides with the options of Inductor that it is given."""

import pytest
import torch

from fusion_backend import explain
from fusion_backend.compat.torch import inductor_config
from fusion_backend.frontends import explain as explaining


@pytest.mark.parametrize("asked", [True, False])
def test_inductors_options_hold_while_it_decides(asked, monkeypatch):
    seen, fuse = [], explaining.fuse_graph

    def noted(*args, **kwargs):
        seen.append(inductor_config.triton.cudagraphs)
        return fuse(*args, **kwargs)

    monkeypatch.setattr(explaining, "fuse_graph", noted)
    explain(torch.sin, torch.ones(3), options={"triton.cudagraphs": asked})
    assert seen == [asked]
    with pytest.raises(Exception, match="Unexpected optimization option"):
        explain(torch.sin, torch.ones(3), options={"triton.cuda_graphs": asked})
