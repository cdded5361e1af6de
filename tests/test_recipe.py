"""The recipe by which a rewritten graph is written again: what it may name, and constants."""

import json
import operator

import pytest
import torch
from torch import nn

from fusion_backend.rewrite.recipe import NoRecipe, read_back, rebuilt, recipe_of, target_of


def test_a_recipe_names_operators_of_aten_and_ours_alone():
    for name in ("os.system", "prim.device.default", "profiler._record_function_enter.default"):
        with pytest.raises(NoRecipe):
            target_of(name)
    assert target_of("getitem") is operator.getitem
    assert target_of("aten.add.Tensor") is torch.ops.aten.add.Tensor
    with pytest.raises(NoRecipe):
        read_back(["dtype", "nn"], [])


def test_a_constant_in_place_of_a_node_is_written_down():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.add, (x, x), {"alpha": 2})
    graph.output(y)
    source = torch.fx.GraphModule(nn.Module(), graph)
    new = torch.fx.Graph()
    a = new.placeholder("x")
    b = new.call_function(torch.add, (a, 3.5), {"alpha": 2}, name=y.name)
    new.output(b)
    rewritten = torch.fx.GraphModule(nn.Module(), new)
    nodes = zip(new.nodes, graph.nodes, strict=True)
    origins = {rewritten: {n: (d, True) for n, d in nodes}}
    recipe = json.loads(json.dumps(recipe_of(rewritten, source, origins)))
    assert rebuilt(recipe, source).code == rewritten.code
