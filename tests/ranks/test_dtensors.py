"""Weights and logits that are DTensors keep the gradients of torch's own operators."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fusion_backend
from fusion_backend.rewrite import embeddings, returned

CLASSES, WIDTH = 320, 16


class Model(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.words = nn.Parameter(words)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids, x):
        logits = F.embedding(ids, self.words) @ self.words.t()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits, self.norm(x)


def test_a_graph_with_dtensors_keeps_its_sites(alone, monkeypatch):
    monkeypatch.setattr(embeddings, "LARGE", 1)
    monkeypatch.setattr(embeddings, "on_gpu", lambda t: True)
    monkeypatch.setattr(returned, "LARGE", 1)
    mesh = init_device_mesh("cpu", (1,))
    words = torch.randn(CLASSES, WIDTH).bfloat16()
    model = Model(distribute_tensor(words, mesh, [Shard(0)]))
    ids = distribute_tensor(torch.arange(64).view(2, 32), mesh, [Replicate()])
    x = torch.randn(4, WIDTH)
    call = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    found = []
    for each in (call, model):
        model.zero_grad()
        loss, logits, y = each(ids, x)
        (loss.to_local() + logits.to_local().float().square().mean() + y.sum()).backward()
        found.append(model.words.grad.to_local())
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)
    (graph,) = fusion_backend.report().graphs
    assert not graph.error and any(s.fused for s in graph.sites)
    assert not graph.embeddings and not graph.from_outside
