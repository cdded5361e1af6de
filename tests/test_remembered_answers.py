"""Of a remembered graph: the measured answers that it rests on, and the kernels it launches."""

import dataclasses
import datetime
import json

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fusion_backend.frontends.loading import patterns
from fusion_backend.kernels.common import launch as launching
from fusion_backend.kernels.common.reachable import kernels_of
from fusion_backend.measure import store
from fusion_backend.ops.operator import call
from fusion_backend.ops.registry import OPS

from .measured_cases import as_on_a_gpu
from .test_remembered import again, entry_of, memory, once

assert memory  # the fixture, which every test here uses


def causal(q, k, v):
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sin()


QKV = [torch.randn(2, 2, 6, 8) for _ in range(3)]
GATE = {"gate": "auto", "measure_s": 20.0}


def measured(monkeypatch, tmp_path):
    return as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5)


def test_a_graph_is_kept_once_all_of_it_is_measured(monkeypatch, tmp_path):
    with measured(monkeypatch, tmp_path) as stub:
        (first,), _ = once(causal, *QKV, **GATE)
        assert first.measured == 1 and not first.remembered
        (second,), _ = once(causal, *QKV, **GATE)
        assert second.remembered and second.measured == 0 and len(stub.asked) >= 1
        assert [s.reason for s in first.sites] == [s.reason for s in second.sites]
        assert "measured today" in second.sites[0].reason


@pytest.mark.parametrize("why", ["noise", "time"])
def test_a_graph_with_something_left_to_measure_is_not_kept(why, monkeypatch, tmp_path):
    options = GATE | ({"measure_s": 1e-9} if why == "time" else {})
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: (0.5, 1.0)):
        for _ in range(2):
            assert not again(causal, *QKV, **options)


def test_an_answer_that_changes_is_heard(monkeypatch, tmp_path):
    with measured(monkeypatch, tmp_path):
        once(causal, *QKV, **GATE)
        assert again(causal, *QKV, **GATE)
        (answer,) = store.store().all()
        store.store().put(dataclasses.replace(answer, take=("",), verdict="slower", ratio=0.5))
        (record,), _ = once(causal, *QKV, **GATE)
        assert not record.remembered and not any(s.fused for s in record.sites)
        assert again(causal, *QKV, **GATE)
        store.store().clear()
        (record,), _ = once(causal, *QKV, **GATE)
        assert not record.remembered and record.measured == 1


def test_answers_that_come_where_there_were_none_are_heard(monkeypatch, tmp_path):
    options = GATE | {"measure_s": 0.0}
    with measured(monkeypatch, tmp_path):
        once(causal, *QKV, **options)
        assert again(causal, *QKV, **options)
        once(causal, *QKV, **GATE)  # measures, and keeps its answer
        (record,), _ = once(causal, *QKV, **options)
        assert not record.remembered and "measured today" in record.sites[0].reason


def test_yesterdays_measurement_is_not_called_todays(monkeypatch, tmp_path, memory):
    with measured(monkeypatch, tmp_path):
        once(causal, *QKV, **GATE)
        file = entry_of(memory)
        kept = json.loads(file.read_text())
        kept["date"] = (datetime.date.today() - datetime.timedelta(1)).isoformat()
        file.write_text(json.dumps(kept))
        (record,), _ = once(causal, *QKV, **GATE)
        assert record.remembered
        assert f"measured on {kept['date']}" in record.sites[0].reason


@pytest.mark.parametrize(
    "name", ["layer_norm", "softmax", "group_norm", "cross_entropy", "add_mul"]
)
def test_the_kernels_of_an_op_are_found_in_its_code(name, monkeypatch):
    launched = []

    def interpreted(kernel):
        launched.append(kernel)
        return True

    monkeypatch.setattr(launching, "interpreted", interpreted)
    patterns()
    op = OPS[name]
    inputs = op.inputs_fn(lambda *shape: torch.randn(*shape).requires_grad_(), **op.cases[0])
    call(op, tuple(inputs)).float().sum().backward()
    assert launched and {*launched} <= kernels_of([op.kernel_fn, op.backward_fn])


@triton.jit
def own_kernel(X):
    tl.store(X, 1.0)


def own_launcher(x):
    own_kernel[(1,)](x)


def test_the_kernels_of_a_helper_beside_a_function_are_found():
    assert kernels_of([lambda x: own_launcher(x), None]) == {own_kernel}
